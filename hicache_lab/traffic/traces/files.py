"""Trace files as streams of whole lines: plain, gzip or zstandard, with their line numbers."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from hicache_lab.base.errors import InputError, UsageError

CHUNK_BYTES = 8 << 20
_LONG_BYTES = 32 << 20
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class _Zstandard(io.RawIOBase):
    """Decompresses frame after frame; a stream that ends inside a frame is an error, not an end."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._raw, self._codec = raw, zstandard.ZstdDecompressor()
        self._frame = self._codec.decompressobj()
        self._begun = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._raw.read(1 << 20)
            if not packed:
                if self._begun and not self._frame.eof:
                    raise EOFError("it ends in the middle of a compressed frame")
                return 0
            if self._frame.eof:
                self._frame = self._codec.decompressobj()
            self._begun = True
            self._ready = self._frame.decompress(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a trace for reading; what it is compressed with is taken from its first bytes, not from its name."""
    try:
        with path.open("rb") as raw:
            magic = raw.read(4)
            raw.seek(0)
            if magic[:2] == b"\x1f\x8b":
                yield cast(IO[bytes], gzip.GzipFile(fileobj=raw))
            elif magic == _ZSTD_MAGIC:
                yield io.BufferedReader(_Zstandard(raw), CHUNK_BYTES)
            else:
                yield raw
    except FileNotFoundError:
        raise UsageError(f"{path}: no such trace file") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder, expected a trace file") from None
    except (gzip.BadGzipFile, EOFError) as error:
        raise InputError(f"{path}: damaged gzip stream ({error}); fetch the file again") from None


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
    import zlib

    from zstandard import ZstdError

    try:
        return stream.read(size)
    except (OSError, EOFError, ValueError, zlib.error, ZstdError) as error:
        raise InputError(f"{path}: cannot be read to its end ({error}); fetch the file again") from None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of every line that is not blank; bytes that are not UTF-8 are kept as escapes."""
    for first, block in chunks(path):
        for number, raw in enumerate(block.split(b"\n"), first):
            if raw.strip():
                yield number, raw.decode("utf-8", "backslashreplace")
