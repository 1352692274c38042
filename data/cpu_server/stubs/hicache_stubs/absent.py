"""Packages that import but hold nothing: triton, torchvision, soundfile.

While modules are being imported, anything may be named, called or used as a decorator, because GPU code
paths do so at module level. Afterwards a call raises: a kernel that would have run on a GPU must not return
a made-up value.
"""

# ruff: noqa: ARG001, ARG002 - the signatures are those of what is stood in for

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ABSENT = frozenset({"triton", "torchvision", "soundfile"})


class NeedsGpuError(RuntimeError):
    """A stub was called as if it were the real thing."""


def importing() -> bool:
    """Whether some module is being executed by the import system further up this thread's stack."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "exec_module" and "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Inert:
    """Any attribute of an absent package."""

    def __init__(self, path: str) -> None:
        self.__dict__.update(_path=path, __name__=path.rpartition(".")[2], __qualname__=path, __module__=__name__)

    def __getattr__(self, name: str) -> "Inert":
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert(f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inert while modules are being imported, an error afterwards."""
        if not importing():
            raise NeedsGpuError(f"{self._path} was called, and this machine has no GPU: only its name exists here")
        # @decorator hands the function back; @decorator(...) and plain calls give another inert thing
        alone = len(args) == 1 and not kwargs
        return args[0] if alone and isinstance(args[0], types.FunctionType) else Inert(f"{self._path}()")

    def __getitem__(self, key: Any) -> "Inert":
        return Inert(f"{self._path}[{key!r}]")

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return ()

    def __or__(self, other: Any) -> "Inert":
        return self

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self._path}: not installed>"


class Kernel:
    """What ``@triton.jit`` leaves behind: importable, inspectable, not launchable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def __getitem__(self, grid: Any) -> "Kernel":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: there is nothing to run it on."""
        raise NeedsGpuError(f"the triton kernel {self.__name__} was launched on a machine without a GPU")


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``@jit`` and ``@jit(...)``."""
    return Kernel(function) if function is not None else Kernel


def undecorated(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """``@autotune(...)`` and ``@heuristics(...)``: the kernel as it was."""
    return lambda kernel: kernel


class Constexpr:
    """A module-level compile-time constant of a kernel."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class _NoDriver:
    @property
    def active(self) -> Any:
        """Raises triton's own complaint, which callers catch to learn that there is no GPU."""
        raise RuntimeError("0 active drivers ([]). There should only be one.")


# attributes with a meaning on any machine; everything else is Inert
KNOWN: dict[str, dict[str, Any]] = {
    "triton": {
        "__version__": "3.5.0",
        "jit": jit,
        "autotune": undecorated,
        "heuristics": undecorated,
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
    },
    "triton.language": {
        "constexpr": Constexpr,
        "tensor": type("tensor", (), {}),
        "dtype": type("dtype", (), {}),
    },
    # no compilation hooks, as in the builds of triton that lack them: 0.5.23 asks before it registers one
    "triton.knobs": {"runtime": types.SimpleNamespace(), "compilation": types.SimpleNamespace()},
    "triton.runtime": {"driver": _NoDriver()},
    "triton.runtime.jit": {"JITFunction": Kernel, "KernelInterface": Kernel},
}


class AbsentModule(types.ModuleType):
    """A module of an absent package: submodules import, other names are inert."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", Inert(f"{self.__name__}.{name}"))


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers the import of an absent package, but not the question whether it is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Only a real import gets the stub: ``importlib.util.find_spec`` still says "not installed"."""
        if fullname.partition(".")[0] not in ABSENT:
            return None
        if sys._getframe(2).f_code.co_name != "_find_and_load_unlocked":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="hicache_stubs", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module that answers any name."""
        return AbsentModule(spec.name, f"Stub: {spec.name} is not installed on this machine.")

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill in the few names that mean something without a GPU."""
        module.__dict__.update(KNOWN.get(module.__name__, {}))
        if module.__name__ == "triton":
            importlib.import_module("triton.runtime")
