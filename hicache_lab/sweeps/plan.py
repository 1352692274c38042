"""A grid made into points, each checked before anything runs: parameters, server settings, and the host's memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hicache_lab
from hicache_lab.base.errors import UsageError
from hicache_lab.host import HostMemory
from hicache_lab.runs import Parameter, check_parameters, find_notebook, inspect_parameters
from hicache_lab.sweeps.grid import Combination, Grid, notebook_beside
from hicache_lab.sweeps.safety import Decision, judge_cpu, judge_launch
from hicache_lab.sweeps.serverside import CpuServer, ExistingServer, LaunchLine, render

BASE_URL = "base_url"
API_KEY_ENV = "api_key_env"
_SLUG = re.compile(r"[^A-Za-z0-9.]+")
_MOST_HASHED_BYTES = 1 << 30


@dataclass(frozen=True)
class Point:
    """One run to make.

    Attributes:
        label: the setting in words; repeats of a point share it.
        settings: the values of what varies.
        repeat: 0 for the first.
        parameters: what the notebook is given, the server's address excepted.
        server: the words of the server to start, empty otherwise.
        digest: of everything the result depends on: the notebook, all parameter values and the files they name, the
            server's words, this library's version, the repeat.
        decision: whether it may run.
    """

    label: str
    settings: Mapping[str, Any]
    repeat: int
    parameters: Mapping[str, Any]
    server: tuple[str, ...]
    digest: str
    decision: Decision = field(default_factory=Decision)

    @property
    def folder_name(self) -> str:
        """Its run folder's name: readable, and different for every content."""
        slug = _SLUG.sub("-", self.label).strip("-.")[:60].rstrip("-.") or "point"
        repeat = f"-r{self.repeat + 1}" if self.repeat else ""
        return f"{slug}{repeat}-{self.digest[:10]}"


@dataclass(frozen=True)
class Plan:
    """A grid's points in the order they run."""

    grid: Grid
    notebook: Path
    notebook_sha256: str
    points: tuple[Point, ...]

    @property
    def skipped(self) -> tuple[Point, ...]:
        """Points that may not run."""
        return tuple(point for point in self.points if not point.decision.run)


def make_plan(grid: Grid, *, host: HostMemory | None = None, allow_unsafe: bool = False) -> Plan:
    """Check every point of a grid.

    Args:
        grid: the grid file.
        host: judge servers for this host instead of the machine we are on.
        allow_unsafe: let points run that preflight would skip; the verdict is still worked out and kept.

    Returns:
        Points in running order: points with the same server stand together, unless it is restarted anyway; then the
        repeats of all points alternate, so that a drift of the machine hits every setting alike.

    Raises:
        UsageError: a name that neither the notebook nor the server has (with a suggestion), a value of another type,
            or two points that are the same.
        InputError: no such notebook.
    """
    notebook = find_notebook(notebook_beside(grid))
    sha256 = hashlib.sha256(notebook.read_bytes()).hexdigest()
    known = _check_names(grid, notebook)
    decisions: dict[tuple[str, ...], Decision] = {}
    points = []
    for combination in grid.combinations():
        for repeat in range(grid.repeats):
            point = _point(grid, notebook, sha256, known, combination, repeat)
            if grid.server is not None and grid.server.starts:
                if point.server not in decisions:
                    decisions[point.server] = _decide(grid, point.server, host)
                point = Point(**{**vars(point), "decision": decisions[point.server].allowing(allow_unsafe)})
            points.append(point)
    _check_distinct(grid, points)
    _check_baseline(grid, (point.label for point in points))
    return Plan(grid, notebook, sha256, tuple(_ordered(grid, points)))


def _check_names(grid: Grid, notebook: Path) -> frozenset[str]:
    """Every name has a use; returns the notebook's parameters."""
    known = inspect_parameters(notebook)
    placeholders = grid.server.placeholders if grid.server else frozenset()
    usable = [*known, *placeholders]
    for name in (*grid.parameters, *grid.names):
        if name not in known and name not in placeholders:
            close = get_close_matches(name, usable, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(
                f"{grid.path}: {name}: neither a parameter of {notebook.name} nor a {{placeholder}} of the server"
                f"{hint or '.'} Parameters: {', '.join(known) or 'none'}"
            )
    for name in sorted(placeholders - set(grid.parameters) - set(grid.names)):
        close = get_close_matches(name, [*grid.parameters, *grid.names], n=1)
        hint = f"; did you mean {{{close[0]}}}?" if close else "; give it under axes or parameters"
        raise UsageError(f"{grid.path}: server: {{{name}}} has no value{hint}")
    if grid.server is not None:
        if BASE_URL in (*grid.parameters, *grid.names):
            raise UsageError(f"{grid.path}: {BASE_URL}: given by `server:`; give it in one place")
        if BASE_URL not in known:
            raise UsageError(
                f"{grid.path}: server: {notebook.name} has no parameter {BASE_URL}, so it would not use it"
            )
    _check_repeat_parameter(grid, notebook, known)
    return frozenset(known)


def _check_repeat_parameter(grid: Grid, notebook: Path, known: Mapping[str, Parameter]) -> None:
    repeated = grid.repeat_parameter
    if repeated is not None and (repeated not in known or known[repeated].base_type != "int"):
        raise UsageError(f"{grid.path}: repeat_parameter: {notebook.name} has no int parameter {repeated!r}")
    if repeated in grid.names:
        raise UsageError(
            f"{grid.path}: repeat_parameter: {repeated} is an axis, so the repeats of one setting would be runs of the "
            "next; name a parameter that does not vary, such as a seed"
        )


def _check_baseline(grid: Grid, labels: Iterable[str]) -> None:
    """A misspelt baseline is found out before the runs, not after them."""
    known = list(dict.fromkeys(labels))
    wanted = grid.compare.baseline
    if wanted is not None and wanted not in known:
        close = get_close_matches(wanted, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known[:10])}"
        raise UsageError(f"{grid.path}: compare: baseline: no setting of this grid is called {wanted!r}; {hint}")


def _point(
    grid: Grid, notebook: Path, sha256: str, known: frozenset[str], combination: Combination, repeat: int
) -> Point:
    everything = {**grid.parameters, **combination.settings}
    given = {name: value for name, value in everything.items() if name in known}
    if API_KEY_ENV in known and isinstance(grid.server, ExistingServer) and grid.server.api_key_env:
        given[API_KEY_ENV] = grid.server.api_key_env
    try:
        values = check_parameters(notebook, given)
        if grid.repeat_parameter is not None:
            given[grid.repeat_parameter] = values[grid.repeat_parameter] = values[grid.repeat_parameter] + repeat
    except UsageError as error:
        raise UsageError(f"{grid.path}: {combination.label}: {error}") from None
    server: tuple[str, ...] = ()
    if isinstance(grid.server, LaunchLine):
        server = render(grid.server.template, everything)
    elif isinstance(grid.server, CpuServer):
        flags = render(grid.server.flags, everything)
        server = (grid.server.release, grid.server.model, str(grid.server.tp_size), *flags)
    digest = _digest(sha256, values, server, repeat)
    return Point(combination.label, combination.settings, repeat, given, server, digest)


def _digest(notebook_sha256: str, values: Mapping[str, Any], server: tuple[str, ...], repeat: int) -> str:
    content = {
        "notebook": notebook_sha256,
        "parameters": {name: value for name, value in values.items() if name != BASE_URL},
        "files": dict(_files(values)),
        "server": server,
        "repeat": repeat,
        "hicache_lab": hicache_lab.__version__,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _files(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Content hashes of files that parameters name: a changed trace is another point."""
    for name, value in values.items():
        if not isinstance(value, str) or not value or "\n" in value or len(value) > 4096:
            continue
        path = Path(value)
        try:
            if path.is_file() and path.stat().st_size <= _MOST_HASHED_BYTES:
                with path.open("rb") as file:
                    yield name, hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError):
            continue  # the run itself will say what is wrong with it


def _decide(grid: Grid, words: tuple[str, ...], host: HostMemory | None) -> Decision:
    try:
        if isinstance(grid.server, LaunchLine):
            return judge_launch(grid.server, words, host)
        assert isinstance(grid.server, CpuServer)
        return judge_cpu(grid.server, words[3:], host)
    except UsageError as error:
        raise UsageError(f"{grid.path}: server: {error}") from None


def _check_distinct(grid: Grid, points: list[Point]) -> None:
    for digest, count in Counter(point.digest for point in points).items():
        if count > 1:
            labels = ", ".join(sorted({point.label for point in points if point.digest == digest}))
            raise UsageError(f"{grid.path}: {labels}: the same point twice; `repeats:` runs a point several times")
    for (label, _), count in Counter((point.label, point.repeat) for point in points).items():
        if count > 1:
            raise UsageError(f"{grid.path}: {label!r} names {count} different settings; give their values other labels")


def _ordered(grid: Grid, points: list[Point]) -> list[Point]:
    if getattr(grid.server, "between_runs", None) == "restart":
        return sorted(points, key=lambda point: point.repeat)
    first = {server: index for index, server in reversed(list(enumerate(point.server for point in points)))}
    return sorted(points, key=lambda point: first[point.server])
