"""Files that appear whole or not at all, and files read unpacked whatever they are compressed with."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, cast

# one byte of zstandard can stand for 32 KiB (a run-length block of 128 KiB takes four), so this caps what one step
# unpacks at 64 MiB; the codec has no cap of its own
_ZSTD_STEP_BYTES = 2048
_BUFFER_BYTES = 1 << 20


def atomic_write(target: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file so that it appears whole, or what was there before stays.

    Args:
        target: the file; where it is a link, the file that it points to is replaced.
        content: text (written as UTF-8), bytes, or a function that writes the file whose path it is given.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    target = target.resolve()
    part = target.with_name(f".part-{token_hex(8)}")
    # made here, so that nobody can have put a link there, and with the permissions that the user's umask gives
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        if isinstance(content, str):
            part.write_text(content, encoding="utf-8", newline="")
        elif isinstance(content, bytes):
            part.write_bytes(content)
        else:
            content(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def open_decompressed(source: Path | BinaryIO) -> BinaryIO:
    """Open a file for reading, decompressed according to its first bytes: gzip, zstandard, bzip2, xz, or as it is.

    Args:
        source: a path, or an open stream such as standard input; a stream stays open when the result is closed.

    Returns:
        A binary stream. One read unpacks at most what it was asked for (zstandard: at most 64 MiB more). A read that
        meets the damaged place raises; ``read1`` gives everything before it first.

    Raises:
        OSError: it cannot be opened. When reading: OSError for a damaged stream, EOFError for one that ends early.
    """
    owned = isinstance(source, Path)
    raw: BinaryIO = source.open("rb") if isinstance(source, Path) else source
    # a pipe cannot go back to its beginning: look ahead
    magic = raw.peek(6)[:6] if isinstance(raw, io.BufferedReader) else b""
    unpackers: dict[bytes, Callable[[BinaryIO], Callable[[int], bytes]]] = {
        b"\x1f\x8b": lambda packed: gzip.GzipFile(fileobj=packed).read1,
        b"BZh": lambda packed: bz2.BZ2File(packed).read1,
        b"\xfd7zXZ\x00": lambda packed: lzma.LZMAFile(packed).read1,  # noqa: SIM115 - closed with the stream
        b"\x28\xb5\x2f\xfd": lambda packed: _Zstandard(packed).read1,
    }
    for mark, unpacker in unpackers.items():
        if magic.startswith(mark):
            stream = _Unpacked(unpacker(raw), raw if owned else None)
            return cast("BinaryIO", io.BufferedReader(stream, _BUFFER_BYTES))
    return raw


class _Unpacked(io.RawIOBase):
    """A decompressor as a raw stream; closing it closes the file below."""

    def __init__(self, read1: Callable[[int], bytes], raw: BinaryIO | None) -> None:
        self._read1, self._raw = read1, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._read1(len(buffer))
        except (zlib.error, lzma.LZMAError) as error:
            raise OSError(str(error)) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
        super().close()


class _Zstandard:
    """Decompresses frame after frame; a stream that ends inside a frame is an error and not an end."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw, self._codec, self._error = raw, zstandard.ZstdDecompressor(), zstandard.ZstdError
        self._frame = self._codec.decompressobj()
        self._ready = memoryview(b"")
        self._inside = False

    def read1(self, size: int) -> bytes:
        """At least one byte and at most ``size``; nothing at the end."""
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or cast("io.BufferedReader", self._raw).read1(_ZSTD_STEP_BYTES)
            if not packed:
                if self._inside:
                    raise EOFError("it ends in the middle of a compressed frame")
                return b""
            if self._frame.eof:
                self._frame = self._codec.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise OSError(str(error)) from error
            self._inside = not self._frame.eof
        data, self._ready = self._ready[:size], self._ready[size:]
        return bytes(data)
