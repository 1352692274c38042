"""Trace files as streams of whole lines: plain, gzip or zstandard, with their line numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.files import open_decompressed

CHUNK_BYTES = 8 << 20
_LONG_BYTES = 32 << 20
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a trace for reading; what it is compressed with is taken from its first bytes, not from its name."""
    try:
        with open_decompressed(path) as stream:
            yield stream
    except FileNotFoundError:
        raise UsageError(f"{path}: no such trace file") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder, expected a trace file") from None
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: cannot be read to its end ({error}); fetch the file again") from None


def chunks(path: Path, size: int = CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, bytes of whole lines); a line longer than ``size`` grows its chunk."""
    line = 1
    rest = b""
    first = True
    with opened(path) as stream, _progress(path) as done:
        while block := _read(stream, size, path):
            done(len(block))
            if first:
                block, first = _without_mark(block, path), False
            cut = block.rfind(b"\n") + 1
            if not cut:
                rest += block
                continue
            whole = rest + block[:cut] if rest else block[:cut]
            rest = block[cut:]
            yield line, whole
            line += whole.count(b"\n")
    if rest:
        yield line, rest


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


def _read(stream: IO[bytes], size: int, path: Path) -> bytes:
    try:
        return stream.read(size)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path}: cannot be read to its end ({error}); fetch the file again") from None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of every line that is not blank; bytes that are not UTF-8 are kept as escapes."""
    for first, block in chunks(path):
        for number, raw in enumerate(block.split(b"\n"), first):
            if raw.strip():
                yield number, raw.decode("utf-8", "backslashreplace")
