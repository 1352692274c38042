"""Trace files as streams of whole lines, compressed or not, with their line numbers; and what a reader leaves out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.files import open_decompressed
from hicache_lab.base.units import format_gib

CHUNK_BYTES = 8 << 20
MOST_LINE_BYTES = 1 << 30  # ShareGPT is one array of 0.7 GB; what is longer is a bomb or not a text
_LONG_BYTES = 32 << 20
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def chunks(path: Path, size: int = CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, bytes of whole lines); a line longer than ``size`` grows its chunk.

    Raises:
        InputError: the file cannot be read to its end, is UTF-16, or has a line of more than ``MOST_LINE_BYTES``.
    """
    line = 1
    rest: list[bytes] = []
    rest_bytes = 0
    first = True
    with _opened(path) as stream, _progress(path) as done:
        while block := stream.read(size):
            done(len(block))
            if first:
                block, first = _without_mark(block, path), False
            cut = block.rfind(b"\n") + 1
            if cut:
                lines_of_block = b"".join((*rest, block[:cut]))
                yield line, lines_of_block
                line += lines_of_block.count(b"\n")
                rest, rest_bytes = [], 0
            rest.append(block[cut:])
            rest_bytes += len(block) - cut
            if rest_bytes > MOST_LINE_BYTES:
                raise InputError(f"{path}:{line}: a line of more than {format_gib(MOST_LINE_BYTES)}; not a trace")
    if rest_bytes:
        yield line, b"".join(rest)


def all_of(path: Path) -> bytes:
    """A whole file that cannot be read piece by piece.

    Raises:
        InputError: it is larger than ``MOST_LINE_BYTES``, or cannot be read.
    """
    blocks: list[bytes] = []
    size = 0
    for _, block in chunks(path):
        blocks.append(block)
        size += len(block)
        if size > MOST_LINE_BYTES:
            raise InputError(f"{path}: one JSON array of more than {format_gib(MOST_LINE_BYTES)}; make it JSONL")
    return b"".join(blocks)


def decode_json(text: str | bytes) -> Any:
    """One JSON value.

    Raises:
        ValueError: what is wrong with the text, nesting too deep for the decoder included.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    except RecursionError:
        raise ValueError("not JSON that can be read (nested too deeply)") from None


@dataclass
class Skips:
    """What a reader left out, by reason, with the first example.

    Attributes:
        skip_bad: count bad records instead of stopping at the first.
        counts: reason → number of records.
        example: where and why the first was left out, or "".
    """

    skip_bad: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    example: str = ""

    def add(self, reason: str, example: str) -> None:
        """Count one record left out."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.example = self.example or example

    def bad(self, what: str, where: str, error: object) -> None:
        """Count a record ("line", "record") that cannot be read, or stop at it.

        Raises:
            InputError: bad records are not to be left out.
        """
        if not self.skip_bad:
            raise InputError(f"{where}: {error}; fix the {what}, or leave bad ones out with --skip-bad-lines")
        self.add(f"bad {what}", f"{where}: {error}")

    def notes(self) -> list[str]:
        """For the trace: an example of what was left out."""
        return [f"left out, for example {self.example}"] if self.counts else []


def _without_mark(beginning: bytes, path: Path) -> bytes:
    if beginning.startswith(_UTF16_MARKS):
        raise InputError(f"{path}: is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8 FILE > NEW")
    return beginning.removeprefix(b"\xef\xbb\xbf")


@contextmanager
def _progress(path: Path) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal for files that take a while; it counts decompressed bytes."""
    if path.stat().st_size < _LONG_BYTES or not sys.stderr.isatty():
        yield lambda _count: None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, desc=f"reading {path.name}", file=sys.stderr, leave=False) as bar:
        yield bar.update


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_decompressed(path) as stream:
            yield stream
    except FileNotFoundError:
        raise UsageError(f"{path}: no such trace file") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder, expected a trace file") from None
    except PermissionError:
        raise UsageError(f"{path}: you may not read this file") from None
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: cannot be read to its end ({error}); fetch the file again") from None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of every line that is not blank; bytes that are not UTF-8 are kept as escapes."""
    for first, block in chunks(path):
        for number, raw in enumerate(block.split(b"\n"), first):
            if raw.strip():
                yield number, raw.decode("utf-8", "backslashreplace")
