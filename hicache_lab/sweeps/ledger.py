"""A sweep's folder: ``sweep.json``, the grid as it was run, a lock, and one run folder a point below ``points/``.

A point's folder is named after the content it was made from, so a point that is complete is found again by name:
after an interrupt, after a kill -9, and after the grid was extended.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import HostError, InputError, UsageError
from hicache_lab.runs import Failure, RunResult, load_result
from hicache_lab.runs.recording import write_json
from hicache_lab.runs.results import read_record
from hicache_lab.sweeps.safety import Decision
from hicache_lab.sweeps.server_side import ServerStart

SCHEMA = "hicache-lab/sweep"
SCHEMA_VERSION = 1
SWEEP_FILE = "sweep.json"
POINTS = "points"
GRID_COPY = "grid.yaml"
STATUSES = ("pending", "complete", "failed", "timed_out", "interrupted", "skipped")
_LOCK = ".lock"


@dataclass(frozen=True)
class Point:
    """One run of a sweep: as it is planned, and then how it ended.

    Attributes:
        label: the setting in words; repeats of a point share it.
        settings: the values of what varies.
        repeat: 0 for the first.
        server: the words of the server it starts, empty if it starts none.
        digest: of everything the result depends on: the notebook, all parameter values and the files they name, the
            server's words, this library's version, the repeat.
        folder: its run folder, relative to the sweep's.
        decision: what preflight said.
        status: one of STATUSES; ``skipped`` from the start if it may not run.
        seconds: wall time of the run.
        error: why it failed, with the traceback.
        reused: True if an earlier sweep had already made it.
        parameters: what the notebook is given, the server's address excepted; only in a plan.
        start: the server it starts; only in a plan.
    """

    label: str
    settings: Mapping[str, Any]
    repeat: int
    server: tuple[str, ...]
    digest: str
    folder: str
    decision: Decision = field(default_factory=Decision)
    status: str = "pending"
    seconds: float | None = None
    error: Failure | None = None
    reused: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict, compare=False)
    start: ServerStart | None = field(default=None, compare=False)

    @property
    def why(self) -> str:
        """Why it did not run or did not complete, in one line; empty for the others."""
        if self.status == "skipped":
            return self.decision.reason
        if self.error is None:
            return ""
        where = f" in code cell {self.error.cell}" if self.error.cell else ""
        first, _, _ = self.error.message.partition("\n")
        return f"{self.error.kind}{where}: {first}"

    def ended(self, result: RunResult) -> Point:
        """This point with how its run ended."""
        return replace(self, status=result.status, seconds=result.seconds, error=result.error)

    def failed(self, kind: str, message: str, traceback: str = "") -> Point:
        """This point, failed before or outside its notebook."""
        return replace(self, status="failed", error=Failure(kind, message, traceback=traceback))

    def as_dict(self) -> dict[str, Any]:
        """What the record keeps, JSON-ready."""
        return {
            "label": self.label,
            "settings": dict(self.settings),
            "repeat": self.repeat,
            "server": list(self.server),
            "digest": self.digest,
            "folder": self.folder,
            "status": self.status,
            **asdict(self.decision),
            "seconds": self.seconds,
            "error": asdict(self.error) if self.error else None,
            "reused": self.reused,
        }


@dataclass(frozen=True)
class SweepRecord:
    """A sweep: what it was, and how each of its points ended.

    ``baseline``, ``metrics`` and ``objective`` are how the grid wants its points compared; ``grid`` is the grid file as
    it was named, beside which its notebook may lie.
    """

    label: str
    notebook: str
    notebook_sha256: str
    hicache_lab: str
    python: str
    started_at: str
    points: tuple[Point, ...]
    baseline: str | None = None
    metrics: tuple[str, ...] = ()
    objective: str | None = None
    grid: str = ""

    def count(self, *statuses: str) -> int:
        """How many points ended that way."""
        return sum(point.status in statuses for point in self.points)

    @property
    def failed(self) -> int:
        """Points that ran and did not complete."""
        return self.count("failed", "timed_out")

    def as_dict(self) -> dict[str, Any]:
        """The record, JSON-ready."""
        return {**vars(self), "points": [point.as_dict() for point in self.points]}

    def write(self, folder: Path) -> None:
        """Write ``sweep.json``, whole or not at all."""
        content = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **self.as_dict()}
        try:
            write_json(folder / SWEEP_FILE, content)
        except OSError as error:
            raise HostError(f"{folder / SWEEP_FILE}: cannot be written ({error.strerror}); free some space") from error


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (folder / SWEEP_FILE).is_file()


def load_sweep(folder: Path) -> SweepRecord:
    """Read a sweep folder.

    Raises:
        InputError: not a sweep's folder, another schema or version, or a field of another form.
    """
    path = folder / SWEEP_FILE
    raw = read_record(path, SCHEMA, SCHEMA_VERSION, what="sweep")
    try:
        raw["points"] = tuple(_point(point) for point in raw["points"])
        raw["metrics"] = tuple(raw["metrics"])
        return SweepRecord(**raw)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: a field is missing or of another form ({error})") from error


def _point(raw: dict[str, Any]) -> Point:
    names = {one.name for one in fields(Decision)}
    decision = Decision(**{name: value for name, value in raw.items() if name in names})
    rest = {name: value for name, value in raw.items() if name not in names}
    error = Failure(**raw["error"]) if raw["error"] else None
    point = Point(**{**rest, "server": tuple(raw["server"]), "error": error, "decision": decision})
    if point.status not in STATUSES:
        raise TypeError(f"status {point.status!r} is none of {', '.join(STATUSES)}")
    # the folder is joined to the sweep's: it may not lead out of it
    if Path(point.folder).is_absolute() or ".." in Path(point.folder).parts:
        raise TypeError(f"folder {point.folder!r} lies outside the sweep")
    return point


def complete_result(folder: Path) -> RunResult | None:
    """The result in a point's folder if that run is complete, else None."""
    try:
        result = load_result(folder)
    except InputError:
        return None
    return result if result.complete else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the sweep folder; it is made if need be.

    The kernel lets go of the lock when the process ends, however it ends.

    Raises:
        UsageError: another sweep holds it.
        HostError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise HostError(f"sweep folder {folder}: cannot be made ({error.strerror})") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip()
            raise UsageError(
                f"{folder}: another sweep runs in this folder (process {holder or 'unknown'}); "
                "wait for it, or choose another --label or --output"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def check_free(folder: Path, *, resume: bool) -> None:
    """Refuse to mix a sweep with something else.

    Raises:
        UsageError: an earlier sweep without ``resume``, a folder of something else, or nothing to resume.
    """
    if is_sweep(folder):
        if not resume:
            done = load_sweep(folder)
            raise UsageError(
                f"{folder} holds a sweep already ({done.count('complete')} of {len(done.points)} points complete); "
                "--resume goes on with it, --label or --output chooses another folder"
            )
        return
    strangers = [path.name for path in folder.iterdir() if path.name != _LOCK] if folder.is_dir() else []
    if strangers:
        raise UsageError(f"{folder} exists and is not a sweep folder (no {SWEEP_FILE}); choose another --label")
