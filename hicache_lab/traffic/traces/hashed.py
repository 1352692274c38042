"""Mooncake-style JSONL: one request a line with ``hash_ids`` (prefix-block ids), lengths and an arrival time.

The format is the one published with Mooncake (FAST'25 traces) and read by kvcache-simulator:
``{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_lab.base.errors import InputError
from hicache_lab.traffic.traces.files import chunks
from hicache_lab.traffic.traces.trace import MOST_EXACT, Floats, Ints, Trace

KEYS = ("timestamp", "input_length", "output_length", "hash_ids", "block_size")
_POSSIBLE_BLOCKS = tuple(2**power for power in range(13))
_MOONCAKE_BLOCK = 512
_NOTED = 3


@dataclass(frozen=True)
class HashedChunk:
    """Some consecutive requests of a file, ids as recorded; offsets start at 0."""

    raw_ids: npt.NDArray[np.integer]
    offsets: Ints
    input_tokens: Ints
    output_tokens: Ints
    timestamps_ms: Floats
    block_sizes: Ints
    first_line: int

    @property
    def counts(self) -> Ints:
        """Blocks a request."""
        return np.diff(self.offsets)


@dataclass
class Skips:
    """What a reader left out, by reason, with a few examples."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def add(self, reason: str, where: str) -> None:
        """Count one record left out."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if len(self.examples) < _NOTED:
            self.examples.append(f"{where}: {reason}")


def stream_hashed(path: Path, skips: Skips | None = None, chunk_bytes: int | None = None) -> Iterator[HashedChunk]:
    """Read a file chunk by chunk.

    Args:
        path: JSONL, plain, gzip or zstandard.
        skips: where bad lines are counted; None: the first bad line is an error.
        chunk_bytes: bytes a chunk.

    Raises:
        InputError: a line that is not such a request, with its number.
    """
    from hicache_lab.traffic.traces import _loops

    names = np.frombuffer("".join(KEYS).encode(), np.uint8)
    bounds = np.cumsum([0, *(len(key) for key in KEYS)]).astype(np.int64)
    for first_line, block in chunks(path, chunk_bytes) if chunk_bytes else chunks(path):
        text = np.frombuffer(block, np.uint8)
        most = block.count(b"\n") + 1
        ids = np.empty(block.count(b",") + most, np.int64)
        ends = np.empty(most, np.int64)
        rows = np.empty((most, len(KEYS)), np.float64)
        spans = np.empty((most, 2), np.int64)
        count = _loops.scan_lines(text, names, bounds, ids, ends, rows, spans)
        if (ends[:count] >= 0).all():
            yield _chunk(ids, np.concatenate(([0], ends[:count])), rows[:count], first_line)
        else:
            yield _with_slow_lines(path, block, ids, ends[:count], rows[:count], spans[:count], first_line, skips)


def _chunk(ids: Ints, offsets: Ints, rows: Floats, first_line: int) -> HashedChunk:
    used = ids[: offsets[-1]]
    # a copy of what is used lets the generous buffer go; small ids take half the room
    small = not used.size or (used.min() >= 0 and used.max() < 2**32)
    return HashedChunk(
        raw_ids=used.astype(np.uint32 if small else np.int64),
        offsets=offsets,
        input_tokens=rows[:, 1].astype(np.int64),
        output_tokens=np.maximum(rows[:, 2], 0).astype(np.int64),
        timestamps_ms=rows[:, 0].copy(),
        block_sizes=rows[:, 4].astype(np.int64),
        first_line=first_line,
    )


def _with_slow_lines(
    path: Path,
    block: bytes,
    ids: Ints,
    ends: Ints,
    rows: Floats,
    spans: Ints,
    first_line: int,
    skips: Skips | None,
) -> HashedChunk:
    """Let the json module read the lines that the scanner passed on, and put all in order."""
    pieces: list[Ints] = []
    offsets = [0]
    kept: list[int] = []
    start = 0
    for index, after in enumerate(ends.tolist()):
        if after >= 0:
            piece = ids[start:after]
            start = after
        else:
            number = first_line + block.count(b"\n", 0, int(spans[index, 0]))
            try:
                piece, rows[index] = _slow_line(block[spans[index, 0] : spans[index, 1]])
            except ValueError as error:
                if skips is None:
                    raise InputError(
                        f"{path}:{number}: {error}; fix the line, or leave bad lines out with --skip-bad-lines"
                    ) from None
                skips.add("bad line", f"{path}:{number}: {error}")
                continue
        pieces.append(piece)
        offsets.append(offsets[-1] + len(piece))
        kept.append(index)
    flat = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
    return _chunk(flat, np.array(offsets, np.int64), rows[kept], first_line)


def _slow_line(raw: bytes) -> tuple[Ints, Floats]:
    try:
        record = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with hash_ids and input_length, got {type(record).__name__}")
    hashes = record.get("hash_ids")
    if not isinstance(hashes, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in hashes):
        raise ValueError("expected hash_ids, a list of whole numbers")
    if any(not -(2**63) <= x < 2**63 for x in hashes):
        # the same 64 bits, read as signed: unsigned hashes stay as different from each other as they were
        hashes = [(x + 2**63) % 2**64 - 2**63 for x in hashes]
    values = [-1.0] * len(KEYS)
    for index, key in enumerate(KEYS):
        value = record.get(key)
        if key == "hash_ids":
            continue
        if value is None and key != "input_length":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST_EXACT:
            raise ValueError(f"expected {key}, a number of at least 0, got {value!r}")
        if key != "timestamp" and value != int(value):
            raise ValueError(f"expected {key}, a whole number, got {value!r}")
        values[index] = float(value)
    return np.array(hashes, np.int64), np.array(values)


def read_hashed(path: Path, *, block_tokens: int | None = None, skip_bad: bool = False) -> Trace:
    """Read a whole file into a ``Trace``.

    Args:
        path: the file.
        block_tokens: tokens a block; None: taken from the lines, or the only size that fits every line.
        skip_bad: leave bad lines out and count them, instead of stopping at the first.

    Raises:
        InputError: a bad line, or a block size that does not fit the lengths.
    """
    skips = Skips() if skip_bad else None
    parts = [part for part in stream_hashed(path, skips) if len(part.offsets) > 1]
    if not parts:
        raise InputError(f"{path}: holds no request")
    counts = np.concatenate([part.counts for part in parts])
    inputs = np.concatenate([part.input_tokens for part in parts])
    declared = np.unique(np.concatenate([part.block_sizes for part in parts]))
    size = choose_block(path, counts, inputs, declared, block_tokens)
    timestamps = np.concatenate([part.timestamps_ms for part in parts])
    notes = [f"left out, for example {skips.examples[0]}"] if skips and skips.counts else []
    untimed = int((timestamps < 0).sum())
    if 0 < untimed < timestamps.size:
        notes.append(f"{untimed} of {timestamps.size} requests have no timestamp: all times left out")
    elif (np.diff(timestamps) < 0).any():
        notes.append("arrival times are not in order; requests are taken in the order of the file")
    kinds = {part.raw_ids.dtype for part in parts}
    raw_ids: npt.NDArray[np.integer] = np.concatenate(
        [part.raw_ids for part in parts], dtype=kinds.pop() if len(kinds) == 1 else np.int64
    )
    outputs = np.concatenate([part.output_tokens for part in parts])
    del parts
    return Trace.build(
        raw_ids,
        np.concatenate(([0], np.cumsum(counts))),
        block_tokens=size,
        input_tokens=inputs,
        output_tokens=outputs,
        arrival_s=None if untimed else timestamps / 1000,
        origin=f"measured: {path.name}",
        skipped=skips.counts if skips else None,
        notes=notes,
    )


def choose_block(path: Path, counts: Ints, inputs: Ints, declared: Ints, wanted: int | None) -> int:
    """Find the block size, and refuse one that cannot be: every request must have its length's worth of blocks."""
    stated = [int(size) for size in declared if size > 0]
    if len(stated) > 1:
        raise InputError(f"{path}: block_size differs between lines ({', '.join(map(str, stated))}); split the file")
    if wanted is None and stated:
        wanted = stated[0]
    if wanted is not None:
        wrong = np.flatnonzero(~_fits(counts, inputs, wanted))
        if wrong.size:
            first = int(wrong[0])
            raise InputError(
                f"{path}: request {first + 1} has {inputs[first]} tokens in {counts[first]} blocks, which does not fit "
                f"{wanted} tokens a block; give the trace's own block size with --block-tokens"
            )
        return wanted
    possible: list[int] = [size for size in _POSSIBLE_BLOCKS if _fits(counts, inputs, size).all()]
    if _MOONCAKE_BLOCK in possible:
        return _MOONCAKE_BLOCK
    if len(possible) != 1:
        raise InputError(
            f"{path}: the block size cannot be told from the lengths ({possible or 'no power of two'} fits every "
            "line); give it with --block-tokens"
        )
    return possible[0]


def _fits(counts: Ints, inputs: Ints, size: int) -> npt.NDArray[np.bool_]:
    fits: npt.NDArray[np.bool_] = (counts == inputs // size) | (counts == -(-inputs // size))
    return fits
