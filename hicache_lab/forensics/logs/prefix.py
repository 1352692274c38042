"""Where the records of a line begin: SGLang's own prefix, wherever a container or a pipeline has put it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from hicache_lab.base.times import ISO, iso_time
from hicache_lab.forensics.logs.events import Rank

_TAGS = r"(?: [A-Za-z0-9_. ]*)?"
# the ordinary prefix, found anywhere in a line: progress bars end without a newline
_HEAD = re.compile(rf"\[(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,](\d{{1,6}}))?({_TAGS})\] ?")
# before 0.4.4 there was no date; a rank tag is demanded, because progress bars print [00:18<00:01]
_UNDATED = re.compile(r"\[\d\d:\d\d:\d\d((?: (?:DP|TP|PP|EP)\d+)+)\] ")
# the bracket was cut off or eaten by a pipeline: "2026-01-02T03:04:05.123Z pod INFO TP0] …", "03:04:05 TP0] …"
_EATEN = re.compile(r"^([^\[\]]{0,160}?)((?:(?:^| )(?:DP|TP|PP|EP|ATTN_CP|MOE_DP)\d+)+)\] ")
_BARE = re.compile(rf"^\[?{ISO}\]:? ")
# structured loggers without SGLang's prefix: "<stamp> LEVEL module: …", "<stamp> - module - LEVEL - …"
_LOGGER = re.compile(
    rf"^\[?{ISO}(?:Z|[+-]\d\d:?\d\d)?\]?[ \t]+(?:\S+ ){{0,3}}?(?:- )?"
    r"\[?(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)\]?[ :\t-]+"
    r"(?:[a-z_]\w*(?:\.\w+)+(?::\d+)?: )?"
)
_FIND_STAMP = re.compile(ISO)
_TAG = re.compile(r"([A-Za-z_][A-Za-z_.]*?)(\d{1,9})?$")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00\x08]")
_QUOTED = ("server_args=", "Receive: ", "Finish: ", "ReqTimeStats(", "Req Time Stats(")


@dataclass(frozen=True, slots=True)
class Head:
    """One record: its time and rank, its message, and the prefix as it was printed."""

    at: datetime | None
    rank: Rank
    message: str
    headed: bool = True
    prefix: str = ""


@lru_cache(maxsize=4096)
def rank_of(tags: str) -> Rank:
    """``" DP0 TP3"`` → the rank; a word without a number (a fork's mode) counts as 0 only if it is a known tag."""
    found = []
    for word in tags.split():
        match = _TAG.match(word)
        if match and match[2] is not None:
            found.append((match[1].lower(), int(match[2])))
    return Rank(tuple(found))


def plain(line: str) -> str:
    """The line without terminal colours, cursor codes and NULs."""
    return _ANSI.sub("", line) if "\x1b" in line or "\x00" in line or "\x08" in line else line


def for_terminal(text: str) -> str:
    """Log text for a terminal: control characters are shown, not obeyed."""
    return "".join(
        char if char.isprintable() else " " if char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def records(line: str) -> list[Head]:
    """Split one physical line (no newline) into its records.

    Progress bars end with a carriage return and two ranks can write at once, so a record may begin anywhere. A line
    without any record gives one head with ``headed`` false: a traceback, a wrapped line, a print.
    """
    line = plain(line)
    if "\r" in line:
        return [head for part in line.split("\r") if part.strip() for head in records(part)]
    matches = list(_HEAD.finditer(line)) if "[" in line else []
    if matches:
        return _headed(line, matches)
    return [_unusual(line)]


def _headed(line: str, matches: list[re.Match[str]]) -> list[Head]:
    heads = []
    before = line[: matches[0].start()]
    if before.strip():
        heads.append(Head(None, Rank(), before, headed=False))
    for index, match in enumerate(matches):
        message = line[match.end() :]
        # prompts and arguments quote what they like: a record inside them is not one
        quoted = message.startswith(_QUOTED)
        if not quoted and index + 1 < len(matches):
            message = line[match.end() : matches[index + 1].start()]
        heads.append(Head(iso_time(match[1], match[2]), rank_of(match[3]), message, prefix=match[0]))
        if quoted:
            break
    return heads


def _unusual(line: str) -> Head:
    if match := _UNDATED.search(line):
        return Head(None, rank_of(match[1]), line[match.end() :], prefix=match[0])
    if match := _EATEN.match(line):
        stamp = _FIND_STAMP.search(match[1])
        at = iso_time(stamp[1], stamp[2]) if stamp else None
        return Head(at, rank_of(match[2]), line[match.end() :], prefix=match[0])
    if match := _LOGGER.match(line) or _BARE.match(line):
        return Head(iso_time(match[1], match[2]), Rank(), line[match.end() :], prefix=match[0])
    return Head(None, Rank(), line, headed=False)
