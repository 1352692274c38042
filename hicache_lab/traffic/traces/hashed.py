"""Mooncake-style JSONL: one request a line with ``hash_ids`` (prefix-block ids), lengths and an arrival time.

The format is the one published with Mooncake (FAST'25 traces) and read by kvcache-simulator:
``{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_lab.base.errors import InputError
from hicache_lab.traffic.traces.files import CHUNK_BYTES, Skips, chunks, decode_json
from hicache_lab.traffic.traces.trace import MOST_EXACT, Floats, Ints, Trace

_NUMBERS: Mapping[str, type[np.generic]] = {
    "timestamp": np.float64, "input_length": np.int64, "output_length": np.int64, "block_size": np.int64
}  # fmt: skip
_POSSIBLE_BLOCKS = tuple(2**power for power in range(13))
_MOONCAKE_BLOCK = 512


@dataclass(frozen=True)
class HashedChunk:
    """Some consecutive requests of a file, ids as recorded; offsets start at 0, an absent number is negative."""

    raw_ids: npt.NDArray[np.integer]
    offsets: Ints
    input_tokens: Ints
    output_tokens: Ints
    timestamps_ms: Floats
    block_sizes: Ints

    @property
    def counts(self) -> Ints:
        """Blocks a request."""
        return np.diff(self.offsets)


def stream_hashed(path: Path, skips: Skips | None = None, chunk_bytes: int = CHUNK_BYTES) -> Iterator[HashedChunk]:
    """Read a file chunk by chunk.

    Args:
        path: JSONL, plain or compressed.
        skips: where bad lines are counted; None: the first one stops the reading.
        chunk_bytes: bytes a chunk.

    Raises:
        InputError: a line that is not such a request, with its number.
    """
    skips = skips or Skips()
    for first_line, block in chunks(path, chunk_bytes):
        columns = _by_columns(block)
        yield columns if columns is not None else _by_lines(path, block, first_line, skips)


def _by_columns(block: bytes) -> HashedChunk | None:
    """Read lines that are all as published; None: some line is not, and the json module must say which and why."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    columns = {key: pa.from_numpy_dtype(kind) for key, kind in _NUMBERS.items()}
    schema = pa.schema({"hash_ids": pa.list_(pa.int64()), **columns})
    try:
        table = arrow_json.read_json(
            pa.BufferReader(block),
            arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except (pa.ArrowInvalid, OverflowError):
        return None
    body = b"\n" + block.strip(b"\n")
    if not body.count(b"\n") == body.count(b"\n{") == table.num_rows:
        return None  # arrow takes two objects on a line, and one on two lines
    numbers = []
    for key, kind in _NUMBERS.items():
        column = table[key].combine_chunks()
        values = _buffer(column, kind)[: table.num_rows]
        usable = (values >= 0) & (values < MOST_EXACT)
        if column.null_count:
            absent = np.unpackbits(_buffer(column, np.uint8, 0), bitorder="little")[: len(values)] == 0
            values, usable = np.where(absent, -1, values), usable | absent
        if not usable.all() or (key == "input_length" and column.null_count):
            return None
        numbers.append(values)
    hashes = table["hash_ids"].combine_chunks()
    if hashes.null_count or hashes.values.null_count:
        return None
    offsets = _buffer(hashes, np.int32)[: table.num_rows + 1].astype(np.int64)
    return _chunk(_buffer(hashes.values, np.int64)[: offsets[-1]], offsets, *numbers)


def _buffer(array: Any, kind: type[np.generic], index: int = 1) -> npt.NDArray[Any]:
    """An arrow buffer as it is: ``to_numpy`` imports pandas first, which takes longer than the reading."""
    return np.frombuffer(array.buffers()[index], kind)


def _by_lines(path: Path, block: bytes, first_line: int, skips: Skips) -> HashedChunk:
    """The same line by line: slower, but it knows what is wrong with a line, and takes unsigned hashes."""
    ids: list[int] = []
    offsets = [0]
    rows: list[list[float]] = []
    for number, line in enumerate(block.split(b"\n"), first_line):
        if not line.strip():
            continue
        try:
            hashes, numbers = _request(line)
        except ValueError as error:
            skips.bad("line", f"{path}:{number}", error)
            continue
        ids += hashes
        offsets.append(len(ids))
        rows.append(numbers)
    columns = np.array(rows, np.float64).reshape(-1, len(_NUMBERS)).T
    return _chunk(np.array(ids, np.int64), np.array(offsets, np.int64), *columns)


def _chunk(
    ids: Ints, offsets: Ints, timestamps: Floats, inputs: Ints | Floats, outputs: Ints | Floats, sizes: Ints | Floats
) -> HashedChunk:
    small = not ids.size or (ids.min() >= 0 and ids.max() < 2**32)  # small ids take half the room
    return HashedChunk(
        raw_ids=ids.astype(np.uint32 if small else np.int64),
        offsets=offsets,
        input_tokens=inputs.astype(np.int64),
        output_tokens=np.maximum(outputs, 0).astype(np.int64),
        timestamps_ms=timestamps.astype(np.float64),
        block_sizes=sizes.astype(np.int64),
    )


def _request(line: bytes) -> tuple[list[int], list[float]]:
    """One line: block ids, and the numbers in the order of ``_NUMBERS`` (-1 where absent).

    Raises:
        ValueError: what is wrong with it.
    """
    record = decode_json(line)
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with hash_ids and input_length, got {type(record).__name__}")
    hashes = record.get("hash_ids")
    if not isinstance(hashes, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in hashes):
        raise ValueError("expected hash_ids, a list of whole numbers")
    if any(not -(2**63) <= x < 2**63 for x in hashes):
        # the same 64 bits, read as signed: unsigned hashes stay as different from each other as they were
        hashes = [(x + 2**63) % 2**64 - 2**63 for x in hashes]
    numbers = []
    for key in _NUMBERS:
        value = record.get(key)
        if value is None and key != "input_length":
            value = -1.0
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST_EXACT:
            raise ValueError(f"expected {key}, a number of at least 0, got {value!r}")
        elif key != "timestamp" and value != int(value):
            raise ValueError(f"expected {key}, a whole number, got {value!r}")
        numbers.append(float(value))
    return hashes, numbers


def read_hashed(path: Path, *, block_tokens: int | None = None, skip_bad: bool = False) -> Trace:
    """Read a whole file into a ``Trace``.

    Args:
        path: the file.
        block_tokens: tokens a block; None: taken from the lines, or the only size that fits every line.
        skip_bad: leave bad lines out and count them, instead of stopping at the first.

    Raises:
        InputError: a bad line, or a block size that does not fit the lengths.
    """
    skips = Skips(skip_bad)
    requests = join_chunks(path, stream_hashed(path, skips))
    size = choose_block(path, requests, block_tokens)
    notes = skips.notes()
    untimed = int((requests.timestamps_ms < 0).sum())
    if 0 < untimed < requests.timestamps_ms.size:
        notes.append(f"{untimed} of {requests.timestamps_ms.size} requests have no timestamp: all times left out")
    elif (np.diff(requests.timestamps_ms) < 0).any():
        notes.append("arrival times are not in order; requests are taken in the order of the file")
    return Trace.build(
        requests.raw_ids,
        requests.offsets,
        block_tokens=size,
        input_tokens=requests.input_tokens,
        output_tokens=requests.output_tokens,
        arrival_s=None if untimed else requests.timestamps_ms / 1000,
        origin=f"measured: {path.name}",
        skipped=skips.counts,
        notes=notes,
    )


def join_chunks(path: Path, chunks: Iterable[HashedChunk]) -> HashedChunk:
    """Consecutive chunks of one file as one.

    Raises:
        InputError: they hold no request.
    """
    parts = [part for part in chunks if part.input_tokens.size]
    if not parts:
        raise InputError(f"{path}: holds no request")
    kinds = {part.raw_ids.dtype for part in parts}
    ids: npt.NDArray[np.integer] = np.concatenate(
        [part.raw_ids for part in parts], dtype=kinds.pop() if len(kinds) == 1 else np.int64
    )
    ends = np.cumsum(np.concatenate([part.counts for part in parts]))
    columns = ("input_tokens", "output_tokens", "timestamps_ms", "block_sizes")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
    return HashedChunk(raw_ids=ids, offsets=np.concatenate(([0], ends)), **joined)


def choose_block(path: Path, requests: HashedChunk, block_tokens: int | None) -> int:
    """Find the block size, and refuse one that cannot be: every request must have its length's worth of blocks."""
    counts, inputs = requests.counts, requests.input_tokens
    stated = [int(size) for size in np.unique(requests.block_sizes) if size > 0]
    if len(stated) > 1:
        raise InputError(f"{path}: block_size differs between lines ({', '.join(map(str, stated))}); split the file")
    if block_tokens is None and stated:
        block_tokens = stated[0]
    if block_tokens is not None:
        wrong = np.flatnonzero(~_fits(counts, inputs, block_tokens))
        if wrong.size:
            first = int(wrong[0])
            raise InputError(
                f"{path}: request {first + 1} has {inputs[first]} tokens in {counts[first]} blocks, which does not fit "
                f"{block_tokens} tokens a block; give the trace's own block size with --block-tokens"
            )
        return block_tokens
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
