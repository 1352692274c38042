"""A grid made into points, each checked before anything runs: parameters, server settings, and the host's memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hicache_lab
from hicache_lab.base.errors import UsageError, did_you_mean
from hicache_lab.host import HostMemory
from hicache_lab.runs import check_parameters, find_notebook, inspect_parameters
from hicache_lab.sweeps.grid import Grid
from hicache_lab.sweeps.ledger import POINTS, Point
from hicache_lab.sweeps.safety import Decision, judge
from hicache_lab.sweeps.server_side import ExistingServer, ServerStart

BASE_URL = "base_url"
API_KEY_ENV = "api_key_env"
_SLUG = re.compile(r"[^A-Za-z0-9.]+")
_MOST_HASHED_BYTES = 1 << 30


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
        return tuple(point for point in self.points if point.status == "skipped")


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
    neighbour = grid.path.parent / grid.notebook
    notebook = find_notebook(str(neighbour) if neighbour.is_file() else grid.notebook)
    sha256 = hashlib.sha256(notebook.read_bytes()).hexdigest()
    known = _check_names(grid, notebook)
    decisions: dict[tuple[str, ...], Decision] = {}
    points = []
    for label, settings in grid.combinations():
        start = None
        if grid.server is not None and not isinstance(grid.server, ExistingServer):
            try:
                start = grid.server.start({**grid.parameters, **settings})
            except UsageError as error:
                raise UsageError(f"{grid.path}: server: {error}") from None
        if start is not None and start.words not in decisions:
            decisions[start.words] = judge(start, host)
        for repeat in range(grid.repeats):
            point = _point(grid, notebook, sha256, known, label, settings, repeat, start)
            if start is not None:
                decision = decisions[start.words]
                skipped = not (decision.safe or allow_unsafe)
                point = replace(point, decision=decision, status="skipped" if skipped else "pending")
            points.append(point)
    _check_distinct(grid, points)
    # a misspelt baseline is found out before the runs, not after them
    labels = list(dict.fromkeys(point.label for point in points))
    baseline = grid.compare.baseline
    if baseline is not None and baseline not in labels:
        hint = did_you_mean(baseline, labels, f"; there are {', '.join(labels[:10])}")
        raise UsageError(f"{grid.path}: compare: baseline: no setting of this grid is called {baseline!r}{hint}")
    if getattr(grid.server, "between_runs", None) == "restart":
        points.sort(key=lambda point: point.repeat)
    else:
        first = {server: index for index, server in reversed(list(enumerate(point.server for point in points)))}
        points.sort(key=lambda point: first[point.server])
    return Plan(grid, notebook, sha256, tuple(points))


def _check_names(grid: Grid, notebook: Path) -> frozenset[str]:
    """Every name has a use; returns the notebook's parameters."""
    known = inspect_parameters(notebook)
    placeholders = grid.server.placeholders if grid.server else frozenset()
    for name in (*grid.parameters, *grid.names):
        if name not in known and name not in placeholders:
            hint = did_you_mean(name, [*known, *placeholders], ".")
            raise UsageError(
                f"{grid.path}: {name}: neither a parameter of {notebook.name} nor a {{placeholder}} of the server"
                f"{hint} Parameters: {', '.join(known) or 'none'}"
            )
    for name in sorted(placeholders - set(grid.parameters) - set(grid.names)):
        named = [f"{{{one}}}" for one in (*grid.parameters, *grid.names)]
        hint = did_you_mean(f"{{{name}}}", named, "; give it under axes or parameters")
        raise UsageError(f"{grid.path}: server: {{{name}}} has no value{hint}")
    if grid.server is not None:
        if BASE_URL in (*grid.parameters, *grid.names):
            raise UsageError(f"{grid.path}: {BASE_URL}: given by `server:`; give it in one place")
        if BASE_URL not in known:
            raise UsageError(
                f"{grid.path}: server: {notebook.name} has no parameter {BASE_URL}, so it would not use it"
            )
    repeated = grid.repeat_parameter
    if repeated is not None and (repeated not in known or known[repeated].base_type != "int"):
        raise UsageError(f"{grid.path}: repeat_parameter: {notebook.name} has no int parameter {repeated!r}")
    if repeated in grid.names:
        raise UsageError(
            f"{grid.path}: repeat_parameter: {repeated} is an axis, so the repeats of one setting would be runs of the "
            "next; name a parameter that does not vary, such as a seed"
        )
    return frozenset(known)


def _point(
    grid: Grid,
    notebook: Path,
    sha256: str,
    known: frozenset[str],
    label: str,
    settings: dict[str, Any],
    repeat: int,
    start: ServerStart | None,
) -> Point:
    given = {name: value for name, value in {**grid.parameters, **settings}.items() if name in known}
    if API_KEY_ENV in known and isinstance(grid.server, ExistingServer) and grid.server.api_key_env:
        given[API_KEY_ENV] = grid.server.api_key_env
    try:
        values = check_parameters(notebook, given)
        if grid.repeat_parameter is not None:
            given[grid.repeat_parameter] = values[grid.repeat_parameter] = values[grid.repeat_parameter] + repeat
    except UsageError as error:
        raise UsageError(f"{grid.path}: {label}: {error}") from None
    server = start.words if start else ()
    content = {
        "notebook": sha256,
        "parameters": {name: value for name, value in values.items() if name != BASE_URL},
        "files": dict(_files(values)),
        "server": server,
        "repeat": repeat,
        "hicache_lab": hicache_lab.__version__,
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    # a run folder's name is readable, and different for every content
    slug = _SLUG.sub("-", label).strip("-.")[:60].rstrip("-.") or "point"
    folder = f"{POINTS}/{slug}{f'-r{repeat + 1}' if repeat else ''}-{digest[:10]}"
    return Point(label, settings, repeat, server, digest, folder, parameters=given, start=start)


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


def _check_distinct(grid: Grid, points: list[Point]) -> None:
    for digest, count in Counter(point.digest for point in points).items():
        if count > 1:
            labels = ", ".join(sorted({point.label for point in points if point.digest == digest}))
            raise UsageError(f"{grid.path}: {labels}: the same point twice; `repeats:` runs a point several times")
    for (label, _), count in Counter((point.label, point.repeat) for point in points).items():
        if count > 1:
            raise UsageError(f"{grid.path}: {label!r} names {count} different settings; give their values other labels")
