"""The shipped catalogue: one small JSON file a model in ``data/models/``, with its sources and standing."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError, UnknownFact
from hicache_lab.base.resources import data_dir


@dataclass(frozen=True)
class CatalogueEntry:
    """One shipped model.

    Attributes:
        name: short name.
        hf_id: repository on the Hugging Face hub.
        aliases: other names it answers to.
        fp8_kv: those of its names whose checkpoint asks for an fp8 KV cache, which ``auto`` follows.
        confidence: ``confirmed`` (a copy of the real config.json) or ``secondary`` (third-party catalogues).
        kind: how it stores a token, as ``ModelGeometry.kind``.
        config: the keys of its config.json that decide its caches, nested as in the file.
        source: where they were read.
        notes: what a reader should know.
    """

    name: str
    hf_id: str
    aliases: tuple[str, ...]
    fp8_kv: tuple[str, ...]
    confidence: str
    kind: str
    config: Mapping[str, Any]
    source: tuple[str, ...]
    notes: str

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it answers to: its own, the hub's and the aliases with and without the organisation."""
        full = (self.name, self.hf_id, *self.aliases)
        return (*full, *(name.split("/")[-1] for name in full[1:]))

    def repository(self, name: str) -> str:
        """The hub repository that one of its names means: an alias stays itself, because its caches may differ."""
        wanted = name.strip().casefold()
        hub = (one for one in (self.hf_id, *self.aliases) if "/" in one)
        return next((one for one in hub if wanted in (one.casefold(), one.split("/")[-1].casefold())), self.hf_id)

    def asks_fp8_kv(self, name: str) -> bool:
        """Whether the checkpoint of that name stores keys and values in fp8 unless told otherwise."""
        wanted = name.strip().casefold()
        return any(wanted in (known.casefold(), known.split("/")[-1].casefold()) for known in self.fp8_kv)


def _read(path: Path) -> CatalogueEntry:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return CatalogueEntry(
            **{**raw, **{key: tuple(raw[key]) for key in ("aliases", "fp8_kv", "source")}},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path.name}: not a model of the shipped catalogue ({error}); reinstall the package"
        ) from error


@cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Every shipped model, in the order of their names."""
    entries = [_read(path) for path in (data_dir() / "models").glob("*.json")]
    return tuple(sorted(entries, key=lambda entry: entry.name.casefold()))


@cache
def _index() -> dict[str, CatalogueEntry]:
    index: dict[str, CatalogueEntry] = {}
    for entry in catalogue():
        for name in entry.names:
            index.setdefault(name.casefold(), entry)
    return index


def is_known(name: str) -> bool:
    """Whether the catalogue has a model of that name."""
    return name.strip().casefold() in _index()


def find(name: str) -> CatalogueEntry:
    """The shipped model of that name.

    Args:
        name: a catalogue name, a hub id or an alias; case does not matter, and it is never used as a path.

    Raises:
        UnknownFact: no such model; names what is close and how to give a config.json instead.
    """
    wanted = name.strip().casefold()
    entry = _index().get(wanted)
    if entry is not None:
        return entry
    close = difflib.get_close_matches(wanted[:200], _index(), n=8, cutoff=0.6)
    near = list(dict.fromkeys(_index()[key].name for key in close))[:4]
    raise UnknownFact(
        f"model {name[:200]!r} is not in the catalogue"
        + (f"; close are {', '.join(near)}" if near else "")
        + "; give the path of its config.json (or its folder) instead, or a geometry such as "
        '{"kind": "gqa", "num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}'
    )
