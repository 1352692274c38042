"""Prefill and decode lines: fields by key, whatever their number and order in a release."""

from __future__ import annotations

import re
from dataclasses import dataclass

# key as printed → column; a key that is not here gets a column named after itself
COLUMNS: dict[str, str] = {
    "#running-req": "running_req",
    "#queue-req": "queue_req",
    "#token": "token",
    "#full token": "full_token",
    "#swa token": "swa_token",
    "#gpu token": "gpu_token",
    "#cpu token": "cpu_token",
    "#new-seq": "new_seq",
    "#new-token": "new_token",
    "#cached-token": "cached_token",
    "#pending-token": "pending_token",
    "#replay-token": "replay_token",
    "#prealloc-req": "prealloc_req",
    "#bootstrap-req": "bootstrap_req",
    "#unbootstrapped-req": "unbootstrapped_req",
    "#inflight-req": "inflight_req",
    "#transferring-req": "transferring_req",
    "#transfer-req": "transfer_req",
    "#retracted-req": "retracted_req",
    "#host-receive-req": "host_receive_req",
    "#optimistic-req": "optimistic_req",
    "waiting-image-req": "waiting_image_req",
    "#waiting-image-req": "waiting_image_req",
    "token usage": "token_usage",
    "full token usage": "full_token_usage",
    "swa token usage": "swa_token_usage",
    "gpu token usage": "gpu_token_usage",
    "cpu token usage": "cpu_token_usage",
    "mamba usage": "mamba_usage",
    "mamba num": "mamba_num",
    "pre-allocated usage": "preallocated_usage",
    "gen throughput (token/s)": "gen_throughput",
    "input throughput (token/s)": "input_throughput",
    "cuda graph": "graph",
    "cpu graph": "graph",
    "npu graph": "graph",
    "xpu graph": "graph",
    "musa graph": "graph",
    "accept len": "accept_len",
    "accept rate": "accept_rate",
    "cap len": "cap_len",
    "block accept len": "block_accept_len",
    "largest-len": "largest_len",
    "time": "time",
    "est. prefill TFLOPS/s (per GPU)": "tflops",
    "est. decode TFLOPS/s (per GPU)": "tflops",
    "est. read BW (GB/s per GPU)": "read_bw",
    "est. write BW (GB/s per GPU)": "write_bw",
    "fwd occupancy": "fwd_occupancy",
}
BOOLEANS = frozenset({"graph"})
_INTEGERS = frozenset({"mamba_num", "largest_len", "waiting_image_req", "full_token", "swa_token"})

_BATCH = re.compile(r"(Decode|Prefill) batch(?: \[(\d{1,18})\])?[.,] ?")
_VALUE = re.compile(r"(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|inf|nan)%?$|True$|False$")


def column_of(key: str) -> str:
    """The column of a printed key: ``"#running-req"`` → ``running_req``."""
    known = COLUMNS.get(key)
    if known is not None:
        return known
    return re.sub(r"[^a-z0-9]+", "_", key.lower()).strip("_")


def is_integer(column: str, key: str = "") -> bool:
    """Whether a column counts things (``#`` marks a count in every release)."""
    return key.startswith("#") or column in _INTEGERS or column in _COUNTS


_COUNTS = frozenset(column for key, column in COLUMNS.items() if key.startswith("#"))


@dataclass(frozen=True, slots=True)
class BatchFields:
    """What a batch line carries: its phase, its iteration number if printed, and its values by column."""

    phase: str
    iteration: int | None
    values: dict[str, float]


def parse_batch(message: str, *, cut: bool = False) -> BatchFields | None:
    """Read a batch message.

    Args:
        message: the text after the record's prefix.
        cut: the line is known to be cut; its last value may be the beginning of a longer one and is dropped.

    Returns:
        The fields, or None if this is not a batch line with at least two fields that some release prints.
    """
    begin = _BATCH.match(message)
    if begin is None:
        return None
    values: dict[str, float] = {}
    known = 0
    base = ""
    pieces = message[begin.end() :].rstrip().rstrip(",").split(", ")
    if cut:
        pieces.pop()
    for piece in pieces:
        key, found, text = piece.partition(": ")
        if found:
            base = key.strip()
        else:
            key, text = base, piece
        label, equals, inner = text.partition("=")
        if equals and base.startswith(("#token", "token usage")):
            key = f"#{label} token" if base == "#token" else f"{label} {base}"
            text = inner
        elif not found:
            continue
        key, text = key.strip(), text.strip()
        if not _VALUE.match(text):
            continue
        known += key in COLUMNS
        values.setdefault(column_of(key), _number(text))
    if known < (1 if cut else 2):
        return None
    return BatchFields(begin[1].lower(), int(begin[2]) if begin[2] else None, values)


def _number(text: str) -> float:
    if text in ("True", "False"):
        return float(text == "True")
    return float(text.rstrip("%"))
