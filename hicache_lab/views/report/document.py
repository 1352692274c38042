"""A document: Markdown, and the page that is rendered from it; all text that goes in is plain and is escaped.

Log lines, model names and paths come from outside, so nothing that is added is taken for markup: it is escaped on its
way into the Markdown, and the renderer lets no HTML through.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from hicache_lab.base.errors import HostError
from hicache_lab.base.files import atomic_write
from hicache_lab.base.markdown import escape_markdown, fenced, markdown_table, printable_text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{line-height:1.2}h2{margin-top:2.2rem;border-bottom:1px solid #8886;padding-bottom:.2rem}
table{border-collapse:collapse;width:100%;font-size:.92em;display:block;overflow-x:auto}
th,td{border:1px solid #8886;padding:.3rem .6rem;text-align:left;vertical-align:top}
pre{background:#8882;padding:.7rem;overflow-x:auto;font-size:.85em;white-space:pre-wrap;overflow-wrap:anywhere}
.room{border:1px dashed #888;padding:.6rem;min-height:2.5rem}.room::before{content:"\\270E  ";opacity:.6}
figure{margin:1rem 0}figcaption{font-size:.9em;opacity:.8}
@media print{.room{min-height:5rem}}
"""


class Document:
    """A title and what stands below it."""

    def __init__(self, title: str) -> None:
        self.title = title
        # Markdown, and the HTML of what Markdown cannot say
        self._blocks: list[tuple[str, Callable[[], str] | None]] = []
        self._has_figures = False

    def heading(self, text: str, level: int = 2) -> None:
        """Add a heading; level 2 begins a section."""
        self._blocks.append((f"{'#' * level} {escape_markdown(text)}", None))

    def paragraph(self, text: str) -> None:
        """Add running text."""
        self._blocks.append((escape_markdown(text), None))

    def bullets(self, items: Iterable[str]) -> None:
        """Add a list."""
        self._blocks.append(("\n".join(f"- {escape_markdown(item)}" for item in items), None))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add rows of cells below a header."""
        self._blocks.append((markdown_table(header, rows), None))

    def code(self, text: str) -> None:
        """Add text kept as it is: commands and log excerpts."""
        self._blocks.append((fenced(text), None))

    def room(self, prompt: str) -> None:
        """Add room for people: what only they know."""
        box = '<div class="room" contenteditable="true"></div>'
        self._blocks.append(
            (f"> ✎ {escape_markdown(prompt)}\n>\n> …", lambda: f"<p><em>{_plain(prompt)}</em></p>{box}")
        )

    def figure(self, figure: Figure, caption: str, sketch: str = "", *, file: str = "") -> None:
        """Add a figure: interactive in HTML; in Markdown an image, or the caption and a line of blocks, stands for it.

        Args:
            figure: the figure.
            caption: one sentence.
            sketch: the figure in characters.
            file: what was drawn, relative to the document: an image is shown, an HTML figure is linked to.
        """
        text = f"*{escape_markdown(caption)} The interactive figure is in the HTML file.*"
        if file:
            text = f"{'' if file.endswith('.html') else '!'}[{escape_markdown(caption)}]({quote(file)})"
        elif sketch:
            text = f"{fenced(sketch)}\n\n{text}"

        def page() -> str:
            drawn = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
            return f"<figure>{drawn}<figcaption>{_plain(caption)}</figcaption></figure>"

        self._has_figures = True
        self._blocks.append((text, page))

    def to_markdown(self) -> str:
        """The document as Markdown (tables as GitHub writes them)."""
        parts = [f"# {escape_markdown(self.title)}", *(markdown for markdown, _ in self._blocks)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def to_html(self) -> str:
        """The document as one page that fetches nothing; with a figure it holds plotly.js (about 4.5 MB) once."""
        import mistune

        script = ""
        if self._has_figures:
            from plotly.offline import get_plotlyjs

            script = f"<script>{get_plotlyjs()}</script>"
        render = mistune.create_markdown(escape=True, plugins=["table"])
        body = "\n".join(page() if page else str(render(markdown)) for markdown, page in self._blocks)
        title = _plain(self.title)
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{title}</title><style>{_STYLE}</style>{script}</head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
        )


def _plain(text: str) -> str:
    return html.escape(printable_text(text))


def write_report(document: Document, folder: Path, name: str = "postmortem") -> tuple[Path, Path]:
    """Write ``NAME.md`` and ``NAME.html``; each appears whole or not at all.

    Raises:
        HostError: the folder cannot be written.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, text in ((".md", document.to_markdown()), (".html", document.to_html())):
            path = folder / f"{name}{suffix}"
            atomic_write(path, text)
            written.append(path)
    except OSError as error:
        raise HostError(f"{folder}: cannot be written: {error.strerror}; choose another --output folder") from error
    return written[0], written[1]
