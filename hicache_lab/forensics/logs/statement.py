"""One row of the statement tables: how a statement begins, the class it becomes, the values it may carry."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hicache_lab.base.units import GB, GIB, KIB, MIB
from hicache_lab.forensics.logs import events as ev

N = r"-?\d+(?:\.\d+)?"
# a number that is not the beginning of a longer one: "1e4" is not 1
_WHOLE_NUMBER = rf"{N}(?![\d.]*[eE][+-]?\d)"
UNITS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(float(text)),
    "float": float,
    "str": str,
    "bool": lambda text: text == "True",
    "gb": lambda text: round(float(text) * GB),
    "gib": lambda text: round(float(text) * GIB),
    "kb": lambda text: int(text) * KIB,
    "mixed": lambda text: round(float(text.split()[0]) * (GIB if text.endswith("GiB") else MIB)),
    "ms": lambda text: float(text) / 1000,
    "ints": lambda text: tuple(int(number) for number in re.findall(r"\d+", text)),
}
# followed by nothing that makes its last letter optional or one of several
_ONLY_WORD = re.compile(r"[A-Za-z_]\w*(?![\w?*{+|])")
_VALUES = {
    "int": r"-?\d+(?:\.0)?(?![\d.]*\d|[eE][+-]?\d)",
    "float": rf"{N}(?:[eE][+-]?\d+)?|inf|nan",
    "str": r"[^\s,;)]*[^\s,;).]",
    "ms": _WHOLE_NUMBER,
    "bool": "True|False",
    "gb": _WHOLE_NUMBER,
    "gib": _WHOLE_NUMBER,
    "kb": r"\d+",
    "ints": r"\[[\d, ]*\]",
}


@dataclass(frozen=True)
class Pattern:
    """One statement: how it begins, the class it becomes, and which values it may carry.

    Attributes:
        variant: the name of the row.
        event: the class of the event.
        begins: regular expression for the beginning of the message.
        keys: key as printed → field and unit; every key may be missing.
        const: fields that the statement itself implies.
        words: the words (letters and underscores) a message of this kind can begin with, "*" before those that may
            stand second; left out where ``begins`` begins with its only one, or where any word may come first.
        lines: how many unprefixed lines that follow may belong to it.
    """

    variant: str
    event: type[ev.Event]
    begins: str
    keys: Mapping[str, str] = field(default_factory=dict)
    const: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    lines: int = 0

    @property
    def first_words(self) -> tuple[str, ...]:
        """``words``, or the word that ``begins`` begins with; empty for any."""
        word = _ONLY_WORD.match(self.begins)
        return self.words or ((word[0],) if word else ())

    # compiled when a message first begins like one: most logs need a handful of the rows
    @cached_property
    def head(self) -> re.Pattern[str]:
        """``begins``, compiled."""
        return re.compile(self.begins)

    @cached_property
    def readers(self) -> tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...]:
        """Field, where it is printed, and how it is converted, for each of ``keys``."""
        readers = []
        for key, name in self.keys.items():
            base, _, unit = name.rpartition("__")
            # people who shorten a line leave the colon of a size out: "K 1.37 GB"
            between = r"(?: ?[:=] ?| (?=[\d.-]+ ?GB))" if unit == "gib" else " ?[:=] ?"
            readers.append((base, re.compile(rf"(?:^|[\s,.({{]){key}{between}({_VALUES[unit]})"), UNITS[unit]))
        return tuple(readers)

    def match(self, message: str) -> dict[str, Any] | None:
        """The fields the message carries, or None if it is another statement."""
        found = self.head.match(message)
        if found is None:
            return None
        fields = dict(self.const)
        for name, text in found.groupdict().items():
            base, _, unit = name.rpartition("__")
            if text is not None and base:
                try:
                    fields[base] = UNITS[unit](text)
                except (ValueError, OverflowError):
                    return None  # not a number, or beyond any machine's
            elif text is not None:
                fields[name] = text
        for name, regex, convert in self.readers:
            value = regex.search(message)
            if value:
                with suppress(ValueError, OverflowError):
                    fields[name] = convert(value[1])
        return fields
