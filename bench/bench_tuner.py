"""One slider move of the tuner: recompute and redraw in place, beside building the figure again.

Python time of this process (other programs on the machine do not count), median over the moves of each control.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from hicache_lab.views.figures import tuner_data, tuner_figure
from hicache_lab.views.widgets import Tuner
from hicache_lab.views.widgets.tuner import judge

LIMIT_MS = 10.0
MOVES: dict[str, Sequence[Any]] = {
    "hicache_size": range(20, 60),
    "host_ram_gb": range(400, 440),
    "overhead_gb": range(20, 60),
    "tp_size": [1, 2, 4, 8] * 10,
    "device_tokens": range(100_000, 140_000, 1000),
    "sglang_version": ["0.5.19", "0.5.23", "0.5.10", "0.5.8"] * 10,
}


def milliseconds(action: Callable[[Any], object], values: Sequence[Any]) -> float:
    """Median Python time of ``action`` over ``values``."""
    times = []
    for value in values:
        start = time.process_time()
        action(value)
        times.append((time.process_time() - start) * 1000)
    return statistics.median(times)


def main() -> None:
    tuner = Tuner()
    rows = {}
    for name, values in MOVES.items():
        control = tuner.controls[name]
        rows[name] = milliseconds(lambda value, control=control: setattr(control, "value", value), values)

    def rebuild(size: int) -> None:
        tuner.controls["hicache_size"].unobserve_all()
        tuner.controls["hicache_size"].value = size
        go.FigureWidget(tuner_figure(tuner_data(*judge(tuner.settings))))

    rival = milliseconds(rebuild, range(20, 40))
    for name, value in rows.items():
        print(f"{name:<16} {value:6.2f} ms in place, {rival / value:5.1f} x faster than building the figure again")
    median = statistics.median(rows.values())
    print(f"{'median':<16} {median:6.2f} ms in place; {rival:.1f} ms to build it again (limit {LIMIT_MS:g} ms)")


if __name__ == "__main__":
    main()
