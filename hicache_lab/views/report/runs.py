"""One run of a notebook as a short document: parameters, recorded figures with their sources, and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hicache_lab.runs.results import load_result
from hicache_lab.views.report.document import Document

_ROWS = 20


def run_report(folder: Path) -> Document:
    """The record of a run folder as a document.

    Raises:
        InputError: not a run folder, or a record of another version.
    """
    result = load_result(folder)
    document = Document(f"{result.notebook}: {result.status}")
    document.paragraph(
        f"Started {result.started_at}, {result.seconds:,.1f} s, hicache-lab {result.hicache_lab}, Python "
        f"{result.python}."
    )
    document.heading("Parameters")
    document.table(
        ("name", "value", ""),
        (
            (name, str(value), "given" if name in result.given else "default")
            for name, value in result.parameters.items()
        ),
    )
    document.heading("Figures")
    simple = {name: figure for name, figure in result.figures.items() if not isinstance(figure.value, list | dict)}
    document.table(
        ("figure", "value", "unit", "source"),
        ((name, _shown(figure.value), figure.unit, figure.source) for name, figure in simple.items()),
    )
    for name, figure in result.figures.items():
        if name not in simple:
            document.heading(f"{name} ({figure.source})", 3)
            _add_values(document, figure.value)
    if result.error is not None:
        document.heading("How it ended")
        document.paragraph(f"{result.error.kind}: {result.error.message}")
        document.code(result.error.traceback or result.error.cell_source)
    document.heading("Files")
    document.bullets(result.files)
    return document


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _add_values(document: Document, value: Any) -> None:
    if isinstance(value, dict):
        document.table(("name", "value"), ((str(key), _shown(item)) for key, item in value.items()))
    elif value and all(isinstance(row, dict) for row in value):
        names = list(dict.fromkeys(str(name) for row in value for name in row))
        document.table(names, ([_shown(row.get(name, "")) for name in names] for row in value[:_ROWS]))
    else:
        document.code("\n".join(_shown(item) for item in value[:_ROWS]))
