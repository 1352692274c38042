"""What a line's wording says about the release that printed it.

The table of log lines gives each wording the first and last release known to print it. The releases of a run are those
that all its wordings allow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hicache_lab.forensics.logs.statements import STATEMENTS
from hicache_lab.sglang.releases import VERIFIED, parse_version


@dataclass(frozen=True, slots=True)
class ReleaseRange:
    """Releases from ``first`` to ``last``, both included."""

    first: str = VERIFIED[0]
    last: str = VERIFIED[-1]

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} … {self.last}"


def release_range(lines: Iterable[tuple[str, str]]) -> ReleaseRange | None:
    """The releases that could have printed all these lines.

    Args:
        lines: (variant of the event, its text) of one run.

    Returns:
        None if no release of the range read prints them all: a fork, a mixture of runs, or a newer release.
    """
    first, last = [VERIFIED[0]], [VERIFIED[-1]]
    for variant, text in lines:
        for wording, *releases in STATEMENTS[variant].printed if variant in STATEMENTS else ():
            if re.search(wording, text):
                first += releases[:1]
                last += releases[1:]
    found = ReleaseRange(max(first, key=parse_version), min(last, key=parse_version))
    return found if parse_version(found.first) <= parse_version(found.last) else None
