"""A log as its summary, a diagnosis as a table of its findings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_lab.base.errors import UsageError
from hicache_lab.base.markdown import fenced
from hicache_lab.forensics.incident import Diagnosis, Facts
from hicache_lab.forensics.logs.collect import Log
from hicache_lab.forensics.logs.summary import to_json, to_text
from hicache_lab.views.cells.blocks import table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from hicache_lab.views.figures import Theme

_FINDINGS = ("cause", "role, confidence", "what happened", "do", "first line")


def markdown(record: Diagnosis | Log) -> str:
    """Causes first, each with what to do and the first line that shows it; of a log, what ``parse`` prints."""
    if isinstance(record, Log):
        return fenced(to_text(record))
    rows = []
    for finding, _ in record.grouped():
        shown = next(iter(finding.evidence), None)
        line = f"{Path(shown.file).name}:{shown.line}" if shown else ""
        role = f"{finding.role}, {finding.confidence}"
        rows.append((finding.cause, role, finding.explanation, finding.remedy, line))
    return table(_FINDINGS, rows) if rows else f"no finding in {record.lines:,} lines"


def plot(record: Diagnosis | Log, theme: Theme = "light") -> Figure:
    """Memory over time with what happened, or what happened alone."""
    from hicache_lab.views.figures import incident_figure

    facts = Facts(record) if isinstance(record, Log) else record.facts
    figure = incident_figure(facts, source="measured", theme=theme)
    if figure is None:
        raise UsageError("plot: nothing in these files carries a time")
    return figure


def to_dict(record: Diagnosis | Log) -> dict[str, Any]:
    """What ``parse --json`` and ``diagnose --json`` print."""
    return to_json(record) if isinstance(record, Log) else record.to_json()
