"""``match_message`` finds the statement that a message makes, in the tables of what SGLang, PyTorch and the kernel say.

A named group or key ``name__unit`` becomes the field ``name``, converted by ``UNITS``. Lines that carry several values
name them by key, never by position, because releases add, drop and reorder fields.
Sources: the log calls of the 30 releases 0.4.4 … 0.5.23; PyTorch's allocator and process-group messages; mm/oom_kill.c.
"""

from __future__ import annotations

import re
from typing import Any

from hicache_lab.forensics.logs.statement import Pattern
from hicache_lab.forensics.logs.statements_serving import SERVING
from hicache_lab.forensics.logs.statements_startup import STARTUP

PATTERNS: tuple[Pattern, ...] = STARTUP + SERVING
# how many unprefixed lines may follow, by variant
LINES = {pattern.variant: pattern.lines for pattern in PATTERNS}

_WORD = re.compile(r"[A-Za-z_]\w*")
_NESTED = re.compile(r"^(?:\[[^\]\n]{0,80}\] ?){1,6}(?:>>> )?")
_EXCEPTION = re.compile(
    r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Failure)|Exception)(?:: ?(.*))?$", re.S
)
QUOTING = " \t>`'\"*|"


def _tables() -> tuple[dict[str, tuple[Pattern, ...]], dict[str, tuple[Pattern, ...]], tuple[Pattern, ...]]:
    first: dict[str, list[Pattern]] = {}
    second: dict[str, list[Pattern]] = {}
    for pattern in PATTERNS:
        for word in pattern.first_words:
            (second if word[0] == "*" else first).setdefault(word.lstrip("*"), []).append(pattern)
    return (
        {word: tuple(found) for word, found in first.items()},
        {word: tuple(found) for word, found in second.items()},
        tuple(pattern for pattern in PATTERNS if not pattern.first_words),
    )


_FIRST, _SECOND, _ANY = _tables()
_RARE = re.compile(r"page[_ ]size|^\[rank\d|<defunct>")


def match_message(message: str) -> tuple[Pattern, dict[str, Any]] | None:
    """The statement that a message makes.

    Args:
        message: text after the record's prefix, or a whole line that has none.

    Returns:
        The row of the table and the converted fields, or None.
    """
    message = message.lstrip("('\"")
    word = _WORD.match(message)
    if word is not None:
        for pattern in _FIRST.get(word[0], ()):
            if (fields := pattern.match(message)) is not None:
                return pattern, fields
        rest = message[word.end() : word.end() + 40].split(None, 1)
        for pattern in _SECOND.get(rest[0], ()) if rest else ():
            if (fields := pattern.match(message)) is not None:
                return pattern, fields
    if _RARE.search(message[:400]) and not message.startswith("server_args="):
        for pattern in _ANY:
            if (fields := pattern.match(message)) is not None:
                return pattern, fields
    return None


def unwrap(message: str) -> str:
    """The message without a logger's own brackets (``[ERROR] [PID-42] >>> …``) and without quoting marks."""
    return _NESTED.sub("", message).strip(QUOTING)


def exception_of(line: str) -> tuple[str, str] | None:
    """``"torch.OutOfMemoryError: CUDA out of memory."`` → its class and message; None for any other line."""
    match = _EXCEPTION.match(line)
    return (match[1], (match[2] or "").strip()) if match else None
