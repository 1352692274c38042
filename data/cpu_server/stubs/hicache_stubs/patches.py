"""Adjustments made right after a module was imported; each says why the CPU path needs it."""

# ruff: noqa: ARG002, ARG005, N802 - names and signatures are those of CUDA and SGLang

import ctypes
import importlib.abc
import importlib.machinery
import os
import types
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

RESIDENT = "HICACHE_LAB_RESIDENT"  # "1": a registered host pool becomes resident, as pinning makes it
FLOOR_BYTES = "HICACHE_LAB_FLOOR_BYTES"  # making pages resident stops above this much available memory
_CHUNK_BYTES = 64 * 2**20
_CUDA_ERROR_MEMORY_ALLOCATION = 2

Patch = Callable[[types.ModuleType], None]


def available_bytes() -> int:
    """MemAvailable of this machine."""
    with Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


class Cudart:
    """``torch.cuda.cudart()`` without CUDA: registering memory pins nothing, but can make it resident.

    Pinning faults every page in. That, not the allocation, is what fills the host in the real incident, so a
    test that re-enacts it asks for resident pages. Filling stops at a floor: a machine must not be killed by
    its own test.
    """

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        """Returns 0, or CUDA's out-of-memory code when the floor was reached."""
        if os.environ.get(RESIDENT) != "1":
            return 0
        floor = int(os.environ[FLOOR_BYTES])
        for offset in range(0, size, _CHUNK_BYTES):
            if available_bytes() - _CHUNK_BYTES < floor:
                print(
                    f"hicache_stubs: stopped making host pages resident at {offset} of {size} bytes: "
                    f"less than {floor} bytes would be left available",
                    flush=True,
                )
                return _CUDA_ERROR_MEMORY_ALLOCATION
            ctypes.memset(pointer + offset, 0, min(_CHUNK_BYTES, size - offset))
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        """Nothing was pinned."""
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        """The text of an error code."""
        return {0: "no error", _CUDA_ERROR_MEMORY_ALLOCATION: "out of memory"}.get(code, f"error {code}")


def register_without_cuda(module: types.ModuleType) -> None:
    """The host pool registers its buffer with CUDA whatever the device is."""
    if not module.is_available():
        module.cudart = Cudart  # type: ignore[attr-defined]


def synchronous_stream(module: types.ModuleType) -> None:
    """0.5.23 waits for the copy stream; torch's CPU stream has nothing to wait for and no such method."""
    if not hasattr(module.Stream, "synchronize"):
        module.Stream.synchronize = lambda self: None


def host_copies(module: types.ModuleType) -> None:
    """0.5.23 imports the copy functions for CUDA, ROCm and XPU only: name ours where they are missing."""
    copies: Any = import_module("sgl_kernel.kvcacheio")
    for name in copies.TRANSFERS:
        if not hasattr(module, name):
            setattr(module, name, getattr(copies, name))


def absorbed_mla(module: types.ModuleType) -> None:
    """torch_native attention cannot do the default's plain-MHA prefill: always use the absorbed MLA form."""
    base = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods"
    method: Any = import_module(base).AttnForwardMethod
    module.AttentionBackendRegistry.register("torch_native", lambda attention, batch: method.MLA)


def page_allocation(module: types.ModuleType) -> None:
    """0.5.10 allocates pages of several tokens with triton kernels whatever the device is."""
    paging: Any = import_module("hicache_stubs.paging")
    module.alloc_extend_kernel = paging.Launch(paging.allocate_extend)  # type: ignore[attr-defined]
    module.alloc_decode_kernel = paging.Launch(paging.allocate_decode)  # type: ignore[attr-defined]


PATCHES: dict[str, Patch] = {
    "torch.cuda": register_without_cuda,
    "torch.cpu": synchronous_stream,
    "sglang.srt.mem_cache.allocator": page_allocation,
    "sglang.srt.mem_cache.pool_host.mha": host_copies,
    "sglang.srt.mem_cache.pool_host.mla": host_copies,
    "sglang.srt.mem_cache.pool_host.dsa": host_copies,
    "sglang.srt.models.deepseek_common.attention_backend_handler": absorbed_mla,
}


class PatchAfterImport(importlib.abc.MetaPathFinder):
    """Finds a module the ordinary way and runs its patch once it has been executed."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The ordinary spec, its loader's ``exec_module`` followed by the patch."""
        patch = self._patches.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if patch else None
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: types.ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec
