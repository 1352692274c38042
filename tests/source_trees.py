"""SGLang trees in our own words with what the eras differ in; every part can be replaced."""

from pathlib import Path

PARTS = {
    "signature": "self, device_pool, host_to_device_ratio, host_size, page_size",
    "when": "host_size > 0",
    "by_size": "int(host_size * 1e9 // self.size_per_token)",
    "by_ratio": "int(device_pool.size * host_to_device_ratio)",
    "round": "self.page_num = self.size // self.page_size + 1\n        self.size = self.page_num * self.page_size",
    "not_larger": "assert self.size > device_pool.size, 'too small'",
    "needed": "self.size * self.size_per_token",
    "reserve": "10 * 2**30",
    "budget": "memory.available - KEEP_FREE",
    "test": "needed > budget",
    "shown": "budget",
    "refuse": "raise ValueError",
    "mla_row": "(self.kv_lora_rank + self.qk_rope_head_dim) * self.dtype.itemsize * self.layer_num",
    "mha_row": "self.head_num * self.head_dim * 2 * self.layer_num * self.dtype.itemsize",
}
POOL = """
import psutil
from .machine import budget_of_rank, smallest_stage

KEEP_FREE = {reserve}


class HostKVCache:
    def __init__({signature}):
        self.page_size = page_size
        self.size_per_token = self.get_size_per_token()
        if {when}:
            self.size = {by_size}
        else:
            self.size = {by_ratio}
        {round}
        {not_larger}
        memory = psutil.virtual_memory()
        needed = {needed}
        budget = {budget}
        if {test}:
            {refuse}(
                f"Not enough host memory: {{needed / 1e9:.2f}} GB asked, but only have {{{shown} / 1e9:.2f}} GB"
            )
        self.buffer = self.take()


class MLATokenToKVPoolHost(HostKVCache):
    def get_size_per_token(self):
        return {mla_row}


class MHATokenToKVPoolHost(HostKVCache):
    def get_size_per_token(self):
        return {mha_row}
"""
MACHINE = """
import psutil
import torch

RESERVED = 10 * (1 << 30)


def _cgroup_memory_headroom():
    {cgroup}


def seen():
    found = psutil.virtual_memory().available
    limit = _cgroup_memory_headroom()
    if limit is not None:
        found = {smaller}
    return found


def neighbours():
    if world() == 1:
        return 1
    return {neighbours}


def budget_of_rank():
    rest = {view} - RESERVED
    return rest {divided}


def smallest_stage(tokens, host_size):
    if host_size <= 0:
        return tokens
    torch.distributed.all_reduce(tokens, op=torch.distributed.ReduceOp.{reduction})
    return tokens
"""
MACHINE_PARTS = {
    "cgroup": "return read('memory.stat')['inactive_file']",
    "smaller": "min(found, limit)",
    "neighbours": "max(world() // layout().nnodes, 1)",
    "view": "seen()",
    "divided": "// neighbours()",
    "reduction": "MIN",
}
C = {
    "round": "self.size = self.size - self.size % self.page_size",
    "budget": "memory.available - KEEP_FREE",
    "shown": "memory.available",
}
F = {
    "by_size": "smallest_stage(int(host_size * 1e9 // self.size_per_token), host_size)",
    "not_larger": "if self.size <= device_pool.size:\n            logger.warning('small')",
}
G = F | {"budget": "budget_of_rank()"}
HOST_ONLY = {"view": "psutil.virtual_memory().available"}
I_ERA = G | {"mha_row": "self.head_num * (self.head_dim + self.v_head_dim) * self.layer_num * self.dtype.itemsize"}
AUTO = {"sglang/srt/mem_cache/auto.py": "def auto_size_hicache():\n    pass\n"}
NO_CACHE = {"cgroup": "return limit()"}


# a headroom with what the releases' own has in it: paths, a loop, a handler, a floor, the smallest of many
GROUPS = {
    "cgroup": """least = None
    for group in groups(Path('/sys') / 'fs'):
        for limit in ('memory.max', 'memory.high'):
            try:
                text = (group / limit).read_text().strip()
            except FileNotFoundError:
                continue
            if text == 'max' or not text:
                continue
            used = int((group / 'memory.current').read_text()) - read(group, 'inactive_file')
            logger.info('%d of %d', used / 1024, limit)
            left = max(0, int(text) - used)
            least = left if least is None else min(least, left)
    return least"""
}


def write(root: Path, parts=None, machine=None, *, version="0.5.8", more=None) -> Path:
    folder = root / "sglang/srt/mem_cache"
    folder.mkdir(parents=True)
    (root / "sglang/version.py").write_text(f'__version__ = "{version}"\n')
    (folder / "pool_of_host.py").write_text(POOL.format(**PARTS | (parts or {})))
    (folder / "machine.py").write_text(MACHINE.format(**MACHINE_PARTS | (machine or {})))
    for name, text in (more or {}).items():
        (root / name).write_text(text)
    return root
