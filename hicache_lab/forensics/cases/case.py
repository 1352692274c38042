"""``incident.json`` → a frozen ``Case``: launch, facts with their origins, and the question to be judged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.base.resources import data_dir
from hicache_lab.base.units import GB
from hicache_lab.host import HostMemory
from hicache_lab.preflight import Question
from hicache_lab.sglang.launch import parse_launch
from hicache_lab.sglang.releases import rules_for
from hicache_lab.sizing.geometry import load_geometry
from hicache_lab.sizing.rank import DeviceFacts

SCHEMA, SCHEMA_VERSION = "hicache-lab/incident", 1
ORIGINS = ("reported", "assumed", "measured", "reconstructed")


@dataclass(frozen=True)
class Fact:
    """One fact of an incident; ``origin`` is reported, assumed, measured or reconstructed."""

    value: Any
    unit: str
    origin: str
    note: str = ""


@dataclass(frozen=True)
class Moment:
    """One step of the story, in order; times are known only where a log gives them."""

    step: int
    what: str
    origin: str


@dataclass(frozen=True)
class Case:
    """One incident folder: text in it is untrusted and only ever shown escaped."""

    folder: Path
    id: str
    title: str
    launch: str
    facts: Mapping[str, Fact]
    timeline: tuple[Moment, ...]
    files: Mapping[str, Path]
    not_known: tuple[str, ...]
    files_origin: str = "measured"

    def value(self, name: str) -> Any:
        """The value of a fact.

        Raises:
            InputError: the incident does not state it.
        """
        if name not in self.facts:
            raise InputError(f"{self.folder / 'incident.json'}: no fact {name!r}; it has {', '.join(self.facts)}")
        return self.facts[name].value

    def question(self, *, with_overhead: bool = False) -> Question:
        """What the launch asked of the host.

        Args:
            with_overhead: also count the host memory that the server takes besides its pools.

        Returns:
            The question as it stood before the launch: available memory as reported, nothing of the server in it.
        """
        version = str(self.value("sglang_version"))
        config = replace(
            parse_launch(self.launch),
            sglang_version=version,
            page_size=self.value("page_size"),
            kv_cache_dtype=self.value("kv_cache_dtype"),
        )
        return Question(
            config=config,
            geometry=load_geometry(str(config.model)),
            rules=rules_for(version),
            host=HostMemory.stated(
                total_bytes=round(self.value("host_ram_gb") * GB),
                available_bytes=round(self.value("available_gb") * GB),
            ),
            device=DeviceFacts(tokens=self.value("device_tokens")),
            overhead_bytes=round(self.value("overhead_gb") * GB) if with_overhead else 0,
        )


def read_json(path: Path, schema: str, version: int) -> dict[str, Any]:
    """A JSON file of a named schema and version.

    Raises:
        InputError: unreadable, not JSON, or of another schema or version.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    if not isinstance(raw, dict) or raw.get("schema") != schema or raw.get("schema_version") != version:
        raise InputError(f'{path}: expected "schema": "{schema}" with "schema_version": {version}')
    return raw


def load_case(incident: str | Path) -> Case:
    """Read an incident folder.

    Args:
        incident: a folder with an incident.json, or the name of one that ships below data/incidents/.

    Raises:
        InputError: no such folder, or a field that is missing or of another form.
    """
    folder = Path(incident)
    if not (folder / "incident.json").exists():
        shipped = {path.parent.name: path.parent for path in (data_dir() / "incidents").glob("*/incident.json")}
        if str(incident) not in shipped:
            raise InputError(f"incident {incident}: no incident.json there; those that ship: {', '.join(shipped)}")
        folder = shipped[str(incident)]
    path = folder / "incident.json"
    raw = read_json(path, SCHEMA, SCHEMA_VERSION)
    try:
        case = Case(
            folder=folder,
            id=str(raw["id"]),
            title=str(raw["title"]),
            launch=str(raw["launch"]),
            facts={name: Fact(**fact) for name, fact in raw["facts"].items()},
            timeline=tuple(Moment(**moment) for moment in raw["timeline"]),
            # only the name is taken: a file of an incident lies in its folder
            files={kind: folder / Path(str(name)).name for kind, name in raw["files"].items()},
            not_known=tuple(str(text) for text in raw["not_known"]),
            files_origin=str(raw.get("files_origin", "measured")),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: a field is missing or of another form ({error})") from error
    origins = [(n, f.origin) for n, f in case.facts.items()] + [(m.what, m.origin) for m in case.timeline]
    for name, origin in [*origins, ("files", case.files_origin)]:
        if origin not in ORIGINS:
            raise InputError(f"{path}: {name!r} has origin {origin!r}; expected one of {', '.join(ORIGINS)}")
    return case
