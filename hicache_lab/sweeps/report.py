"""A comparison written up for a decision: Markdown, and one HTML file that opens offline."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_lab.base.errors import HostError
from hicache_lab.base.markdown import escape_markdown
from hicache_lab.base.units import GB
from hicache_lab.runs.comparison import Comparison, Recommendation, recommend
from hicache_lab.runs.comparison.text import HEADER, prediction_cells, rows, shown_first, title
from hicache_lab.runs.recording import final_path
from hicache_lab.sweeps.collecting import Collection
from hicache_lab.sweeps.ledger import GRID_COPY, SweepRecord
from hicache_lab.sweeps.rows import planned_tradeoffs, safe_bytes
from hicache_lab.views.figures.comparison import Tradeoff, comparison_figure, hits_figure, tradeoff_figure
from hicache_lab.views.figures.images import WrittenFigures, write_figures
from hicache_lab.views.report.document import Document, write_report

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_PANELS = 6
_CAPTIONS = {
    "settings": "Each setting's median with its interval; every run is a point. Grey: not told from the baseline.",
    "tiers": "Prompt tokens by the tier they were found in, as the server counted them.",
    "tradeoff": "What each setting brings against what it takes from the host; beyond the line the reserve goes.",
}


def comparison_figures(comparison: Comparison, sweep: SweepRecord | None = None) -> dict[str, Figure]:
    """The figures of a report by name: settings, tiers (if recorded), tradeoff (if host memory is known)."""
    figures = {"settings": comparison_figure(comparison, shown_first(comparison)[:_PANELS])}
    tiers = hits_figure(comparison)
    if tiers is not None:
        figures["tiers"] = tiers
    points = tradeoffs(comparison, sweep)
    if comparison.objective and any(point.benefit is not None for point in points):
        cells = [one.cells[comparison.objective] for one in comparison.settings if comparison.objective in one.cells]
        figures["tradeoff"] = tradeoff_figure(
            points,
            safe_bytes=safe_bytes(sweep) if sweep else None,
            ram_bytes=None,
            benefit=f"{comparison.objective} ({cells[0].unit})",
            source=f"{cells[0].source}; host memory computed",
        )
    return figures


def tradeoffs(comparison: Comparison, sweep: SweepRecord | None = None) -> list[Tradeoff]:
    """Settings with their host bytes and objective, those that preflight skipped included."""
    verdicts = {point.label: point.decision.verdict for point in sweep.points} if sweep else {}
    tradeoffs = []
    for setting in comparison.settings:
        cost = setting.cells.get(comparison.cost or "")
        goal = setting.cells.get(comparison.objective or "")
        if cost is not None and goal is not None and cost.unit == "GB":
            verdict = verdicts.get(setting.label, "")
            tradeoffs.append(Tradeoff(setting.label, int(cost.median * GB), goal.median, verdict))
    skipped = [point for point in planned_tradeoffs(sweep) if point.benefit is None] if sweep else []
    return tradeoffs + skipped


def _document(
    collection: Collection,
    comparison: Comparison,
    heading: str,
    written: WrittenFigures | None,
    figures: Mapping[str, Figure],
) -> Document:
    """The report as blocks; ``written`` are the files of the figures, for Markdown."""
    sweep = collection.sweep
    document = Document(heading or (f"Sweep {sweep.label}" if sweep else "Comparison of runs"))
    advice = recommend(comparison)
    document.heading("What to take")
    if advice is None:
        document.paragraph("No figure that decides was recorded; name one with --objective.")
    else:
        document.paragraph(f"Take {advice.reason}.")
        document.paragraph(f"It was chosen by {advice.objective}, among settings that may run on this host.")
    document.room("What was decided, by whom, and what would change it")
    _what(document, comparison, sweep)
    if comparison.left_out:
        document.heading("Not in the comparison")
        document.table(("setting", "why"), comparison.left_out)
    document.heading("Figures")
    for name, figure in figures.items():
        document.figure(figure, _CAPTIONS[name], file=written.files.get(name, "") if written else "")
    if written is not None and written.note:
        document.paragraph(f"{written.note[0].upper()}{written.note[1:]}.")
    document.heading("Tables")
    for name in shown_first(comparison):
        document.heading(title(comparison, name), 3)
        document.table(HEADER, rows(comparison, name))
    if comparison.pairs:
        document.heading("Predicted against observed")
        header = ("setting", "figure", "predicted", "observed", "difference", "unit", "sources")
        numbers = zip(comparison.pairs, prediction_cells(comparison), strict=True)
        sources = "{0.predicted_source} / {0.observed_source}".format
        document.table(header, [(*cells, pair.unit, sources(pair)) for pair, cells in numbers])
    _reading(document, comparison)
    _again(document, comparison, collection)
    return document


def _what(document: Document, comparison: Comparison, sweep: SweepRecord | None) -> None:
    document.heading("What was compared")
    runs = sum(len(setting.runs) for setting in comparison.settings)
    facts = [f"{len(comparison.settings)} settings, {runs} runs; the baseline is {comparison.baseline}."]
    if sweep is not None:
        facts += [
            f"Notebook {sweep.notebook} (sha256 {sweep.notebook_sha256[:12]}…), hicache-lab {sweep.hicache_lab}, "
            f"Python {sweep.python}, begun {sweep.started_at}.",
            f"{sweep.count('complete')} of {len(sweep.points)} points complete, {sweep.failed} failed, "
            f"{sweep.count('skipped')} skipped by preflight.",
        ]
    document.bullets(facts)
    origins = tuple((setting.label, ", ".join(run.origin for run in setting.runs)) for setting in comparison.settings)
    document.table(("setting", "runs"), origins)


def _reading(document: Document, comparison: Comparison) -> None:
    document.heading("How to read it")
    document.bullets(
        (
            "A run is the unit: the median is of runs, the interval a percentile bootstrap over runs "
            f"({comparison.confidence:.0%}).",
            "“inside the noise”: the interval of the difference from the baseline holds zero. “one run”: there is "
            "nothing to tell noise from.",
            "Computed and simulated figures have no noise; measured ones do.",
            *comparison.notes,
        )
    )


def _again(document: Document, comparison: Comparison, collection: Collection) -> None:
    document.heading("Run it again")
    folder, sweep = collection.folder, collection.sweep
    if folder is None or sweep is None:
        words = [*collection.arguments, "--baseline", comparison.baseline]
        words += ["--objective", comparison.objective] if comparison.objective else []
        document.code(shlex.join(["hicache-lab", "compare", *words]))
        return
    folder = final_path(folder)
    words = [sweep.grid or str(folder / GRID_COPY), "--output", str(folder.parent), "--label", folder.name, "--resume"]
    document.paragraph(
        f"{GRID_COPY} is the grid as it was run. Where it was started; complete points are not run again:"
    )
    document.code(shlex.join(["hicache-lab", "sweep", *words]))


def recommendation_text(advice: Recommendation | None) -> str:
    """The advice as Markdown for a notebook; labels are shown as they are and never become markup."""
    if advice is None:
        return "No figure that decides was recorded."
    return f"Take **{escape_markdown(advice.label)}**. {escape_markdown(advice.reason)}."


def write_comparison(
    collection: Collection, comparison: Comparison, target: Path, *, images: bool = True, heading: str = ""
) -> tuple[Path, Path, WrittenFigures | None]:
    """Write ``TARGET.md``, ``TARGET.html`` and the figures beside them.

    Args:
        collection: what was read.
        comparison: of it.
        target: the report's path; a suffix .md or .html is taken off.
        images: also write the figures as files, for Markdown.
        heading: the document's title.

    Raises:
        HostError: the folder cannot be written.
    """
    base = target.with_suffix("") if target.suffix in {".md", ".html"} else target
    figures = comparison_figures(comparison, collection.sweep)
    written = None
    if images:
        folder = base.with_name(f"{base.name}_figures")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(f"{folder}: cannot be made ({error.strerror})") from error
        drawn = write_figures(figures, folder)
        written = WrittenFigures({name: f"{folder.name}/{file}" for name, file in drawn.files.items()}, drawn.note)
    document = _document(collection, comparison, heading, written, figures)
    markdown, page = write_report(document, base.parent, base.name)
    return markdown, page, written
