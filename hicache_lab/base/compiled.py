"""Hot loops: numba compiles them on first use and keeps the result on disk if it can; the first use says so.

Import this module only from modules that hold loops, and import those inside the functions that need them, so that
``import hicache_lab`` stays light.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba
from numba.core import event
from numba.core.caching import FunctionCache

F = TypeVar("F", bound=Callable[..., Any])
# no reference counts, no check for a division by zero: what ``loop`` promises that its functions do not need
_UNCHECKED: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
# what reading a damaged pickle raises
_DAMAGED = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)


class _Kept(FunctionCache):
    """numba's own cache, where a full disk or a damaged file costs time instead of the result."""

    def load_overload(self, sig: object, target_context: object) -> object:
        try:
            return cast(object, super().load_overload(sig, target_context))  # type: ignore[no-untyped-call]
        except OSError:
            return None
        except _DAMAGED:
            with contextlib.suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: object, data: object) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


class _FirstCompilation(event.Listener):
    """Says once per process that a loop is being compiled (numba reports a load from disk as no event at all)."""

    said = False

    def on_start(self, _event: object) -> None:
        if not self.said:
            self.said = True
            print("compiling hot loops (first use; kept on disk if it can be) …", file=sys.stderr, flush=True)

    def on_end(self, _event: object) -> None:
        """Nothing to do: the note is about the wait that starts."""


def loop(*, forceinline: bool = False) -> Callable[[F], F]:
    """Like ``njit``, for a function that makes no array and cannot divide by zero.

    Its arrays are not reference-counted (numba's ``_nrt``): those atomic operations at every call of a helper took a
    third of the log scanner's time. ``forceinline`` is for a helper inside the hot loop.
    """
    return lambda function: _compiled(function, {**_UNCHECKED, "forceinline": forceinline})


def _compiled(function: F, options: dict[str, Any]) -> F:
    made = numba.njit(nogil=True, **options)(function)
    # neither beside the source nor below the user's home can anything be written: compiled in each process
    with contextlib.suppress(RuntimeError):
        made._cache = _Kept(function)  # type: ignore[no-untyped-call]
    return cast(F, made)


event.register("numba:compile", _FirstCompilation())  # type: ignore[no-untyped-call]


def njit(function: F) -> F:
    """Compile ``function`` without the interpreter, without the GIL, cached beside its source (or NUMBA_CACHE_DIR)."""
    return _compiled(function, {})


def bare(loop_function: Any, arguments: Sequence[tuple[str, int]]) -> tuple[str, str, bytes]:
    """Compile a loop so that its object file runs without numba.

    Args:
        loop_function: made by ``loop``.
        arguments: numpy's name of each argument's type, and its dimensions (0: a number).

    Returns:
        The function's symbol, the LLVM text and the object file.
    """
    types = tuple(
        numba.types.Array(getattr(numba.types, name), dimensions, "C") if dimensions else getattr(numba.types, name)
        for name, dimensions in arguments
    )
    options = {**_UNCHECKED, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    made = numba.njit(nogil=True, **options)(loop_function.py_func)
    made.compile(types)
    result = made.overloads[types]
    _, _, (code, _) = result.library.serialize_using_object_code()
    return result.fndesc.llvm_func_name, result.library.get_llvm_str(), code
