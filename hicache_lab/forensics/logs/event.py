"""What every statement of a log has: where it stands, when and which rank made it, and what its kind is."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, dataclass_transform

T = TypeVar("T")


def _unchangeable(entries: dict[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(entries)


# an event can be sent to another process and copied
copyreg.pickle(MappingProxyType, lambda mapping: (_unchangeable, (dict(mapping),)))
NOTHING: Mapping[str, Any] = MappingProxyType({})
_OTHERS_SAY_IT_TOO = frozenset({"graph_sizes", "shutdown", "nccl"})


@dataclass(frozen=True, slots=True, order=True)
class SourceLine:
    """A line of a file, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """The rank tags of a record's prefix, in the order of the log: ``DP0 TP3`` is ``(("dp", 0), ("tp", 3))``.

    Tags are a set of names: an unknown name is kept. Processes without a rank (HTTP, tokenizer, a single GPU from
    0.4.7 on) have no tag.
    """

    tags: tuple[tuple[str, int], ...] = ()

    @property
    def label(self) -> str:
        """The tags as SGLang prints them; empty for a process without a rank."""
        return " ".join(f"{name.upper()}{number}" for name, number in self.tags)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def event_kind(
    kind: str, headline: str = "", *, only_sglang: bool = False, is_error: bool = False, is_per_rank: bool = False
) -> Callable[[type[T]], type[T]]:
    """Like ``dataclass``; the arguments are what the class says of its kind of statement.

    The classes share one ``repr``, because making two dozen of them costs each start 25 ms.
    """

    def made(cls: type[T]) -> type[T]:
        event = dataclass(frozen=True, slots=True, kw_only=True, repr=False)(cls)
        for name, value in {**flags, "kind": kind, "headline": headline}.items():
            setattr(event, name, value)
        return event

    flags = {"only_sglang": only_sglang, "is_error": is_error, "is_per_rank": is_per_rank}
    return made


@event_kind("event")
class Event:
    """One recognised statement.

    Attributes:
        where: file and line of its first line.
        at: the record's own time, as printed (no zone); None if the line carries none.
        rank: the rank that printed it.
        text: the message without its prefix.
        prefix: the record's own prefix as printed, for quoting the line.
        variant: the entry of the pattern table that recognised it.

    A class says of its kind of statement:
        kind: its name in JSON and in ``Run.counts``.
        only_sglang: nobody but an SGLang server says it.
        is_error: something failed.
        is_per_rank: every rank says it, so its prefix shows which ranks there are.
        headline: what a timeline calls it; empty for what no timeline shows.
    """

    kind: ClassVar[str]
    only_sglang: ClassVar[bool]
    is_error: ClassVar[bool]
    is_per_rank: ClassVar[bool]
    headline: ClassVar[str]
    where: SourceLine
    at: datetime | None = None
    rank: Rank = Rank()
    text: str = ""
    variant: str = ""
    prefix: str = ""

    @property
    def is_servers_own(self) -> bool:
        """Whether only an SGLang server says this: by the statement, or by a rank in the record's prefix.

        A traceback, an access log or a kernel line alone does not make an SGLang log.
        """
        return bool(self.rank.tags) or (self.only_sglang and self.variant not in _OTHERS_SAY_IT_TOO)

    def __repr__(self) -> str:
        values = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))
        return f"{type(self).__name__}({', '.join(values)})"
