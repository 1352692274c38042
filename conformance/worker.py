"""Run one release's own host-pool code on a case file. Runs in the torch environment.

    python worker.py ROOT RELEASE CASES.jsonl OUT.jsonl

Replaced: the allocator (torch meta tensors, whose bytes are counted), ``psutil.virtual_memory``, the process groups
and the control-group reader. Everything else that runs is the release's own code. An output record is the case with
what the release made of it, in the form that ``vectors.py`` reads.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed
from pools import Lacking, construct
from stand_ins import POOLS, ReleaseFinder

GIB = 2**30
PLENTY = 10**16
UNREADABLE = "Cannot locate the process memory cgroup in mounted cgroup filesystems"
MODULES = (
    "memory_pool memory_pool_host host_memory device_pool_info hicache_auto_size hicache_storage pool_host.common "
    "pool_host.base pool_host.mha pool_host.mla pool_host.dsa pool_host.mamba pool_host.host_pool_decl"
).split()


class Taken(Exception):
    """The constructor has passed its check and asked for its memory: there is nothing more to learn."""

    def __init__(self, pool: Any, n_bytes: int) -> None:
        self.pool, self.n_bytes = pool, n_bytes


@dataclass
class Machine:
    """What the release is told of the machine and of its peers."""

    available: int = 0
    ranks: int = 1
    nnodes: int = 1
    pp_peers: list[int] = field(default_factory=list)
    cgroup: Any = None
    asked: int = 0
    said: list[list[str]] = field(default_factory=list)

    def parallel(self) -> SimpleNamespace:
        """The release's view of its process groups."""
        world = self.ranks * self.nnodes
        stages = 1 + len(self.pp_peers)
        return SimpleNamespace(
            nnodes=self.nnodes,
            launch_world_size=world,
            dcp_enabled=False,
            pp_group=SimpleNamespace(world_size=stages, cpu_group="pp"),
            world_group=SimpleNamespace(world_size=world, cpu_group="world"),
        )

    def headroom(self, *_: Any, **__: Any) -> int | None:
        """The control group's headroom."""
        if self.cgroup == "error":
            raise RuntimeError(UNREADABLE)
        return self.cgroup  # type: ignore[no-any-return]


class Ear(logging.Handler):
    """Keeps what the release logs."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def emit(self, record: logging.LogRecord) -> None:
        """Keep level and rendered text."""
        self.machine.said.append([record.levelname, record.getMessage()])


def load(root: Path, machine: Machine) -> dict[str, Any]:
    """Import the release's host-pool modules and replace the machine below them."""
    torch.compile = lambda function=None, **_: function or (lambda inner: inner)
    sys.meta_path.insert(0, ReleaseFinder(root))
    modules = {}
    for name in MODULES:
        try:
            modules[name] = importlib.import_module(f"{POOLS}.{name}")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("sglang"):
                raise
    _replace_allocator(modules, machine)
    psutil.virtual_memory = lambda: SimpleNamespace(available=machine.available, total=machine.available)
    torch.distributed.is_initialized = lambda: machine.ranks * machine.nnodes > 1 or bool(machine.pp_peers)

    def smallest(tensor: Any, group: Any = None, **_: Any) -> None:
        for peer in machine.pp_peers if group == "pp" else ():
            tensor.copy_(torch.minimum(tensor, torch.tensor(peer, dtype=tensor.dtype).expand_as(tensor)))

    torch.distributed.all_reduce = smallest
    groups = {
        "get_parallel": machine.parallel,
        "get_world_group": lambda: machine.parallel().world_group,
        "get_pp_group": lambda: machine.parallel().pp_group,
    }
    for place in ("sglang.srt.distributed.parallel_state", "sglang.srt.runtime_context"):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError:
            continue
        for name, stand_in in groups.items():
            setattr(module, name, stand_in)
    for module in modules.values():
        for name, stand_in in groups.items():
            if name in module.__dict__:
                setattr(module, name, stand_in)
    if "host_memory" in modules:
        modules["host_memory"]._cgroup_memory_headroom = machine.headroom
    ear = logging.getLogger("sglang")
    ear.addHandler(Ear(machine))
    ear.setLevel(logging.DEBUG)
    ear.propagate = False
    return modules


def _replace_allocator(modules: dict[str, Any], machine: Machine) -> None:
    def allocate(dims: Any, dtype: Any = None, **_: Any) -> Any:
        tensor = torch.empty(tuple(int(size) for size in dims), dtype=dtype, device="meta")
        machine.asked += tensor.numel() * tensor.element_size()
        return tensor

    class Every(dict[str, Any]):
        def __missing__(self, _: str) -> Any:
            return lambda dims, dtype=None, *__, **___: allocate(dims, dtype)

    seen: set[type] = set()
    for module in modules.values():
        if "ALLOC_MEMORY_FUNCS" in module.__dict__:
            module.ALLOC_MEMORY_FUNCS = Every()
        for cls in list(module.__dict__.values()):
            if isinstance(cls, type) and cls not in seen and "init_kv_buffer" in cls.__dict__:
                seen.add(cls)
                _stop_after(cls, machine)
            if isinstance(cls, type) and cls.__name__ == "HostKVCache":
                cls.clear = lambda _: None  # free lists of millions of slots


def _stop_after(cls: type, machine: Machine) -> None:
    original = cls.__dict__["init_kv_buffer"]

    def init_kv_buffer(self: Any) -> Any:
        outermost = type(self).init_kv_buffer is init_kv_buffer  # a subclass calls its parent's on the way
        if outermost:
            machine.asked = 0
        buffer = original(self)
        if not machine.asked and isinstance(buffer, torch.Tensor):  # releases that call torch.empty themselves
            machine.asked = buffer.numel() * buffer.element_size()
        # the pool that keeps index keys beside its rows (0.5.9, 0.5.10) takes them after this
        if outermost and "NSA" not in type(self).__name__:
            raise Taken(self, machine.asked)
        return buffer

    cls.init_kv_buffer = init_kv_buffer  # type: ignore[attr-defined]


@contextmanager
def told(machine: Machine, case: dict[str, Any], available: int) -> Iterator[None]:
    """The machine as a case states it."""
    machine.available, machine.cgroup = available, case.get("cgroup")
    machine.ranks, machine.nnodes = case.get("ranks", 1), case.get("nnodes", 1)
    machine.pp_peers = case.get("pp_peer_tokens", [])
    machine.asked = 0
    machine.said.clear()
    yield


def _state(pool: Any) -> dict[str, Any]:
    names = {"size_per_token": "size_per_token", "page_num": "page_num", "size": "size", "layer_num": "layer_num"}
    found = {key: getattr(pool, name, None) for key, name in names.items()}
    return found | {"physical_page_size": getattr(pool, "page_size", None)}


def build(modules: dict[str, Any], machine: Machine, case: dict[str, Any], available: int) -> dict[str, Any]:
    """Construct the pool of a case; the outcome with everything that the constructor had worked out by then."""
    with told(machine, case, available):
        try:
            pool = construct(modules, case)
            n_bytes = machine.asked or None
        except Taken as taken:
            pool, n_bytes = taken.pool, taken.n_bytes
        except (ValueError, AssertionError, RuntimeError) as refusal:
            return {"outcome": type(refusal).__name__, "message": str(refusal), **_before(refusal)}
    made = _state(pool) | {"outcome": "ok", "message": None, "alloc_bytes": n_bytes}
    if case["kind"] == "dsa_indexer":
        made["requested_bytes"] = made["page_num"] * made["physical_page_size"] * made["size_per_token"]
    else:
        made["requested_bytes"] = made["size"] * made["size_per_token"]
    return made


def _before(refusal: BaseException) -> dict[str, Any]:
    """What the refusing constructor had worked out, from its frame."""
    found: dict[str, Any] = {}
    trace = refusal.__traceback__
    while trace is not None:
        here = trace.tb_frame.f_locals
        if hasattr(here.get("self"), "size_per_token"):
            found = _state(here["self"])
            found |= {name: here[name] for name in ("requested_bytes", "available_bytes") if name in here}
        trace = trace.tb_next
    return found


def run_pool(modules: dict[str, Any], machine: Machine, case: dict[str, Any]) -> dict[str, Any]:
    """One constructor case; ``{"boundary": d}`` asks for d bytes more than the release's own limit."""
    available = case["available"]
    if isinstance(available, dict):
        free = build(modules, machine, case | {"cgroup": None}, PLENTY)
        requested = free.get("requested_bytes")
        base = modules.get("pool_host.base")
        divisor = base.ranks_per_host() if hasattr(base, "ranks_per_host") else 1
        available = PLENTY if requested is None else requested * divisor + 10 * GIB + available["boundary"]
    made = build(modules, machine, case, available)
    return case | {"available": available} | made | {"logs": list(machine.said)}


def run_function(modules: dict[str, Any], machine: Machine, case: dict[str, Any]) -> dict[str, Any]:
    """One case of a function that is no constructor."""
    with told(machine, case, case.get("available", 0)):
        try:
            made = _FUNCTIONS[case["kind"]](modules, case) | {"outcome": "ok", "message": None}
        except (ValueError, AssertionError, RuntimeError) as refusal:
            made = {"outcome": type(refusal).__name__, "message": str(refusal)}
    return case | made | {"logs": list(machine.said)}


def _budget(modules: dict[str, Any], _case: dict[str, Any]) -> dict[str, Any]:
    base = modules.get("pool_host.base")
    if not hasattr(base, "host_memory_budget_bytes"):
        raise Lacking("no host_memory_budget_bytes")
    return {"result": base.host_memory_budget_bytes(), "ranks_per_host": base.ranks_per_host()}


def _available(modules: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    if "host_memory" not in modules:
        raise Lacking("no available_host_memory_bytes")
    function = modules["host_memory"].available_host_memory_bytes
    known = inspect.signature(function).parameters
    options = {"allow_cgroup_fallback"} & set(known)
    return {"result": function(**{name: case[name] for name in options})}


def _split(_modules: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    try:
        assembler = importlib.import_module(f"{POOLS}.hybrid_cache.hybrid_pool_assembler")
        split = assembler.__dict__["_split_hicache_size"]
    except (ModuleNotFoundError, KeyError):
        raise Lacking("no _split_hicache_size") from None
    pools = [
        SimpleNamespace(
            get_kv_size_bytes=lambda size=size: tuple(size) if isinstance(size, list) else size,
            host_capacity_bytes=None,
        )
        for size in case["device_pool_bytes"]
    ]
    return {"shares": list(split(case["size_gb"], tuple(pools)))}


_FUNCTIONS = {"host_memory_budget": _budget, "available_host_memory": _available, "split_size": _split}


def main(root: str, release: str, cases: str, out: str) -> None:
    """Every case that the release can carry out becomes one line of ``out``."""
    machine = Machine()
    modules = load(Path(root), machine)
    skipped: dict[str, int] = {}
    ran = 0
    with Path(cases).open() as lines, Path(out).open("w") as results:
        for line in lines:
            case = json.loads(line)
            run = run_function if case["kind"] in _FUNCTIONS else run_pool
            try:
                made = run(modules, machine, case)
            except Lacking as lacking:
                skipped[str(lacking)] = skipped.get(str(lacking), 0) + 1
                continue
            results.write(json.dumps(made | {"release": release}, sort_keys=True) + "\n")
            ran += 1
    print(json.dumps({"ran": ran, "skipped": skipped}))


if __name__ == "__main__":
    main(*sys.argv[1:])
