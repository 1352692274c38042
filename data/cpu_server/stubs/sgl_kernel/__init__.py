"""Stub for SGLang's CUDA extension: names resolve, calls raise; the KV copies are in ``kvcacheio``."""

# ruff: noqa: ARG001 - it takes whatever the real one takes

from collections.abc import Callable
from typing import Any


def missing(path: str) -> Callable[..., Any]:
    """A function that says what it would have needed."""

    def raises(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{path} needs SGLang's GPU kernels, and this machine has no GPU")

    raises.__name__ = path.rpartition(".")[2]
    return raises


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__") or name == "kvcacheio":  # a submodule: the import system loads it
        raise AttributeError(name)
    return missing(f"sgl_kernel.{name}")
