"""``result.json``: the versioned record of one run; ``execute`` writes it, comparison and reports read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.runs.recording import SOURCES, write_json

SCHEMA = "hicache-lab/run"
SCHEMA_VERSION = 1
RESULT_FILE = "result.json"
STATUSES = ("complete", "failed", "timed_out", "interrupted")


@dataclass(frozen=True)
class Figure:
    """One recorded value: its unit ("" for a text) and where it comes from (one of SOURCES)."""

    value: Any
    unit: str
    source: str


@dataclass(frozen=True)
class Failure:
    """Why a run ended early: the exception, the code cell (from 1; None: outside them) and the traceback."""

    kind: str
    message: str
    cell: int | None = None
    cell_source: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class RunResult:
    """One run of one notebook.

    ``parameters`` are the values it ran with (defaults included), ``given`` the names that were set from
    outside, ``files`` what lies in the folder, relative to it; ``seconds`` is wall time.
    """

    notebook: str
    notebook_sha256: str
    status: str
    parameters: Mapping[str, Any]
    given: tuple[str, ...]
    started_at: str
    seconds: float
    hicache_lab: str
    python: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    error: Failure | None = None
    files: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True when every cell ran."""
        return self.status == "complete"

    def value(self, name: str) -> Any:
        """The recorded value ``name``.

        Raises:
            InputError: the run has no such figure; the message lists those it has.
        """
        if name not in self.figures:
            raise InputError(f"the run of {self.notebook} has no figure {name!r}; it has {', '.join(self.figures)}")
        return self.figures[name].value

    def write(self, folder: Path) -> None:
        """Write ``result.json`` into ``folder``, whole or not at all."""
        write_json(folder / RESULT_FILE, {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(self)})


def read_record(path: Path, schema: str, version: int, *, what: str) -> dict[str, Any]:
    """The fields of a versioned record in a folder, schema and version taken off.

    Raises:
        InputError: no such file, not JSON, another schema, or another version.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path.parent} is not a {what} folder: {path.name} cannot be read ({error.strerror})"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); the {what} did not close its folder") from error
    if not isinstance(raw, dict) or raw.get("schema") != schema:
        raise InputError(f'{path}: expected "schema": "{schema}"; this is not the record of a hicache-lab {what}')
    if raw.get("schema_version") != version:
        version_found = raw.get("schema_version")
        raise InputError(f"{path}: schema_version {version_found!r}; this hicache-lab reads version {version}")
    return {name: value for name, value in raw.items() if name not in {"schema", "schema_version"}}


def load_result(folder: Path) -> RunResult:
    """Read a run folder's ``result.json``.

    Raises:
        InputError: no such file, not JSON, another schema, a newer schema version, or a field that is
            missing.
    """
    path = folder / RESULT_FILE
    fields = read_record(path, SCHEMA, SCHEMA_VERSION, what="run")
    try:
        fields |= {"given": tuple(fields["given"]), "files": tuple(fields["files"])}
        fields["figures"] = {name: Figure(**figure) for name, figure in fields["figures"].items()}
        fields["error"] = Failure(**fields["error"]) if fields["error"] else None
        result = RunResult(**fields)
        if result.status not in STATUSES:
            raise TypeError(f"status {result.status!r} is none of {', '.join(STATUSES)}")
        for name, figure in result.figures.items():
            if figure.source not in SOURCES:
                raise TypeError(f"figure {name!r} has source {figure.source!r}, none of {', '.join(SOURCES)}")
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: a field is missing or of another form ({error})") from error
    return result
