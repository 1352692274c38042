"""Plain text as Markdown: whatever it holds, nothing in it becomes markup.

Log lines, model names and paths come from outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def escape_markdown(text: str) -> str:
    """Plain text that Markdown shows as it is: nothing in it becomes markup, a link or HTML."""
    text = printable_text(text).replace("\n", " ").strip()
    text = re.sub(r"([\\`*\[\]<>|~&!#$])", r"\\\1", text)
    # underscores inside words stay as they are; at a word's edge they would be emphasis
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    # nothing links by itself either
    text = re.sub(r"(https?|ftp|www)(?=[:.])", r"\1\\", text)
    # at the beginning, a list's mark or a rule
    return re.sub(r"^(\d*)([-+.)])(?=\s|[-\s]*$)", r"\1\\\2", text)


def printable_text(text: str) -> str:
    """Text without control characters; lines stay lines."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text.replace("\t", " ")
    )


def fenced(text: str) -> str:
    """Text kept as it is, in a fence longer than any in it."""
    text = printable_text(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as GitHub writes it; every cell is plain text."""
    lines = [[escape_markdown(cell) for cell in row] for row in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
