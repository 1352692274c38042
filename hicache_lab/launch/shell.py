"""Pasted shell text → commands → words, as a shell reads them; nothing is ever run.

Quotes, comments, continuations, redirections and variables follow POSIX sh; what people's pastes add (prompts,
Markdown fences, a blank after the backslash, PowerShell's backtick) is accepted with a note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache_lab.errors import UsageError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACED = re.compile(r"\{([A-Za-z_]\w*)(?:(:?[-=])([^{}]*))?\}")
_PROMPT = re.compile(
    r"\s*(?:\([\w.\-]+\)\s*)?(?:[\w.\-]+@[\w.\-]+[: ]\S*\s*[$#%]\s+|(?:PS )?[A-Z]:\\[^>\n]*>\s*|[$%❯]\s+)"
)
_CONTINUED = re.compile(r"(\\|`|\^)([ \t]*)\n")
_OPERATORS = ";&|()"


@dataclass(frozen=True)
class Word:
    """One word: its value, its text with the quotes, and the variables nobody gave a value."""

    text: str
    raw: str
    unresolved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """One simple command and the line it starts on."""

    words: tuple[Word, ...]
    line: int
    is_multiline: bool = False


@dataclass
class _Reading:
    text: str
    variables: dict[str, str]
    at: int = 0
    commands: list[Command] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    value: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    start: int | None = None
    command_start: int | None = None


def clean_paste(text: str) -> tuple[str, list[str]]:
    """Take prompts, fences and stray blanks off a paste; returns the text and what was noticed."""
    notes: list[str] = []
    lines = []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ").split("\n"):
        continues = bool(lines) and bool(re.search(r"[\\`^][ \t]*$", lines[-1]))
        if line.lstrip().startswith("```"):
            line = ""
        elif continues and re.match(r"\s*> ", line):
            line = line.lstrip()[2:]
        else:
            line = _PROMPT.sub("", line, count=1) if _PROMPT.match(line) else line
        lines.append(line)
    joined = "\n".join(lines) + "\n"
    for match in _CONTINUED.finditer(joined):
        if match[1] == "\\" and match[2]:
            number = joined.count("\n", 0, match.start()) + 1
            notes.append(
                f"line {number}: a blank after the backslash ends the command in a shell; read as continued"
            )
    return joined.rstrip("\n") + "\n", notes


def read_commands(text: str, variables: Mapping[str, str] | None = None) -> list[Command]:
    """Split shell text into simple commands and expand the variables that the text itself assigns.

    Args:
        text: shell text, as ``clean_paste`` leaves it.
        variables: values known from elsewhere.

    Raises:
        UsageError: a quote that is never closed; the message names its line.
    """
    reading = _Reading(text, dict(variables or {}))
    while reading.at < len(text):
        _step(reading)
    _end_command(reading)
    return reading.commands


def _step(r: _Reading) -> None:
    char = r.text[r.at]
    continued = _CONTINUED.match(r.text, r.at)
    if continued and not (continued[1] == "^" and r.start is not None):
        if continued[2] or continued[1] != "\\":
            _end_word(r)
        r.at = continued.end()
    elif char == "\n" or char in _OPERATORS:
        _operator(r, char)
    elif char in " \t":
        _end_word(r)
        r.at += 1
    elif char == "#" and r.start is None:
        r.at = r.text.index("\n", r.at) if "\n" in r.text[r.at :] else len(r.text)
    elif char in "<>":
        _redirection(r)
    else:
        _begin(r)
        _piece(r, char)


def _begin(r: _Reading) -> None:
    if r.start is None:
        r.start = r.at
    if r.command_start is None:
        r.command_start = r.at


def _piece(r: _Reading, char: str) -> None:
    if char == "'":
        end = _closing(r, "'")
        r.value.append(r.text[r.at + 1 : end])
        r.at = end + 1
    elif char == '"':
        _double_quoted(r)
    elif char == "\\":
        r.value.append(r.text[r.at + 1 : r.at + 2])
        r.at += 2
    elif char in "$`":
        _expansion(r)
    else:
        r.value.append(char)
        r.at += 1


def _line(r: _Reading, at: int) -> int:
    return r.text.count("\n", 0, at) + 1


def _closing(r: _Reading, quote: str) -> int:
    end = r.text.find(quote, r.at + 1)
    if end < 0:
        raise UsageError(f"line {_line(r, r.at)}: the quote {quote} is never closed")
    return end


def _double_quoted(r: _Reading) -> None:
    opened = r.at
    r.at += 1
    while r.at < len(r.text) and r.text[r.at] != '"':
        char = r.text[r.at]
        following = r.text[r.at + 1 : r.at + 2]
        if char == "\\" and following in '"\\$`\n':
            r.value.append("" if following == "\n" else following)
            r.at += 2
        elif char in "$`":
            _expansion(r)
        else:
            r.value.append(char)
            r.at += 1
    if r.at >= len(r.text):
        raise UsageError(f'line {_line(r, opened)}: the quote " is never closed')
    r.at += 1


def _substitution_end(r: _Reading) -> int:
    if r.text[r.at] == "`":
        return _closing(r, "`") + 1
    depth, at = 0, r.at + 1
    while at < len(r.text):
        depth += {"(": 1, ")": -1}.get(r.text[at], 0)
        at += 1
        if depth == 0:
            return at
    raise UsageError(f"line {_line(r, r.at)}: $( is never closed")


def _expansion(r: _Reading) -> None:
    rest = r.at + 1
    if r.text[r.at] == "$":
        braced, plain = _BRACED.match(r.text, rest), _NAME.match(r.text, rest)
        kubernetes = re.compile(r"\(([A-Za-z_]\w*)\)").match(r.text, rest)
        found = braced or kubernetes or plain
        if found is not None:
            name = found[0] if found is plain else found[1]
            default = found[3] if found is braced and found[2] else None
            _expand(r, name, default, found.end())
            return
        if r.text[rest : rest + 1] != "(":
            # a lone $, $1, $? and the like stay as they are
            r.value.append("$")
            r.at += 1
            return
    end = _substitution_end(r)
    r.unresolved.append(r.text[r.at : end])
    r.value.append(r.text[r.at : end])
    r.at = end


def _expand(r: _Reading, name: str, default: str | None, end: int) -> None:
    value = r.variables.get(name)
    if value is None and default is not None:
        value = default.strip("\"'")
    if value is None:
        r.unresolved.append(name)
        value = r.text[r.at : end]
    r.value.append(value)
    r.at = end


def _end_word(r: _Reading) -> None:
    if r.start is None:
        return
    raw = r.text[r.start : r.at]
    text = "".join(r.value)
    if "$" in raw and not r.unresolved and "$" not in text and "'" not in raw and re.search(r"\s", text):
        if '"' not in raw:
            # an unquoted variable splits into words
            r.words.extend(Word(part, part) for part in text.split())
        else:
            r.words.append(Word(text, raw))
    else:
        r.words.append(Word(text, raw, tuple(r.unresolved)))
    r.start, r.value, r.unresolved = None, [], []


def _end_command(r: _Reading) -> None:
    _end_word(r)
    if r.words and r.command_start is not None:
        first = _line(r, r.command_start)
        r.commands.append(Command(tuple(r.words), first, "\n" in r.text[r.command_start : r.at].rstrip()))
        _remember(r)
    r.words, r.command_start = [], None


def _remember(r: _Reading) -> None:
    words = r.words[1:] if r.words[0].text in {"export", "declare", "set", "local"} else r.words
    matches = [ASSIGNMENT.fullmatch(word.text) for word in words]
    if all(matches):
        for match, word in zip(matches, words, strict=True):
            if match is not None and not word.unresolved:
                r.variables[match[1]] = match[2]


def _operator(r: _Reading, char: str) -> None:
    if char == "&" and r.text[r.at + 1 : r.at + 2] == ">":
        _end_word(r)
        r.at += 1
        _redirection(r)
        return
    _end_command(r)
    r.at += 1


def _redirection(r: _Reading) -> None:
    """Skip ``> file``, ``2>&1``, ``<<EOF`` with its lines."""
    if r.start is not None and r.text[r.start : r.at].isdigit():
        r.start, r.value = None, []
    _end_word(r)
    match = re.compile(r"(<<-?|[<>&|]+)[ \t]*(&?[^\s;&|()<>]*)").match(r.text, r.at)
    if match is None:
        r.at += 1
        return
    r.at = match.end()
    if match[1].startswith("<<") and match[2]:
        mark = match[2].strip("\"'")
        end = re.compile(rf"^\s*{re.escape(mark)}\s*$", re.MULTILINE).search(r.text, r.at)
        line_end = r.text.find("\n", r.at)
        if end is not None and line_end >= 0:
            r.text = (
                r.text[: line_end + 1]
                + "\n" * r.text.count("\n", line_end + 1, end.end())
                + r.text[end.end() :]
            )
