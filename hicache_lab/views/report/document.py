"""A document as a list of blocks, written as Markdown and as HTML; all text in it is plain and is escaped.

Log lines, model names and paths come from outside, so no block takes markup.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hicache_lab.base.errors import HostError
from hicache_lab.base.files import atomic_write
from hicache_lab.base.markdown import escape_markdown, fenced, markdown_table, printable_text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; level 2 begins a section."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells below a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Text kept as it is: commands and log excerpts."""

    text: str


@dataclass(frozen=True, slots=True)
class Room:
    """Room for people: what only they know."""

    prompt: str


@dataclass(frozen=True, slots=True)
class FigureBlock:
    """A figure: interactive in HTML; in Markdown an image, or the caption and a line of blocks, stands for it.

    ``file`` is what was drawn, relative to the document: an image is shown, an HTML figure is linked to.
    """

    figure: Any
    caption: str
    sketch: str = ""
    file: str = ""


Block = Heading | Paragraph | Bullets | Table | Code | Room | FigureBlock

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


@dataclass
class Document:
    """A title and its blocks."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    def add(self, *blocks: Block) -> None:
        """Append blocks."""
        self.blocks += blocks

    def to_markdown(self) -> str:
        """The document as Markdown (tables as GitHub writes them)."""
        parts = [f"# {escape_markdown(self.title)}"] + [_markdown(block) for block in self.blocks]
        return "\n\n".join(part for part in parts if part) + "\n"

    def to_html(self) -> str:
        """The document as one page that fetches nothing; with a figure it holds plotly.js (about 4.5 MB) once."""
        figures = any(isinstance(block, FigureBlock) for block in self.blocks)
        script = ""
        if figures:
            from plotly.offline import get_plotlyjs

            script = f"<script>{get_plotlyjs()}</script>"
        body = "\n".join(_html(block) for block in self.blocks)
        title = html.escape(self.title)
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{title}</title><style>{_STYLE}</style>{script}</head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
        )


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {escape_markdown(block.text)}"
    if isinstance(block, Paragraph):
        return escape_markdown(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {escape_markdown(item)}" for item in block.items)
    if isinstance(block, Table):
        return markdown_table(block.header, block.rows)
    if isinstance(block, Code):
        return fenced(block.text)
    if isinstance(block, Room):
        return f"> ✎ {escape_markdown(block.prompt)}\n>\n> …"
    if block.file:
        image = "" if block.file.endswith(".html") else "!"
        return f"{image}[{escape_markdown(block.caption)}]({quote(block.file)})"
    sketch = f"{fenced(block.sketch)}\n\n" if block.sketch else ""
    return f"{sketch}*{escape_markdown(block.caption)} The interactive figure is in the HTML file.*"


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{_text(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Table):
        return _table_html(block.header, block.rows)
    if isinstance(block, Code):
        return f"<pre>{html.escape(printable_text(block.text))}</pre>"
    if isinstance(block, Room):
        return f'<p><em>{_text(block.prompt)}</em></p><div class="room" contenteditable="true"></div>'
    return f"<figure>{_figure_html(block.figure)}<figcaption>{_text(block.caption)}</figcaption></figure>"


def _text(text: str) -> str:
    return html.escape(printable_text(text))


def _table_html(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figure_html(figure: Figure) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


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
