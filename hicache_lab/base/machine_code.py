"""A compiled loop called without numba: its object file is kept on disk and loaded by llvmlite.

numba needs about a second of every process to import itself and to look its own cache up: more than the log scanner
needs to read a hundred megabytes. The object file that numba makes does not need numba to run. The first use compiles
with numba and keeps it; later processes load it in a tenth of the time. Wherever that does not work (a numba whose
calling convention is another, a folder that cannot be written, a damaged file), numba itself is used; the results are
the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numpy as np

_MAGIC = b"hicache_lab machine code 1\n"
_DIGEST = hashlib.sha256
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_C_LIBRARY = frozenset(("memset", "memcpy", "memmove"))
# modules whose text decides what the object file holds
_COMPILERS = ("hicache_lab.base.compiled", "hicache_lab.base.machine_code")


@dataclass(frozen=True)
class Signature:
    """What a loop takes and gives.

    Attributes:
        arguments: numpy's name of each argument's type, and its dimensions; ``("int64", 0)`` is an integer, all others
            are C-contiguous arrays.
        results: how many int64 it returns, as a tuple.
    """

    arguments: tuple[tuple[str, int], ...]
    results: int

    @property
    def native(self) -> list[bool]:
        """The arguments of the compiled function in order: true for a pointer, false for a 64-bit integer.

        numba's convention (numba.core.callconv.CPUCallConv, numba.core.datamodel.models.ArrayModel): where the results
        go, where an exception would go, then each argument; an array is its owner, its parent, its size, its item's
        size, its data, its shape and its strides.
        """
        kinds = [True, True]
        for _, dimensions in self.arguments:
            array = [True, True, False, False, True, *[False] * (2 * dimensions)]
            kinds += array if dimensions else [False]
        return kinds


class Loaded:
    """A compiled loop in memory; call it like the function it was compiled from."""

    def __init__(self, engine: object, address: int, signature: Signature) -> None:
        self._engine = engine  # owns the code
        self._signature = signature
        self._types = [np.dtype(name) for name, _ in signature.arguments]
        kinds = [_POINTER if pointer else _INTEGER for pointer in signature.native]
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(address)

    def __call__(self, *given: Any) -> tuple[int, ...]:
        """Run it without the GIL.

        Raises:
            TypeError: an argument of another type, another number of dimensions, or not contiguous.
        """
        results = (_INTEGER * self._signature.results)()
        caught = _POINTER()
        native: list[Any] = [ctypes.addressof(results), ctypes.addressof(caught)]
        if len(given) != len(self._types):
            raise TypeError(f"expected {len(self._types)} arguments, got {len(given)}")
        for value, dtype, (name, dimensions) in zip(given, self._types, self._signature.arguments, strict=True):
            if not dimensions:
                native.append(value)
                continue
            if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != dimensions:
                raise TypeError(f"expected a {name} array of {dimensions} dimensions, got {type(value).__name__}")
            if not value.flags.c_contiguous:
                raise TypeError(f"expected a contiguous {name} array")
            native += [None, None, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
        status = self._call(*native)
        if status != 0:
            raise RuntimeError(f"a compiled loop ended with status {status}")
        return tuple(results)


@functools.cache
def loop_of(module: str, function: str, signature: Signature) -> Callable[..., tuple[int, ...]]:
    """The compiled ``function`` of ``module``, from disk if it has been compiled before.

    Args:
        module: dotted name of a module that holds loops (``hicache_lab.base.compiled``); imported only to compile.
        function: the loop's name there.
        signature: what it takes and gives.
    """
    name = _file_name(module, function, signature)
    folders = _folders(module)
    for folder in folders:
        kept = _read(folder / name)
        if kept is not None:
            return _load(*kept, signature)
    made = _compile(module, function, signature)
    if isinstance(made, tuple):
        for folder in folders:
            if _write(folder / name, *made):
                break
        return _load(*made, signature)
    return made


def _file_name(module: str, function: str, signature: Signature) -> str:
    """One name for each text, compiler and processor."""
    digest = _DIGEST(repr((signature, llvmlite.__version__, llvm.llvm_version_info)).encode())
    digest.update(" ".join(_processor()).encode())
    for name in (module, *_COMPILERS):
        digest.update(_text(name))
    digest.update(_text("numba", "_version.py"))
    return f"{module.rpartition('.')[2]}.{function}-{digest.hexdigest()[:24]}.o"


@functools.cache
def _processor() -> tuple[str, str]:
    """What the code is made for: the processor's name and its features, as LLVM calls them."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _text(module: str, beside: str = "") -> bytes:
    """A module's file, or one beside it; also of a package that is imported from an archive."""
    spec = _spec(module)
    path = Path(spec.origin or "")
    loader: Any = spec.loader
    return bytes(loader.get_data(str(path.with_name(beside or path.name))))


def _spec(module: str) -> ModuleSpec:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ImportError(f"{module} is not installed")
    return found


def _folders(module: str) -> list[Path]:
    """Where object files are kept: where numba keeps its own."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return [Path(chosen)]
    beside = Path(_spec(module).origin or "").parent / "__pycache__"
    # a user without an account (a container started with any number) has no home: then it stays "~"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return [beside, Path(home) / "hicache_lab" / "machine_code"] if Path(home).is_absolute() else [beside]


def _read(path: Path) -> tuple[str, bytes] | None:
    """Symbol and object file; None if there is none or it is damaged."""
    try:
        text = path.read_bytes()
    except OSError:
        return None
    head = len(_MAGIC)
    size = _DIGEST().digest_size
    body = text[head + size :]
    if text[:head] != _MAGIC or text[head : head + size] != _DIGEST(body).digest():
        return None
    symbol, _, code = body.partition(b"\0")
    return symbol.decode(), code


def _write(path: Path, symbol: str, code: bytes) -> bool:
    """Whole or not at all: another process may be reading."""
    body = symbol.encode() + b"\0" + code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder) / path.name
            part.write_bytes(_MAGIC + _DIGEST(body).digest() + body)
            part.replace(path)
    except OSError:
        return False
    return True


def _load(symbol: str, code: bytes, signature: Signature) -> Loaded:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = _processor()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, codemodel="jitdefault", jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Loaded(engine, engine.get_function_address(symbol), signature)


def _compile(module: str, function: str, signature: Signature) -> tuple[str, bytes] | Callable[..., tuple[int, ...]]:
    """Symbol and object file; numba's own function where its convention is not the one that ``Signature`` describes."""
    from hicache_lab.base.compiled import bare

    loop = getattr(importlib.import_module(module), function)
    symbol, text, code = bare(loop, signature.arguments)
    compiled = llvm.parse_assembly(text)
    own = compiled.get_function(symbol)
    kinds = [str(argument.type) for argument in own.arguments]
    known = len(kinds) == len(signature.native) and all(
        (kind.startswith("ptr") or kind.endswith("*")) if pointer else kind == "i64"
        for kind, pointer in zip(kinds, signature.native, strict=True)
    )
    # anything else would be numba's own, and is not there without it
    outside = {each.name for each in compiled.functions if each.is_declaration and not each.name.startswith("llvm.")}
    return (symbol, code) if known and outside <= _C_LIBRARY else loop
