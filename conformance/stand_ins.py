"""Import a release's host-pool modules without its dependencies: the rest of the release becomes inert.

Runs in the torch environment, beside the release's code, so it uses the standard library only. What is named in
``REAL`` is loaded from the unpacked wheel as it is; every other ``sglang`` module, and every third-party module
that the release asks for and that is not in ``INSTALLED``, is a module whose attributes are inert classes: they can
be called, subclassed, subscripted and used as decorators, are false, and do nothing.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

POOLS = "sglang.srt.mem_cache"
REAL = (
    f"{POOLS}.memory_pool",
    f"{POOLS}.memory_pool_host",
    f"{POOLS}.pool_host",
    f"{POOLS}.host_memory",
    f"{POOLS}.device_pool_info",
    f"{POOLS}.hicache_auto_size",
    f"{POOLS}.hicache_storage",
    f"{POOLS}.hybrid_cache",
)
INSTALLED = {"torch", "numpy", "psutil", "msgspec", "typing_extensions"}


def _nothing(*_: Any, **__: Any) -> Any:
    return Inert.one


class InertType(type):
    """The type of inert classes; what is done with the class itself ends here."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """A decorated thing as it is; else the one inert object."""
        if not cls.__dict__.get("_inert"):
            return super().__call__(*args, **kwargs)  # a real class that inherits from an inert one
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]  # used as a decorator
        return Inert.one

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return inert_class(name)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())

    def __bool__(cls) -> bool:
        return False


class Inert(metaclass=InertType):
    """An inert object."""

    one: Any
    _inert = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As for the class."""
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert.one

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (Inert,)

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())

    def __exit__(self, *_: Any) -> bool:
        return False

    def __setitem__(self, *_: Any) -> None:
        return None

    __enter__ = __getitem__ = _nothing
    __lt__ = __le__ = __gt__ = __ge__ = lambda *_: False
    __add__ = __radd__ = __or__ = __ror__ = lambda self, other: other if isinstance(other, list) else self


Inert.one = object.__new__(Inert)


def inert_class(name: str) -> type:
    """A fresh inert class."""
    return InertType(name, (Inert,), {"_inert": True})


class _InertModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = inert_class(name)
        setattr(self, name, made)
        return made


class _InertLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _InertModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__version__"] = "0"


class ReleaseFinder(MetaPathFinder):
    """Serves ``sglang`` from an unpacked wheel, and inert modules to it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: Any = None) -> ModuleSpec | None:
        """The module to load for a name; None leaves it to the interpreter."""
        top = fullname.split(".", maxsplit=1)[0]
        if top == "sglang":
            return self._of_release(fullname)
        if top in INSTALLED or top in sys.stdlib_module_names:
            return None
        if isinstance(sys.modules.get(top), _InertModule) or _asked_by_release():
            return ModuleSpec(fullname, _InertLoader(), is_package=True)
        return None

    def _of_release(self, name: str) -> ModuleSpec | None:
        place = self.root.joinpath(*name.split("."))
        file, package = place.with_suffix(".py"), place / "__init__.py"
        if any(name == real or name.startswith(f"{real}.") for real in REAL):
            if file.is_file():
                return spec_from_file_location(name, file)
            if package.is_file():
                return spec_from_file_location(name, package, submodule_search_locations=[str(place)])
        if not file.is_file() and not place.is_dir():
            raise ModuleNotFoundError(f"this release has no {name}", name=name)
        return ModuleSpec(name, _InertLoader(), is_package=True)


def _asked_by_release() -> bool:
    """Whether the import statement being carried out stands in the release's code."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and not name.startswith(("importlib", "_frozen_importlib")):
            return name.startswith("sglang")
        frame = frame.f_back
    return False
