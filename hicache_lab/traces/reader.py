"""One door for every trace file: look at its beginning, take the reader that knows it."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from hicache_lab.errors import InputError, UsageError
from hicache_lab.traces import files
from hicache_lab.traces.hashed import read_hashed
from hicache_lab.traces.lengths import (
    looks_like_lengths,
    read_bench_serving,
    read_lengths_csv,
    refuse_bench_multiturn,
)
from hicache_lab.traces.prompts import PROMPT_KEYS, Tokenizer, read_prompts
from hicache_lab.traces.request_logs import FINISHED, read_request_log
from hicache_lab.traces.trace import Trace

FORMATS = {
    "mooncake": "JSONL with hash_ids (Mooncake, Qwen-Bailian, kvcache-simulator)",
    "prompts": "JSONL or JSON with prompt, messages, conversations or token ids",
    "sglang-log": "an SGLang log with --log-requests --log-requests-level 3",
    "lengths-csv": "CSV with prompt and output lengths (Azure, BurstGPT): no prefix information",
    "bench-serving": "bench_serving's result file with --output-details: no prefix information",
}
_LOOKED_AT = 400
_PAGE = 64


def sniff(path: Path) -> str:
    """Name the format of a file by its first lines.

    Raises:
        InputError: none of the known formats.
    """
    beginning = list(islice(files.lines(path), _LOOKED_AT))
    if not beginning:
        raise InputError(f"{path}: is empty")
    first = beginning[0][1].strip()
    if looks_like_lengths(first):
        return "lengths-csv"
    if first.startswith("["):
        if not _is_stamped(first):
            return "prompts"
    elif first.startswith("{"):
        found = _json_format(path, first)
        if found:
            return found
    if any(FINISHED in line or '"request.finished"' in line for _, line in beginning):
        return "sglang-log"
    known = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
    raise InputError(f"{path}: none of the known trace formats ({known}); name it with --format if it is one")


def _is_stamped(first: str) -> bool:
    return first[1:5].isdigit()


def _json_format(path: Path, first: str) -> str | None:
    try:
        record = json.loads(first)
    except ValueError:
        # a broken first line: what it names tells which reader must report it
        return "mooncake" if '"hash_ids"' in first else None
    keys = set(record)
    if "hash_ids" in keys:
        return "mooncake"
    if "summary" in keys and "tag" in keys:
        raise refuse_bench_multiturn(path)
    if "event" in keys or "obj" in keys:
        return "sglang-log"
    if "input_lens" in keys or {"request_throughput", "total_input_tokens"} <= keys:
        return "bench-serving"
    if keys & PROMPT_KEYS:
        return "prompts"
    return None


def read_trace(
    path: Path | str,
    *,
    format: str = "auto",
    block_tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
    sessions_at_once: int = 8,
    skip_bad: bool = False,
) -> Trace:
    """Read any trace file.

    Args:
        path: the file; plain, gzip or zstandard; "-" or a pipe is kept in a temporary file while it is read.
        format: one of ``FORMATS``, or "auto".
        block_tokens: tokens a block; None: the file's own, or a page of 64 tokens for prompts.
        tokenizer: for text prompts (``prompts.load_tokenizer``).
        sessions_at_once: for conversations without times.
        skip_bad: count bad records instead of stopping at the first.

    Raises:
        UsageError: an unknown format name, no such file.
        InputError: the file is not what it should be; names file and line.
    """
    path = Path(path)
    if str(path) == "-" or path.is_fifo() or path.is_char_device():
        return _piped(path, format, block_tokens, tokenizer, sessions_at_once, skip_bad)
    if format != "auto" and format not in FORMATS:
        raise UsageError(f"--format: expected auto or one of {', '.join(FORMATS)}, got {format!r}")
    if block_tokens is not None and block_tokens < 1:
        raise UsageError(f"--block-tokens: expected a whole number of at least 1, got {block_tokens}")
    kind = sniff(path) if format == "auto" else format
    if kind == "mooncake":
        return read_hashed(path, block_tokens=block_tokens, skip_bad=skip_bad)
    if kind == "prompts":
        return read_prompts(
            path,
            block_tokens=block_tokens or _PAGE,
            tokenizer=tokenizer,
            sessions_at_once=sessions_at_once,
            skip_bad=skip_bad,
        )
    if kind == "sglang-log":
        return read_request_log(path, block_tokens=block_tokens or _PAGE, tokenizer=tokenizer, skip_bad=skip_bad)
    if kind == "lengths-csv":
        return read_lengths_csv(path, skip_bad=skip_bad)
    return read_bench_serving(path)


def _piped(path: Path, *reading: Any) -> Trace:
    """A stream cannot be looked at first and read then: keep it for the time of reading."""
    with tempfile.NamedTemporaryFile(prefix="hicache-lab-trace-") as kept:
        if str(path) == "-":
            shutil.copyfileobj(sys.stdin.buffer, kept)
        else:
            with path.open("rb") as stream:
                shutil.copyfileobj(stream, kept)
        kept.flush()
        names = ("format", "block_tokens", "tokenizer", "sessions_at_once", "skip_bad")
        trace = read_trace(kept.name, **dict(zip(names, reading, strict=True)))
    return replace(trace, origin="measured: standard input" if str(path) == "-" else f"measured: {path.name}")
