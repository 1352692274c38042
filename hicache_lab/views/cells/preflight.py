"""A verdict as its block, the largest settings as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_lab.base.errors import UsageError
from hicache_lab.base.markdown import fenced
from hicache_lab.preflight import Advice, Answer, explain
from hicache_lab.preflight.record import advice_record, answer_record
from hicache_lab.views.cells.blocks import rows_table
from hicache_lab.views.tables import setting_rows

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from hicache_lab.views.figures import Theme


def markdown(record: Answer | Advice) -> str:
    """The block that the terminal shows; of advice, its settings with their verdicts."""
    if isinstance(record, Answer):
        return fenced(explain(record, record.advice))
    found = _settings(record)
    return rows_table(setting_rows(found)) if found else "no host tier fits, or the host's memory is not known"


def plot(record: Answer | Advice, theme: Theme = "light") -> Figure:
    """Pools against the host's RAM and the sizes that fit; of advice, what its settings ask of the host."""
    from hicache_lab.views.figures import settings_figure, tuner_data, tuner_figure

    if isinstance(record, Answer):
        if record.question.host is None:
            raise UsageError("plot: the host's memory is not known; state host_ram and, better, available")
        return tuner_figure(tuner_data(record, record.advice), theme)
    found = _settings(record)
    if not found:
        raise UsageError("plot: no host tier fits, or the host's memory is not known")
    return settings_figure(found, theme)


def to_dict(record: Answer | Advice) -> dict[str, Any]:
    """What ``plan --json`` prints."""
    return answer_record(record, record.advice) if isinstance(record, Answer) else advice_record(record)


def _settings(advice: Advice) -> dict[str, Answer]:
    by_flag = {f"--hicache-size {advice.size_gb}": advice.size_answer}
    by_flag[f"--hicache-ratio {advice.ratio}"] = advice.ratio_answer
    return {flag: answer for flag, answer in by_flag.items() if answer is not None}
