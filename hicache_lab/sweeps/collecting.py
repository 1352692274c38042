"""What ``compare`` is given on the command line, as observations: sweeps, run folders, other tools' results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.units import gb
from hicache_lab.runs import Figure, load_result
from hicache_lab.runs.comparison import Observation, named, observe_run, read_results
from hicache_lab.runs.comparison.observations import places
from hicache_lab.runs.results import RESULT_FILE
from hicache_lab.sweeps.ledger import SweepRecord, complete_result, is_sweep, load_sweep


@dataclass(frozen=True)
class Collection:
    """What was read.

    Attributes:
        observations: the complete runs, with their labels.
        left_out: (label, why) of the others.
        sweep, folder: the one sweep they come from, if it is one.
        arguments: what was named, to name it again.
    """

    observations: tuple[Observation, ...]
    left_out: tuple[tuple[str, str], ...]
    sweep: SweepRecord | None = None
    folder: Path | None = None
    arguments: tuple[str, ...] = ()


def collect(arguments: Sequence[str]) -> Collection:
    """Read what was named, each ``PATH`` or ``LABEL=PATH``.

    Raises:
        UsageError: nothing named, or one path twice for one label.
        InputError: a path that is neither a sweep folder, a run folder nor a result of another tool.
    """
    if not arguments:
        raise UsageError("compare: name run folders, sweep folders, or results of bench_serving or aiperf")
    runs: list[Observation] = []
    left_out: list[tuple[str, str]] = []
    sweeps: list[tuple[Path, SweepRecord]] = []
    read: set[tuple[str, Path]] = set()
    folders = places(str(path) for label, path in map(_split, arguments) if is_sweep(path) and not label)
    for argument in arguments:
        label, path = _split(argument)
        if (label, path.resolve()) in read:
            raise UsageError(f"{path}: named twice; a run that is counted twice is no repeat")
        read.add((label, path.resolve()))
        if is_sweep(path):
            sweep = load_sweep(path)
            sweeps.append((path, sweep))
            observations, missing = observe_sweep(path, sweep)
            # two sweeps have the same labels: the given one, or the folder's, tells them apart
            prefix = label or (folders[str(path)] if len(folders) > 1 else "")
            runs += [replace(one, label=f"{prefix}: {one.label}" if prefix else one.label) for one in observations]
            left_out += [(f"{prefix}: {name}" if prefix else name, why) for name, why in missing]
        elif (path / RESULT_FILE).is_file():
            result = load_result(path)
            if result.complete:
                runs.append(observe_run(result, str(path), label=label))
            else:
                left_out.append((label or path.name, _why(result.status, result.error.message if result.error else "")))
        elif path.is_file():
            runs += [replace(one, label=label) for one in read_results(path)]
        else:
            raise InputError(
                f"{path}: expected a run folder (with {RESULT_FILE}), a sweep folder, a JSON-lines file of "
                "sglang.bench_serving, or aiperf's profile_export_aiperf.json"
            )
    folder, only = sweeps[0] if len(arguments) == 1 and sweeps else (None, None)
    return Collection(named(runs), tuple(left_out), only, folder, tuple(arguments))


def _split(argument: str) -> tuple[str, Path]:
    """``LABEL=PATH``, unless the whole is a path that exists (run folders are named name=value too)."""
    path = Path(argument)
    label, equals, rest = argument.partition("=")
    if not equals or path.exists() or not label.strip():
        return "", path
    return label.strip(), Path(rest)


def observe_sweep(folder: Path, sweep: SweepRecord) -> tuple[list[Observation], list[tuple[str, str]]]:
    """The complete points of a sweep, and (label, why) of the others."""
    observations, left_out = [], []
    for point in sweep.points:
        result = complete_result(folder / point.folder) if point.status == "complete" else None
        if result is None:
            left_out.append((point.label, _why(point.status, point.why)))
            continue
        origin = str(Path(folder.name) / point.folder)
        one = observe_run(result, origin, label=point.label, settings=point.settings)
        values = dict(one.values)
        if point.decision.host_bytes is not None and "host_gb" not in values:
            values["host_gb"] = Figure(gb(point.decision.host_bytes), "GB", "computed")
        words = dict(one.words) | ({"verdict": point.decision.verdict} if point.decision.verdict else {})
        observations.append(replace(one, values=values, words=words, path=str(folder)))
    return observations, list(dict.fromkeys(left_out))


def _why(status: str, reason: str) -> str:
    return f"{status}: {reason}" if reason else status
