"""``match_message`` finds the statement that a message makes, in the table ``data/log_statements.toml``.

The table's head says what an entry may hold.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.base.resources import data_dir
from hicache_lab.base.units import GB, GIB, KIB, MIB
from hicache_lab.forensics.logs import events as ev

QUOTING = " \t>`'\"*|"
_N = r"-?\d+(?:\.\d+)?"
# a number that is not the beginning of a longer one: "1e4" is not 1
_WHOLE_NUMBER = rf"{_N}(?![\d.]*[eE][+-]?\d)"


def _pool_name(printed: str) -> str:
    """``"NSA"`` → ``nsa_indexer``, ``"V4 paged pool 'c4'"`` → ``v4:c4``; other names in lower case."""
    named = re.match(r"V4 (?:paged|state) pool ?'?([^']*)'?$", printed)
    if named:
        return f"v4:{named[1]}"
    name = "_".join(printed.lower().removesuffix(" hierarchical cache").replace("hierarchical ", "").split())
    return {"nsa": "nsa_indexer", "dsa": "dsa_indexer", "target": "kv"}.get(name, name)


# unit → how it is converted, what a value looks like in ``begins``, and what behind a key
UNITS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "": (str, "", r"[^\s,;)]*[^\s,;).]"),
    "int": (lambda text: int(float(text)), r"\d+", r"-?\d+(?:\.0)?(?![\d.]*\d|[eE][+-]?\d)"),
    "float": (float, _N, rf"{_N}(?:[eE][+-]?\d+)?|inf|nan"),
    "bool": (lambda text: text == "True", "True|False", "True|False"),
    "gb": (lambda text: round(float(text) * GB), _N, _WHOLE_NUMBER),
    "gib": (lambda text: round(float(text) * GIB), _N, _WHOLE_NUMBER),
    "kb": (lambda text: int(text) * KIB, r"\d+", r"\d+"),
    "mixed": (
        lambda text: round(float(text.split()[0]) * (GIB if text.endswith("GiB") else MIB)),
        r"[\d.]+ [MG]iB",
        r"[\d.]+ [MG]iB",
    ),
    "ms": (lambda text: float(text) / 1000, _N, _WHOLE_NUMBER),
    "ints": (lambda text: tuple(int(number) for number in re.findall(r"\d+", text)), r"\[[\d, ]*\]", r"\[[\d, ]*\]"),
    "pool": (_pool_name, "", ""),
    "lower": (str.lower, "", ""),
}
# followed by nothing that makes its last letter optional or one of several
_ONLY_WORD = re.compile(r"[A-Za-z_]\w*(?![\w?*{+|])")
_PLACEHOLDER = re.compile(r"\{([a-z]\w*)\}")
_GROUP = re.compile(r"\(\?P<(\w+)>")


@dataclass(frozen=True)
class Statement:
    """One entry of the table; the attributes are the entry's, ``keys`` with those of its groups."""

    variant: str
    event: type[ev.Event]
    begins: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    const: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    lines: int = 0
    printed: tuple[tuple[str, ...], ...] = ()

    # compiled when a message first begins like one: most logs need a handful of the entries
    @cached_property
    def head(self) -> re.Pattern[str]:
        """``begins``, compiled."""
        return self._compiled(_PLACEHOLDER.sub(lambda place: f"(?P<{place[1]}>{_unit(place[1])[1]})", self.begins))

    @cached_property
    def readers(self) -> tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...]:
        """Field, where it is printed, and how it is converted, for each of ``keys``."""
        readers = []
        for key, name in self.keys.items():
            base, _, unit = name.partition("__")
            # people who shorten a line leave the colon of a size out: "K 1.37 GB"
            between = r"(?: ?[:=] ?| (?=[\d.-]+ ?GB))" if unit == "gib" else " ?[:=] ?"
            convert, _, value = UNITS[unit]
            readers.append((base, self._compiled(rf"(?:^|[\s,.({{]){key}{between}({value})"), convert))
        return tuple(readers)

    def _compiled(self, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise InputError(f"line.{self.variant}: not a regular expression: {pattern!r}: {error}") from error

    def match(self, message: str) -> dict[str, Any] | None:
        """The fields the message carries, or None if it is another statement."""
        found = self.head.match(message)
        if found is None:
            return None
        values = dict(self.const)
        for name, text in found.groupdict().items():
            if text is not None:
                try:
                    values[name.partition("__")[0]] = _unit(name)[0](text)
                except (ValueError, OverflowError):
                    return None  # not a number, or beyond any machine's
        for name, regex, convert in self.readers:
            if value := regex.search(message):
                with suppress(ValueError, OverflowError):
                    values[name] = convert(value[1])
        return values


def _unit(name: str) -> tuple[Callable[[str], Any], str, str]:
    return UNITS[name.partition("__")[2]]


def read_table(path: Path) -> tuple[dict[str, Statement], dict[str, str]]:
    """The statements by variant, and the columns of batch lines by key as printed.

    Raises:
        InputError: an entry that names an event, field, unit or group that does not exist, or has an unknown part; a
            regular expression is looked at when it is first needed.
    """
    kinds = {kind.kind: kind for kind in vars(ev).values() if isinstance(kind, type) and issubclass(kind, ev.Event)}
    variant = ""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        statements = {}
        for variant, entry in table["line"].items():
            keys = {key: name for group in entry.pop("groups", ()) for key, name in table["keys"][group].items()}
            keys |= entry.pop("keys", {})
            kind = kinds[entry.pop("event")]
            statement = Statement(variant, kind, keys=keys, **entry)
            begins = statement.begins
            named = [*keys.values(), *_PLACEHOLDER.findall(begins), *_GROUP.findall(begins), *statement.const]
            parts = [name.partition("__") for name in named]
            known = {each.name for each in fields(kind)}
            if wrong := [name for name, _, unit in parts if name not in known or unit not in UNITS]:
                raise InputError(f"{path}: line.{variant}: no such field of {kind.__name__}, or unit: {wrong}")
            statements[variant] = statement
        return statements, table["batch_columns"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: line.{variant}: not an entry of the table of log lines: {error!r}") from error


STATEMENTS, BATCH_COLUMNS = read_table(data_dir() / "log_statements.toml")


def _by_word() -> dict[str, list[Statement]]:
    """Statements by the word they begin with (``*word``: that stands second); those that any word may begin: ""."""
    index: dict[str, list[Statement]] = {"": []}
    for statement in STATEMENTS.values():
        only = _ONLY_WORD.match(statement.begins)
        for word in statement.words or ((only[0],) if only else ("",) if statement.begins else ()):
            index.setdefault(word, []).append(statement)
    return index


_BY_WORD = _by_word()
_WORD = re.compile(r"[A-Za-z_]\w*")
_RARE = re.compile(r"page[_ ]size|^\[rank\d|<defunct>")
_NESTED = re.compile(r"^(?:\[[^\]\n]{0,80}\] ?){1,6}(?:>>> )?")
_EXCEPTION = re.compile(
    r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Failure)|Exception)(?:: ?(.*))?$", re.S
)


def match_message(message: str) -> tuple[Statement, dict[str, Any]] | None:
    """The statement that a message makes.

    Args:
        message: text after the record's prefix, or a whole line that has none.

    Returns:
        The entry of the table and the converted fields, or None.
    """
    message = message.lstrip("('\"")
    for statement in _candidates(message):
        if (values := statement.match(message)) is not None:
            return statement, values
    return None


def _candidates(message: str) -> Iterator[Statement]:
    if word := _WORD.match(message):
        second = message[word.end() : word.end() + 40].split(None, 1)[:1]
        yield from chain(_BY_WORD.get(word[0], ()), *(_BY_WORD.get("*" + other, ()) for other in second))
    if _RARE.search(message[:400]) and not message.startswith("server_args="):
        yield from _BY_WORD[""]


def unwrap(message: str) -> str:
    """The message without a logger's own brackets (``[ERROR] [PID-42] >>> …``) and without quoting marks."""
    return _NESTED.sub("", message).strip(QUOTING)


def exception_of(line: str) -> tuple[str, str] | None:
    """``"torch.OutOfMemoryError: CUDA out of memory."`` → its class and message; None for any other line."""
    match = _EXCEPTION.match(line)
    return (match[1], (match[2] or "").strip()) if match else None
