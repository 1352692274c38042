"""The package's errors; each class is one way to fail and one exit code.

"Does not fit" is not among them: it is a result (see ``preflight``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class HicacheLabError(Exception):
    """Something could not be done; the message names the flag, file or line, and what would help."""

    exit_code = 1


class UsageError(HicacheLabError):
    """A flag or a parameter is missing, misspelt or not of the expected form."""

    exit_code = 2


class UnknownFact(HicacheLabError):
    """An architecture, a release or a fact that is not known; nothing is guessed."""


class InputError(HicacheLabError):
    """A file or a stream that is not what it should be; the message names file and line."""


class HostError(HicacheLabError):
    """The machine did not give a fact or a resource: memory files, control groups, disk, browser."""


class ServerError(HicacheLabError):
    """A server could not be reached, is not SGLang, is not ready, or refused the request."""


@contextmanager
def missing_packages_named() -> Iterator[None]:
    """What runs inside it (or is decorated with it) and lacks a package of others says which, and how to get it.

    Raises:
        HostError: a package that hicache_lab asks for is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in {"", "hicache_lab", *sys.stdlib_module_names}:
            raise
        raise HostError(
            f"needs the package {package}, which is not installed; "
            f"`pip install hicache-lab` brings it and all others, `pip install {package}` it alone"
        ) from None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about an unknown name: the nearest known one, or ``otherwise``."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else otherwise
