"""One measured (or computed) run as plain figures, whoever made it, and the label of the setting it belongs to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hicache_lab.base.units import gb
from hicache_lab.runs import Figure, RunResult

SAME_SETTING = frozenset({"seed", "repeat", "base_url", "port", "api_key_env", "output", "label"})
"""Parameters that do not make another setting: runs that differ in these only are repeats of one."""


@dataclass(frozen=True)
class Observation:
    """One run.

    Attributes:
        label: the setting it is a run of; empty until it is named.
        settings: what it ran with.
        values: its figures by name.
        words: recorded texts (a verdict, a release).
        origin: where it was read, in words: a file with its line, a run folder within its sweep.
        path: the file or folder that holds it, as it was named.
        kind: run, bench_serving or aiperf.
    """

    label: str
    settings: Mapping[str, Any]
    values: Mapping[str, Figure]
    origin: str
    kind: str = "run"
    words: Mapping[str, str] = field(default_factory=dict)
    path: str = ""


def observe_run(
    result: RunResult, origin: str, *, label: str = "", settings: Mapping[str, Any] | None = None
) -> Observation:
    """A run folder's figures; latencies in seconds become milliseconds, so that all sources share one name."""
    values: dict[str, Figure] = {}
    words: dict[str, str] = {}
    for name, figure in result.figures.items():
        if isinstance(figure.value, bool) or not isinstance(figure.value, int | float | str):
            continue
        if isinstance(figure.value, str):
            words[name] = figure.value
        elif math.isfinite(figure.value):
            head, _, tail = name.rpartition("_")
            if tail == "s" and name.partition("_")[0] in {"ttft", "itl", "tpot", "e2e"}:
                name, figure = f"{head}_ms", replace(figure, value=figure.value * 1000, unit="ms")
            values[name] = figure
    if "host_gb" not in values and "predicted_host_bytes" in values:
        taken = values["predicted_host_bytes"]
        values["host_gb"] = Figure(gb(taken.value), "GB", taken.source)
    chosen = dict(result.parameters if settings is None else settings)
    return Observation(label, chosen, values, origin, "run", words, origin)


def named(observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """Give every observation without a label the name of its setting.

    Runs of one kind are told apart by the parameters in which they differ; runs that differ only in ``SAME_SETTING``
    are repeats. If none differ, each file or folder stands for itself under its own name.
    """
    unnamed = [one for one in observations if not one.label]
    names_of_places = places(one.path or one.origin for one in unnamed)
    labelled = []
    for one in observations:
        names = differing(other for other in unnamed if other.kind == one.kind)
        own = ", ".join(f"{name}={_short(one.settings.get(name))}" for name in names)
        labelled.append(one if one.label else replace(one, label=own or names_of_places[one.path or one.origin]))
    return tuple(labelled)


def places(paths: Iterable[str]) -> dict[str, str]:
    """Each path's last part, or as many of its parts as no other path ends in: aiperf's files all have one name."""
    parts = {path: Path(path).parts for path in dict.fromkeys(paths)}
    names = {}
    for path, own in parts.items():
        others = [other for other in parts if other != path]
        count = next((n for n in range(1, len(own)) if all(parts[o][-n:] != own[-n:] for o in others)), len(own))
        names[path] = str(Path(*own[-count:])).removesuffix(".json").removesuffix(".jsonl") or path
    return names


def differing(observations: Iterable[Observation]) -> tuple[str, ...]:
    """Names of settings that are not the same in all, those of ``SAME_SETTING`` aside, in their order."""
    values_by_name: dict[str, set[str]] = {}
    many = list(observations)
    for name in dict.fromkeys(name for one in many for name in one.settings):
        if name not in SAME_SETTING:
            values_by_name[name] = {json.dumps(one.settings.get(name), sort_keys=True, default=str) for one in many}
    return tuple(name for name, values in values_by_name.items() if len(values) > 1)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "…"
