"""Write docs/api.md from the docstrings of what ``import hicache_lab as hl`` offers (`make docs`)."""

import importlib
import re
from pathlib import Path

import griffe2md
from griffe import GriffeLoader, Parser

ROOT = Path(__file__).parents[1]
HEAD = """\
# The door: `import hicache_lab as hl`

Written from the docstrings by `make docs` (griffe2md); `make test` fails where the two differ. Sizes are bytes where a
name ends in `_bytes`, GB (1e9 bytes) where it ends in `_gb`; a quantity in text has its unit. An unsafe launch is an
answer; what is not understood is an error that names the flag, what was expected and what came.

"""
# what the functions return, in the order one meets it
RECORDS = """
preflight.answer.Answer preflight.answer.Advice preflight.question.Question
forensics.logs.collect.Log forensics.incident.diagnosis.Diagnosis
traffic.traces.trace.Trace traffic.cachesim.curve.HitCurve traffic.cachesim.replay.ReplayResult
runs.comparison.compare.Comparison base.display.Displayed base.display.Rows base.display.Markdown
""".split()
OPTIONS: griffe2md.ConfigDict = {
    "docstring_options": {"returns_multiple_items": False, "returns_named_value": False},
    "docstring_section_style": "list",
    "filters": ["!^_"],
    "heading_level": 3,
    "inherited_members": False,
    "line_length": 100,
    "show_bases": False,
    "show_if_no_docstring": False,
    "show_category_heading": False,
    "show_root_full_path": False,
    "show_object_full_path": False,
    "show_root_heading": True,
    "show_root_members_full_path": False,
    "show_submodules": False,
    "signature_crossrefs": False,
    "summary": False,
}


def api_markdown() -> str:
    """The page."""
    loader = GriffeLoader(search_paths=[ROOT], docstring_parser=Parser.google)
    package = loader.load("hicache_lab")
    offered = set(importlib.import_module("hicache_lab.api").__all__)
    functions = [one for name, one in package["api"].functions.items() if name in offered]
    parts = [
        "## Functions",
        *(griffe2md.render_object_docs(one, OPTIONS | {"separate_signature": True}) for one in functions),
    ]
    parts += ["## What they return", *(griffe2md.render_object_docs(package[place], OPTIONS) for place in RECORDS)]
    text = HEAD + "\n\n".join(parts)
    # links to names that have no page of their own lead nowhere
    text = re.sub(r"\[([^\[\]]+)\]\(#[^)]*\)", r"\1", text).replace("- ****", r"- **\*\*")
    # the renderer leaves runs of empty lines and blanks at line ends
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)).rstrip() + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(api_markdown(), encoding="utf-8")
