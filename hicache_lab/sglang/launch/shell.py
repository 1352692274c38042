"""Pasted shell text → commands → words, as a shell reads them; nothing is ever run.

Quotes, comments, continuations, redirections, variables and arrays follow bash; what people's pastes
add (prompts, Markdown fences, a blank after the backslash, PowerShell's backtick) is accepted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hicache_lab.base.errors import UsageError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACED = re.compile(r"\{([A-Za-z_]\w*(?:\[[@*]\])?)(?:(:?[-=])([^{}]*))?\}")
_ARRAY = re.compile(r"\"?\$\{([A-Za-z_]\w*)\[[@*]\]\}\"?(?=[\s;&|)]|$)")
_KUBERNETES = re.compile(r"\(([A-Za-z_]\w*)\)")
_ARRAY_START = re.compile(r"([A-Za-z_]\w*)\+?=")
_PROMPT = re.compile(
    r"\s*(?:\([\w.\-]+\)\s*)?"
    r"(?:[\w.\-]+@[\w.\-]+[: ]\S*\s*[$#%]\s+|(?:PS )?[A-Z]:\\[^>\n]*>\s*|[$%❯]\s+)"
)
_CONTINUED = re.compile(r"(\\|`|\^)([ \t]*)\n")
_REDIRECTION = re.compile(r"&>>?|<<<|[<>]>?[&|]?")
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*[\"']?(\w+)[\"']?")
BRANCHES = {"if", "then", "else", "elif", "case", "for", "while", "until"}
_OPERATORS = ";&|()"
# a no-break space is what a web page makes of a blank
_BLANKS = " \t\u00a0"


@dataclass(frozen=True)
class ShellWord:
    """One word of a command.

    Attributes:
        text: its value.
        raw: how it is written, quotes included; written anew where a variable was replaced by its value.
        unresolved: the variables that nobody gave a value.
        lead: what stands before it: a blank, or a continued line and its indentation.
    """

    text: str
    raw: str
    unresolved: tuple[str, ...] = ()
    lead: str = " "


def plain_words(texts: Iterable[str]) -> list[ShellWord]:
    """Words that need no reading, as of an argv."""
    return [ShellWord(text, shlex.quote(text)) for text in texts]


def assignments(words: Iterable[ShellWord]) -> dict[str, str]:
    """The variables that words of the form NAME=value set."""
    matches = (ASSIGNMENT.fullmatch(word.text) for word in words)
    return {match[1]: match[2] for match in matches if match is not None}


@dataclass(frozen=True)
class Command:
    """One simple command and the line it starts on."""

    words: tuple[ShellWord, ...]
    line: int


@dataclass
class _Reading:
    text: str
    variables: dict[str, str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    at: int = 0
    commands: list[Command] = field(default_factory=list)
    words: list[ShellWord] = field(default_factory=list)
    command_start: int | None = None
    word_start: int | None = None
    word_end: int = 0
    value: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    is_expanded: bool = False
    is_target: bool = False
    resume: int | None = None

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def ahead(self) -> str:
        return self.text[self.at + 1 : self.at + 2]


def _without_prompts(lines: Iterable[str]) -> Iterator[str]:
    """Lines without fences and prompts; ``> `` is a prompt only after a prompt and a continued line."""
    is_prompted = False
    before = ""
    for line in lines:
        prompt = _PROMPT.match(line)
        if line.lstrip().startswith("```"):
            before = ""
        elif is_prompted and line.startswith("> ") and re.search(r"[\\`^][ \t]*$", before):
            before = line[2:]
        else:
            is_prompted = is_prompted or prompt is not None
            before = line[prompt.end() :] if prompt else line
        yield before


def clean_paste(text: str) -> tuple[str, list[str]]:
    """Take prompts, fences and stray blanks off a paste; returns the text and what was noticed."""
    lines = _without_prompts(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    joined = "\n".join(lines).rstrip("\n") + "\n"
    notes = [
        f"line {joined.count(chr(10), 0, match.start()) + 1}: a blank after the backslash ends the command "
        "in a shell; it is read as continued here: take the blank away"
        for match in _CONTINUED.finditer(joined)
        if match[1] == "\\" and match[2]
    ]
    return joined, notes


def read_commands(text: str, variables: Mapping[str, str] | None = None) -> list[Command]:
    """Split shell text into simple commands and expand the variables that the text itself assigns.

    Args:
        text: shell text, as ``clean_paste`` leaves it.
        variables: values known from elsewhere.

    Raises:
        UsageError: a quote or a bracket that is never closed; the message names its line.
    """
    reading = _Reading(text, dict(variables or {}))
    while reading.at < len(reading.text):
        _step(reading)
    _end_command(reading)
    return reading.commands


def _step(r: _Reading) -> None:
    char = r.text[r.at]
    continued = _CONTINUED.match(r.text, r.at)
    if continued and not (continued[1] == "^" and r.word_start is not None):
        if continued[2] or continued[1] != "\\":
            _end_word(r)
        r.at = continued.end()
    elif char == "(" and r.word_start is not None and _ARRAY_START.fullmatch(r.text[r.word_start : r.at]):
        _array(r)
    elif char in "<>" or (char == "&" and r.ahead() == ">"):
        _redirection(r)
    elif char == "\n" or char in _OPERATORS:
        _end_command(r)
        r.at += 1
        if char == "\n" and r.resume is not None:
            r.at, r.resume = max(r.at, r.resume), None
    elif char in _BLANKS:
        _end_word(r)
        r.at += 1
    elif char == "#" and r.word_start is None:
        end = r.text.find("\n", r.at)
        r.at = len(r.text) if end < 0 else end
    else:
        r.command_start = r.at if r.command_start is None else r.command_start
        array = _ARRAY.match(r.text, r.at) if r.word_start is None else None
        if array and array[1] in r.arrays:
            # "${NAME[@]}" standing alone: each element is a word of its own
            r.words += plain_words(r.arrays[array[1]])
            r.at = r.word_end = array.end()
            return
        r.word_start = r.at if r.word_start is None else r.word_start
        if char == "'":
            end = _closing(r, "'")
            r.value.append(r.text[r.at + 1 : end])
            r.at = end + 1
        elif char == '"':
            _double_quoted(r)
        elif char == "\\":
            r.value.append(r.ahead())
            r.at += 2
        elif char in "$`":
            _expansion(r, is_quoted=False)
        else:
            r.value.append(char)
            r.at += 1


def _closing(r: _Reading, quote: str) -> int:
    end = r.text.find(quote, r.at + 1)
    if end < 0:
        raise UsageError(f"line {r.line(r.at)}: the quote {quote} is never closed")
    return end


def _double_quoted(r: _Reading) -> None:
    opened = r.at
    r.at += 1
    while r.at < len(r.text) and r.text[r.at] != '"':
        char, following = r.text[r.at], r.ahead()
        if char == "\\" and following and following in '"\\$`\n':
            r.value.append("" if following == "\n" else following)
            r.at += 2
        elif char in "$`":
            _expansion(r, is_quoted=True)
        else:
            r.value.append(char)
            r.at += 1
    if r.at >= len(r.text):
        raise UsageError(f'line {r.line(opened)}: the quote " is never closed')
    r.at += 1


def _substitution_end(r: _Reading) -> int:
    if r.text[r.at] == "`":
        return _closing(r, "`") + 1
    depth = 0
    for at in range(r.at + 1, len(r.text)):
        depth += {"(": 1, ")": -1}.get(r.text[at], 0)
        if depth == 0:
            return at + 1
    raise UsageError(f"line {r.line(r.at)}: $( is never closed")


def _expansion(r: _Reading, *, is_quoted: bool) -> None:
    if r.text[r.at] == "$":
        after = r.at + 1
        for pattern in (_BRACED, _KUBERNETES, _NAME):
            if match := pattern.match(r.text, after):
                name = match[0] if pattern is _NAME else match[1]
                default = match[3] if pattern is _BRACED and match[2] else None
                _expand(r, name, default, match.end(), is_quoted=is_quoted)
                return
        if r.ahead() != "(":
            # a lone $, $1, $? and the like stay as they are
            r.value.append("$")
            r.at = after
            return
    end = _substitution_end(r)
    r.unresolved.append(r.text[r.at : end])
    r.value.append(r.text[r.at : end])
    r.at = end


def _expand(r: _Reading, name: str, default: str | None, end: int, *, is_quoted: bool) -> None:
    value = r.variables.get(name)
    if not value and default is not None:
        value = default.strip("\"'")
    if value is None:
        r.unresolved.append(name)
        r.value.append(r.text[r.at : end])
        r.at = end
        return
    r.at, r.is_expanded = end, True
    if is_quoted:
        r.value.append(value)
        return
    parts = re.split(r"\s+", value)
    for number, part in enumerate(parts):
        r.value.append(part)
        if number + 1 < len(parts):
            _end_word(r)
            r.word_start, r.is_expanded = r.at, True


def _array(r: _Reading) -> None:
    """``NAME=(a b c)`` and ``NAME+=(d)``, over several lines as well."""
    start = r.word_start
    assert start is not None
    head = r.text[start : r.at]
    inner = _Reading(r.text, r.variables, r.arrays, at=r.at + 1)
    while inner.at < len(inner.text) and inner.text[inner.at] != ")":
        _step(inner)
    if inner.at >= len(inner.text):
        raise UsageError(f"line {r.line(r.at)}: ( is never closed")
    _end_command(inner)
    elements = [word.text for command in inner.commands for word in command.words]
    name = head.rstrip("+=")
    r.arrays[name] = (r.arrays.get(name, []) if "+" in head else []) + elements
    r.at = inner.at + 1
    r.word_start, r.value, r.unresolved = None, [], []
    r.command_start = r.command_start if r.words else None


def _end_word(r: _Reading) -> None:
    if r.word_start is None:
        return
    text = "".join(r.value)
    raw = r.text[r.word_start : r.at]
    if r.is_target:
        r.is_target = False
    elif not (r.is_expanded and not text and raw.startswith("$")):
        gap = r.text[r.word_end : r.word_start]
        lead = " \\\n" + gap.rpartition("\n")[2] if r.words and "\n" in gap else " "
        written = shlex.quote(text) if r.is_expanded and not r.unresolved else raw
        r.words.append(ShellWord(text, written, tuple(r.unresolved), lead))
    r.word_end = r.at
    r.word_start, r.value, r.unresolved, r.is_expanded = None, [], [], False


def _end_command(r: _Reading) -> None:
    _end_word(r)
    r.is_target = False
    if r.words and r.command_start is not None:
        r.commands.append(Command(tuple(r.words), r.line(r.command_start)))
        # a command that only assigns
        words = r.words[1:] if r.words[0].text in {"export", "declare", "set", "local", "readonly"} else r.words
        if all(ASSIGNMENT.fullmatch(word.text) for word in words):
            r.variables |= assignments(word for word in words if not word.unresolved)
    r.words, r.command_start = [], None


def _redirection(r: _Reading) -> None:
    """Skip ``> file``, ``2>&1``, ``&> file``, ``> >(tee log)`` and ``<<EOF`` with its lines."""
    if r.word_start is not None and r.text[r.word_start : r.at].isdigit():
        r.word_start, r.value = None, []
    _end_word(r)
    if r.text[r.at] in "<>" and r.ahead() == "(":
        r.at = _substitution_end(r)
        r.word_end, r.is_target = r.at, False
        return
    here = _HERE_DOCUMENT.match(r.text, r.at)
    if here is not None and not r.text.startswith("<<<", r.at):
        # the document's lines follow this line; without its end mark it takes the rest, as in a shell
        end = re.compile(rf"^[ \t]*{here[1]}[ \t]*$\n?", re.MULTILINE).search(r.text, here.end())
        r.at, r.resume = here.end(), end.end() if end else len(r.text)
        return
    match = _REDIRECTION.match(r.text, r.at)
    assert match is not None
    r.at, r.is_target = match.end(), True
