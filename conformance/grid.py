"""Writes ``cases.jsonl``: the host pools, sizes and machines on which a release is compared with the library."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GB, GIB = 10**9, 2**30
KIMI = {"kind": "mla", "layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
LLAMA = {"kind": "mha", "layers": 32, "kv_heads": 8, "head_dim": 128}
QWEN = {"kind": "mha", "layers": 28, "kv_heads": 2, "head_dim": 128}
DSA = {"layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "quant_block_size": 128}
MAMBA = {
    "kind": "mamba",
    "layers": 36,
    "conv_shapes": [[1024, 3]],
    "conv_dtype": "bf16",
    "temporal_shape": [4, 128, 128],
    "temporal_dtype": "fp32",
    "device_slots": 480,
    "layout": "page_first_direct",
}
SIZES: list[dict[str, Any]] = [
    {"size_gb": 300, "ratio": 2.0},
    {"size_gb": 48, "ratio": 2.0},
    {"size_gb": 1, "ratio": 2.0},
    {"size_gb": 0, "ratio": 2.0},
    {"size_gb": 0, "ratio": 2.5},
    {"size_gb": 0, "ratio": 1.0001},
    {"size_gb": 0, "ratio": 1.0},
]
MACHINES: list[dict[str, Any]] = [
    {"available": 445 * GB, "ranks": 8, "nnodes": 1},
    {"available": {"boundary": 0}, "ranks": 8, "nnodes": 1},
    {"available": {"boundary": -1}, "ranks": 8, "nnodes": 1},
    {"available": {"boundary": -1}, "ranks": 4, "nnodes": 2},
    {"available": 9 * GIB, "ranks": 1, "nnodes": 1},
]


def _pools() -> Iterator[dict[str, Any]]:
    for model, dtype, page, size, machine in itertools.product(
        (KIMI, LLAMA, QWEN), ("bf16", "fp8_e4m3"), (1, 64), SIZES, MACHINES
    ):
        # every size meets every machine with bf16; fp8 meets the first two machines
        if dtype == "bf16" or machine in MACHINES[:2]:
            base = {"dtype": dtype, "page_size": page, "layout": "layer_first", "device_tokens": 116_000 // page * page}
            yield model | base | size | machine
    wide = {"kind": "mha_asym", "layers": 48, "kv_heads": 8, "head_dim": 192, "v_head_dim": 128}
    common = {"dtype": "bf16", "page_size": 64, "layout": "page_first", "device_tokens": 115_968}
    for size, machine in itertools.product(SIZES, MACHINES):
        yield wide | common | size | machine
        yield {"kind": "nsa"} | DSA | {"kv_cache_dim": 576} | common | size | machine
        yield MAMBA | size | machine
    for anchor, machine in itertools.product((231_936, 683_072), MACHINES):
        yield {"kind": "dsa_indexer", "anchor_size": anchor, "ratio": 2.0, "size_gb": 0} | DSA | common | machine
    for drafts, size in itertools.product((1, 3), SIZES):
        yield KIMI | common | {"draft_layers": drafts} | size | MACHINES[1]
        yield LLAMA | common | {"draft_layers": drafts} | size | MACHINES[1]
    for peers, size in itertools.product(([600_000], [50_000_000], [9_000, 70_000]), SIZES):
        yield LLAMA | common | {"pp_peer_tokens": peers} | size | MACHINES[0]
    for size in SIZES:
        yield KIMI | common | {"page_size": 256, "dcp_size": 4} | size | MACHINES[0]
        yield KIMI | common | {"pool_label": "swa"} | size | MACHINES[2]
        yield KIMI | common | {"override_kv_cache_dim": 656, "dtype": "fp8_e4m3"} | size | MACHINES[0]
    yield KIMI | common | {"host_token_capacity": 231_936, "draft_layers": 1} | SIZES[3] | MACHINES[1]


def _guards() -> Iterator[dict[str, Any]]:
    for available, ranks, nnodes, cgroup in itertools.product(
        (445 * GB, 11 * GIB, 3 * GIB), (1, 8), (1, 2), (None, 30 * GB, 600 * GB)
    ):
        yield {
            "kind": "host_memory_budget",
            "available": available,
            "ranks": ranks,
            "nnodes": nnodes,
            "cgroup": cgroup,
        }
    for cgroup, fallback in itertools.product((None, 30 * GB, 600 * GB, "error"), (True, False)):
        yield {
            "kind": "available_host_memory",
            "available": 445 * GB,
            "cgroup": cgroup,
            "allow_cgroup_fallback": fallback,
        }
    for size, pools in itertools.product((40, 48, 300), ([[1000, 1000], 500], [[7, 7], [3, 3], 11])):
        yield {"kind": "split_size", "size_gb": size, "device_pool_bytes": pools}


def write(path: Path) -> int:
    """Write the case file; the number of cases."""
    cases = [*_pools(), *_guards()]
    lines = [json.dumps({"case_id": f"c{number:04d}"} | case) for number, case in enumerate(cases)]
    path.write_text("\n".join(lines) + "\n")
    return len(cases)


if __name__ == "__main__":
    print(write(Path(__file__).with_name("cases.jsonl")), "cases")
