"""A ``server_args=`` line of a log, or the reply of /server_info → ``LaunchConfig``; nothing is evaluated.

Three forms: ``ServerArgs(key=value, …)`` (to 0.5.18), ``{'key': value, …}`` (0.5.19+), and JSON.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.base.secrets import is_secret, redact
from hicache_lab.sglang.launch.config import FIELD_TYPES, LaunchConfig, LaunchSource, Value

_START = re.compile(r"server_args\s*=\s*(?=ServerArgs\(|\{)|(?=ServerArgs\()|\A\s*(?=\{)|\"server_args\"\s*:\s*(?=\{)")
_WORD = re.compile(r"[A-Za-z_][\w.]*")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|\n|.)", re.DOTALL)
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_CONSTANTS = {
    "True": True, "true": True, "False": False, "false": False, "None": None, "null": None,
    "inf": float("inf"), "Infinity": float("inf"), "nan": float("nan"), "NaN": float("nan"),
}  # fmt: skip
_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
_DEEPEST = 40


class _CutOffError(Exception):
    """The text ends inside a value."""


class _Reader:
    """Reads Python- and JSON-like values from a text that may stop anywhere."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at
        self.key: Any = None  # the entry that is being read

    def skip(self, extra: str = "") -> str:
        """Skip blanks (and ``extra``); returns the next character, or "" at the end."""
        while self.at < len(self.text) and (self.text[self.at].isspace() or self.text[self.at] in extra):
            self.at += 1
        return self.text[self.at : self.at + 1]

    def value(self, depth: int = 0) -> Any:
        """The next value; objects and enum members come back as their text."""
        char = self.skip()
        if not char:
            raise _CutOffError
        if depth > _DEEPEST:
            raise InputError(f"server_args: more than {_DEEPEST} levels of brackets; this is not a dump")
        if char in "'\"":
            return self.string()
        if char == "{":
            return self.mapping(depth)
        if char in "[(":
            return self.sequence(depth)
        if char == "<":
            return self.balanced()
        if match := _NUMBER.match(self.text, self.at):
            self.at = match.end()
            return int(match[0]) if re.fullmatch(r"[+-]?[0-9]+", match[0]) else float(match[0])
        sign = -1 if self.text.startswith(("-inf", "-Infinity"), self.at) else 1
        self.at += sign < 0
        return self.name(sign)

    def name(self, sign: int) -> Any:
        match = _WORD.match(self.text, self.at)
        if match is None:
            self.at += 1
            return None
        self.at = match.end()
        if match[0] in _CONSTANTS:
            constant = _CONSTANTS[match[0]]
            return constant if sign > 0 else sign * float(constant or 0)
        if self.skip() == "(":
            return match[0] + self.balanced()
        return match[0]

    def string(self) -> str:
        quote = self.text[self.at]
        match = re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL).match(self.text, self.at)
        if match is None:
            raise _CutOffError
        self.at = match.end()
        return _ESCAPE.sub(_unescaped, match[1]) if "\\" in match[1] else match[1]

    def balanced(self) -> str:
        """The text of a bracketed expression, strings in it respected."""
        start, pending = self.at, []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "'\"":
                self.string()
                continue
            if char in _CLOSING:
                pending.append(_CLOSING[char])
            elif pending and char == pending[-1]:
                pending.pop()
            self.at += 1
            if not pending:
                return self.text[start : self.at]
        raise _CutOffError

    def sequence(self, depth: int) -> tuple[Any, ...]:
        closing = _CLOSING[self.text[self.at]]
        self.at += 1
        values = []
        while (char := self.skip(",")) != closing:
            if not char:
                raise _CutOffError
            values.append(self.value(depth + 1))
        self.at += 1
        return tuple(values)

    def mapping(self, depth: int) -> dict[str, Any]:
        self.at += 1
        values: dict[str, Any] = {}
        self.entries(values, "}", ":", depth + 1)
        return values

    def entries(self, values: dict[str, Any], closing: str, separator: str, depth: int) -> bool:
        """Read entries to the closing bracket into ``values``; whether each of them had a value."""
        is_whole = True
        while (char := self.skip(",")) != closing:
            if not char:
                raise _CutOffError
            key = self.name(1) if separator == "=" else self.value(depth)
            if depth == 0:
                self.key = key
            if self.skip() == separator:
                self.at += 1
                values[str(key)] = self.value(depth or 1)
            else:
                is_whole = False
        self.at += 1
        return is_whole


def _unescaped(match: re.Match[str]) -> str:
    body = match[1]
    if body[0] in "xuU" and len(body) > 1:
        number = int(body[1:], 16)
        return chr(number) if number < 0x110000 else "\ufffd"
    if body[0] in "01234567":
        return chr(int(body, 8))
    return _PLAIN_ESCAPES.get(body, body)


def _entries(reader: _Reader) -> tuple[dict[str, Any], str | None]:
    """The top-level entries, and what is said about a loss: where the text ended, or None."""
    values: dict[str, Any] = {}
    is_repr = reader.text.startswith("ServerArgs(", reader.at)
    reader.at += len("ServerArgs(") if is_repr else 1
    try:
        is_whole = reader.entries(values, ")" if is_repr else "}", "=" if is_repr else ":", 0)
    except _CutOffError:
        lost = (
            "the text ends" if reader.key is None or str(reader.key) in values else f"the text ends inside {reader.key}"
        )
        after = f" after {list(values)[-1]}" if values else ""
        return values, f"server_args is cut off: {lost}{after}; the fields that follow are not known"
    # "..." and the like
    return values, None if is_whole else "server_args: somebody left fields out of this text; they are not known"


def read_server_args(text: str) -> tuple[dict[str, Any], LaunchConfig] | None:
    """The first ``server_args=…`` of a log line, read once: every entry as printed, and the launch it describes.

    The line may be cut, shortened or damaged: an entry of another type than SGLang's is left out of the launch, and
    ``LaunchConfig.notes`` says what was lost. None if the text holds no entry.
    """
    start = _START.search(text)
    entries, loss = _entries(_Reader(text, start.end())) if start else ({}, None)
    return (entries, _launch(entries, loss, strict=False)) if entries else None


def parse_server_args(text: str) -> LaunchConfig:
    """Read the server's own account of its arguments.

    Args:
        text: a log line (or a whole log: the last launch counts) with ``server_args=…``, or the JSON of
            ``/server_info`` or ``/get_server_info``.

    Returns:
        The resolved values: a field is None where the dump says None or lacks it. ``sglang_version`` is the
        reply's own ``version``. Fields without a place are in ``other``; ``notes`` says what was lost.

    Raises:
        InputError: no dump in the text, or a field of another type than SGLang's.
    """
    starts = [match.end() for match in _START.finditer(text)]
    if not starts:
        raise InputError(
            "no server_args in this text; expected 'server_args=ServerArgs(…)', "
            "'server_args={…}' or the JSON of /server_info"
        )
    entries, loss = _entries(_Reader(text, starts[-1]))
    if isinstance(entries.get("server_args"), dict):
        entries = {**entries["server_args"], "version": entries.get("version")}
    if not {"model_path", "tp_size"} & set(entries):
        raise InputError("server_args: neither model_path nor tp_size in it; this is not SGLang's server_args")
    return _launch(entries, loss, strict=True)


def _launch(entries: dict[str, Any], loss: str | None, *, strict: bool) -> LaunchConfig:
    version = entries.get("version")
    values, other, notes = {}, [], [loss] if loss else []
    for key, value in entries.items():
        field = "model" if key == "model_path" else key
        if key == "version":
            continue
        if field in FIELD_TYPES:
            try:
                values[field] = _field_value(field, key, value)
            except InputError as error:
                if strict:
                    raise
                notes.append(str(error))
        elif value is not None and value is not False and not isinstance(value, dict):
            other.append(("--" + key.replace("_", "-"), _other_value(key, value)))
    return LaunchConfig(
        **values,
        sglang_version=version if isinstance(version, str) else None,
        other=tuple(other),
        notes=tuple(notes),
        source=LaunchSource("server_args"),
    )


def _field_value(field: str, key: str, value: Any) -> Any:
    kind = FIELD_TYPES[field]
    if value is None or (kind in (bool, str) and isinstance(value, kind)):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        is_whole = value == int(value)
        if is_whole and (kind is int or field == "hicache_size"):
            return int(value)
        if kind is float:
            return float(value)
    raise InputError(f"server_args: {key} is {str(value)[:60]!r}; expected {kind.__name__}")


def _other_value(key: str, value: Any) -> Value:
    if value is True:
        return None
    if is_secret(key):
        return "$" + key.upper()
    return tuple(redact(str(item)) for item in value) if isinstance(value, tuple) else redact(str(value))
