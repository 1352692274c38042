"""What is read of a host-pool constructor: its lines, and one fact for each thing that it does."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from hicache_lab.sglang.source.symbols import Scope
from hicache_lab.sglang.source.tree import Line, Module, Tree

UNRECOGNISED = "not recognised"


def normal_form(text: str) -> str:
    """A formula in the words of `symbols`, in its normal order."""
    empty = Module("", text, ast.parse(text), Tree("", "", [], lambda _: ""))
    return Scope(empty).text(ast.parse(text, mode="eval").body)


@dataclass(frozen=True)
class Fact:
    """One thing the constructor does.

    Attributes:
        name: what is stated, e.g. ``rounding``.
        value: what the source does; `UNRECOGNISED` when it is in no known form.
        says: the source's expression, in the constructor's own words.
        line: where it stands; None when the fact is an absence.
    """

    name: str
    value: str | int | float | bool
    says: str = ""
    line: Line | None = None


@dataclass
class Constructor:
    """A host-pool constructor.

    Attributes:
        class_name: its class.
        signature: its parameters as they are written.
        where: its first line.
        sizing: the lines that make tokens of a size or a ratio.
        guard: the lines of the check, in whichever file they stand.
        facts: what they do, by name.
    """

    class_name: str
    signature: str
    where: Line
    sizing: list[Line] = field(default_factory=list)
    guard: list[Line] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)

    def state(self, fact: Fact) -> None:
        """Add a fact; a second, different one of the same name is a contradiction and not recognised."""
        before = self.facts.get(fact.name)
        if before is not None and before.value != fact.value:
            says = f"{before.says}; and elsewhere {fact.says}"
            fact = Fact(fact.name, UNRECOGNISED, says, fact.line)
        self.facts[fact.name] = fact
