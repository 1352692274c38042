"""What the byte scanner and its compiled part agree on: sizes, places, the hash of a key."""

from __future__ import annotations

from hicache_lab.base.machine_code import Signature

MAX_KEYS = 192
MAX_COLUMNS = 64
MAX_TAGS = 1024
TABLE = 2048
KEY_LENGTH = 48
BASIS = 1469598103934665603
PRIME = 1099511628211
DECODE, PREFILL = 0, 1
# places in ``counts``
KEYS, COLUMNS_USED, TAGS, ROWS, OTHERS, NEW_KEYS, NEW_TAGS, ACCESSES = 0, 1, 2, 3, 5, 6, 7, 8

# the arguments of ``scan_kernel.scan_bytes``
SCAN = Signature(
    arguments=(
        ("uint8", 1), ("int64", 0), ("int64", 0), ("int64", 0),
        ("uint64", 1), ("int16", 1), ("int16", 1), ("uint8", 1), ("int64", 2),
        ("uint64", 1), ("int16", 1), ("int64", 2),
        ("uint8", 3), ("int64", 3),
        ("int64", 1), ("int64", 2), ("uint8", 1), ("int64", 0),
        ("int64", 3), ("float64", 3), ("int64", 2),
    ),
    results=2,
)  # fmt: skip


def key_hash(text: bytes) -> int:
    """FNV-1a of a key."""
    value = BASIS
    for byte in text:
        value = ((value ^ byte) * PRIME) & 0xFFFFFFFFFFFFFFFF
    return value
