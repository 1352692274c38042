"""What the documents say is so: commands give the output they show, tables name what exists, links lead somewhere."""

import doctest
import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from test_layers import WINGS

import hicache_lab as hl
from hicache_lab.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))
README = (ROOT / "README.md").read_text()
# "$ command" with its continuation lines, then what it prints
CONSOLE = re.findall(r"```console\n\$ (.*?[^\\])\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), CONSOLE, ids=[command.split()[1] for command, _ in CONSOLE])
def test_the_readmes_commands_print_what_it_shows(
    capsys: pytest.CaptureFixture[str], command: str, output: str
) -> None:
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "hicache-lab"
    main(words[1:])
    assert capsys.readouterr().out == output


def test_the_readme_shows_commands() -> None:
    assert len(CONSOLE) >= 2


def test_the_first_screen_has_the_numbers_of_the_incident() -> None:
    screen = "\n".join(README.splitlines()[:40])
    for number in ("2,400 GB", "449 GB", "439 GB", "54.28 GB", "434.26 GB"):
        assert number in screen, number


def test_the_notebook_table_is_the_notebooks_folder() -> None:
    rows = dict(re.findall(r"^\| \[\w+\]\(notebooks/(\w+)\.ipynb\) \| (.*) \|$", README, re.MULTILINE))
    titles = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        titles[path.stem] = nbformat.read(path, as_version=4).cells[0].source.splitlines()[0].removeprefix("# ")
    assert rows == titles


def test_the_command_table_names_every_command() -> None:
    table = "\n".join(line for line in README.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z-]+)`", table)) == set(COMMANDS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_make_targets_exist(path: Path) -> None:
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (path.parent / link).exists(), link
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"`make ([a-z0-9-]+)|^    make ([a-z0-9-]+)", text, re.MULTILINE)
    assert {one or other for one, other in commands} <= targets


def test_the_readmes_python_gives_what_it_shows() -> None:
    blocks = re.findall(r"```python\n(>>> .*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        result = doctest.DocTestRunner().run(doctest.DocTestParser().get_doctest(block, {}, "README.md", None, None))
        assert (result.attempted >= 4, result.failed) == (True, 0)


def test_the_api_page_is_written_from_the_docstrings() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == api_docs().api_markdown(), "make docs writes it anew"


def test_the_api_page_names_what_the_door_offers() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    functions = {name for name in hl.__all__ if not isinstance(getattr(hl, name), ModuleType | type)}
    assert set(re.findall(r"^### `(\w+)`$", page.split("## What they return")[0], re.MULTILINE)) == functions


def test_no_module_or_class_bears_a_word_that_was_replaced() -> None:
    rows = re.findall(r"^\| .* \| .* \| (.+) \|$", (ROOT / "docs" / "terms.md").read_text(), re.MULTILINE)
    replaced = {word for row in rows for word in row.replace("-", "").split(", ") if re.fullmatch("[a-z]+", word)}
    assert {"casefile", "payoff", "teller", "story"} <= replaced
    names = {path.stem for path in (ROOT / "hicache_lab").rglob("*.py")}
    for path in (ROOT / "hicache_lab").rglob("*.py"):
        names |= {name.lower() for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}
    # the replay of a trace keeps its name
    assert names & replaced <= {"replay"}


def api_docs() -> Any:
    """The script that writes the page, as a module."""
    spec = importlib.util.spec_from_file_location("api_docs", ROOT / "scripts" / "api_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_structures_is_short_and_is_the_layer_table() -> None:
    text = (ROOT / "docs" / "structures.md").read_text()
    assert len(text.splitlines()) <= 80
    table = text.split("\n\n")[2]
    assert [line.split()[0] for line in table.splitlines()] == list(WINGS)


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert len(text.splitlines()) > 190
