"""Hot loops: numba compiles them on first use and keeps the result in its own cache; the first use says so.

Import this module only from modules that hold loops, and import those inside the functions that need them: numba takes
most of a second to import. A module of loops has entries (``loop``), which Python calls, and their parts (``part``).
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import event

F = TypeVar("F", bound=Callable[..., Any])
# no check for a division by zero: no loop can make one
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
# what numba raises where its cache cannot be written (a full disk), or a pickle in it is damaged
_NOT_CACHED = (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, KeyError, ValueError)


class _FirstCompilation(event.Listener):
    """Says once per process that a loop is being compiled (numba reports a load from disk as no event at all)."""

    announced = False

    def on_start(self, _event: object) -> None:
        if not self.announced:
            self.announced = True
            print("compiling hot loops (first use; kept on disk if it can be) …", file=sys.stderr, flush=True)

    def on_end(self, _event: object) -> None:
        """Nothing to do: the note is about the wait that starts."""


event.register("numba:compile", _FirstCompilation())  # type: ignore[no-untyped-call]


def part(function: F) -> F:
    """A function that only loops of the same module call; compiled into them, and therefore not cached itself."""
    return cast(F, numba.njit(forceinline=True, **_OPTIONS)(function))


def loop(function: F) -> F:
    """Compile ``function`` without the interpreter and without the GIL, cached beside its source or in NUMBA_CACHE_DIR.

    Where nothing can be kept it is compiled in each process; the result is the same.
    """

    @functools.cache
    def uncached() -> F:
        return cast(F, numba.njit(**_OPTIONS)(function))

    try:
        cached = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:
        # neither beside the source nor below the user's home can anything be written
        return uncached()

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return cached(*args)
        except _NOT_CACHED:
            # before the loop began to run: it raises none of these itself
            return uncached()(*args)

    return cast(F, call)
