"""Sizes that real servers printed, against the geometry read from the model's config.

SGLang prints device pools in GiB under the name "GB" and host pools in GB (1e9). A device pool has one page
more than the printed count (state pools: one slot); a row holds when the bytes with or without it round
to the printed digits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from model_bytes import conv_bytes, indexer_bytes, kv_bytes, ssm_bytes

from hicache_lab.base.units import GB, GIB
from hicache_lab.sizing.geometry import HeadShape, ModelGeometry, load_geometry

# Gemma-4-E4B is not in the catalogue; these are the numbers of its log's geometry.
GEMMA_4_E4B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 18,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    },
}

BytesPerSlot = Callable[[ModelGeometry, int], int]


def kv(itemsize: int) -> BytesPerSlot:
    return lambda geometry, tp: kv_bytes(geometry, itemsize, tp)


def rows(row_bytes: int, *, indexer: bool) -> BytesPerSlot:
    """MLA rows of a fixed width (656: FlashMLA's fp8 rows), with or without the indexer's keys."""
    return lambda geometry, _tp: geometry.num_layers * (row_bytes + indexer * indexer_bytes(geometry))


def _one(heads: HeadShape | None, tp: int, itemsize: int, *, value: bool) -> int:
    assert heads is not None
    return heads.heads_per_rank(tp) * (heads.v_head_dim if value else heads.head_dim) * itemsize


def key(kind: str, itemsize: int) -> BytesPerSlot:
    return lambda g, tp: g.count(kind) * _one(getattr(g, kind), tp, itemsize, value=False)


def value(kind: str, itemsize: int) -> BytesPerSlot:
    return lambda g, tp: g.count(kind) * _one(getattr(g, kind), tp, itemsize, value=True)


def conv(g: ModelGeometry, tp: int) -> int:
    assert g.state is not None
    return g.count("linear") * conv_bytes(g.state, tp)


def ssm(g: ModelGeometry, tp: int) -> int:
    assert g.state is not None
    return g.count("linear") * ssm_bytes(g.state, tp)


@dataclass(frozen=True)
class Printed:
    model: str | dict[str, object]
    tp: int
    part: BytesPerSlot
    count: int  # tokens, or state slots
    printed: str
    bytes_per_slot: int
    source: str
    page_size: int = 1


DEVICE = [
    Printed("Kimi-K2.5", 8, kv(2), 2_454_421, "160.63", 70_272, "indexed log 1272019175"),
    Printed("DeepSeek-V3.2", 8, rows(656, indexer=True), 975_424, "43.67", 48_068, "sglang#11309", page_size=64),
    Printed(
        "DeepSeek-V3.2",
        8,
        rows(656, indexer=False),
        1_462_784,
        "54.52",
        40_016,
        "sglang#11309, before its fix",
        page_size=64,
    ),
    Printed("DeepSeek-V3", 8, kv(1), 524_288, "17.16", 35_136, "log parser example 66713818215"),
    Printed("Qwen3-235B-A22B", 4, key("full", 2), 367_404, "8.23", 24_064, "vllm#21348"),
    Printed(
        "GLM-5.1",
        8,
        rows(576, indexer=True),
        3_542_208,
        "182.18",
        55_224,
        "SGLang-benchmarks server.log",
        page_size=64,
    ),
    Printed("GLM-5", 8, rows(656, indexer=True), 131_072, "7.51", 61_464, "indexed note 56193900378", page_size=64),
    Printed("Qwen3.5-9B", 2, key("full", 2), 327_310, "2.50", 8_192, "indexed log 53944457073"),
    Printed("Qwen3.5-9B", 2, ssm, 186, "4.38", 25_165_824, "indexed log 53944457073"),
    Printed("Qwen3.5-9B", 2, conv, 186, "0.10", 589_824, "indexed log 53944457073"),
    Printed("Qwen3.5-9B", 1, ssm, 64, "3.05", 50_331_648, "indexed log 70920711276"),
    Printed("Qwen3.5-9B", 1, key("full", 2), 295_950, "4.52", 16_384, "indexed log 70920711276"),
    Printed("Qwen3.8-27B", 1, key("full", 1), 228_520, "3.49", 16_384, "indexed note 69213517065"),
    Printed("Qwen3.8-27B", 1, ssm, 360, "50.77", 150_994_944, "indexed note 69213517065"),
    Printed("Qwen3.8-27B", 1, conv, 360, "0.99", 2_949_120, "indexed note 69213517065"),
    Printed("Qwen3.8-27B", 1, key("full", 2), 535_124, "16.33", 32_768, "indexed note 57759592298"),
    Printed("Nemotron-3-Nano-30B-A3B", 4, key("full", 1), 19_644_177, "14.05", 768, "indexed note 70117488909"),
    Printed("Nemotron-3-Nano-30B-A3B", 4, ssm, 2_211, "24.84", 12_058_624, "indexed note 70117488909"),
    Printed("Nemotron-3-Nano-30B-A3B", 4, conv, 2_211, "0.44", 211_968, "indexed note 70117488909"),
    Printed("Nemotron-3-Nano-30B-A3B", 4, key("full", 2), 1_557_504, "2.23", 1_536, "indexed note 56880170874"),
    Printed("MiMo-V2-Flash", 4, key("swa", 2), 1_496_958, "41.76", 29_952, "sglang#15464"),
    Printed("MiMo-V2-Flash", 4, value("swa", 2), 1_496_958, "27.84", 19_968, "sglang#15464"),
    Printed("MiMo-V2-Flash", 4, key("full", 2), 1_496_958, "4.82", 3_456, "sglang#15464"),
    Printed("MiMo-V2-Flash", 4, value("full", 2), 1_496_958, "3.21", 2_304, "sglang#15464"),
    Printed(GEMMA_4_E4B, 1, key("swa", 2), 644_444, "21.51", 35_840, "indexed note 54553741852"),
    Printed(GEMMA_4_E4B, 1, key("full", 2), 805_556, "10.76", 14_336, "indexed note 54553741852"),
    Printed("Llama-3.1-8B", 1, key("full", 2), 458_752, "28.00", 65_536, "tutorial 66584923754"),
    Printed("Kimi-K2-Thinking", 8, kv(2), 715_072, "46.80", 70_272, "vllm recipes#115"),
]

HOST = [
    Printed("GLM-5.1", 4, rows(576, indexer=False), 3_423_488, "153.81", 44_928, "indexed evidence 71562823791"),
    Printed(
        "GLM-5.1",
        4,
        lambda g, _tp: sum(g.indexer_owner) * indexer_bytes(g),
        3_423_488,
        "35.25",
        10_296,
        "indexed evidence 71562823791",
    ),
]


def check(row: Printed, unit: int) -> None:
    bytes_per_slot = row.part(load_geometry(row.model), row.tp)
    assert bytes_per_slot == row.bytes_per_slot
    predicted = {f"{(row.count + padding) * bytes_per_slot / unit:.2f}" for padding in (0, row.page_size)}
    assert row.printed in predicted


def test_all_twenty_eight_are_here() -> None:
    assert len(DEVICE) == 28


@pytest.mark.parametrize("row", DEVICE, ids=lambda row: f"{row.source}-{row.printed}")
def test_device_pool_lines(row: Printed) -> None:
    check(row, GIB)


@pytest.mark.parametrize("row", HOST, ids=lambda row: f"{row.source}-{row.printed}")
def test_host_pool_lines(row: Printed) -> None:
    check(row, GB)


def test_indexer_share_of_fp8_rows() -> None:
    """A report prints 45.49 GB of indexer beside 226.06 GB of 656-byte rows (indexed report 66691467224)."""
    indexer = indexer_bytes(load_geometry("DeepSeek-V3.2"))
    assert round(45.49 / 226.06, 4) == round(indexer / 656, 4)
