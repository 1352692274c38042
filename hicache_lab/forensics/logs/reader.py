"""Bytes in: compressed, rotated, UTF-16, from standard input or still growing."""

from __future__ import annotations

import codecs
import contextlib
import io
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.files import open_decompressed
from hicache_lab.forensics.logs.prefix import records

CHUNK = 2 << 20
_HEAD = 1 << 16
# arguments take 16 KiB, a logged prompt of a million tokens some MiB; what is longer is no log line
_MAX_LINE = 8 << 20
_ROTATED = re.compile(
    r"(\.log|\.txt|\.out|\.err)?(?:[.-](\d{1,3}|\d{4}-?\d\d-?\d\d(?:[-T_]?\d{2,6})?))?(\.(?:gz|zst|bz2|xz))?$"
)
STDIN = "-"


@dataclass(frozen=True, slots=True)
class Source:
    """One stream: the files of a rotated set in order of time, or a single file, or standard input."""

    name: str
    paths: tuple[str, ...]


def open_bytes(path: str) -> BinaryIO:
    """Open a file, a pipe or standard input (``-``) for reading, decompressed according to its first bytes.

    Raises:
        InputError: it does not exist, is a directory or may not be read.
    """
    try:
        return open_decompressed(sys.stdin.buffer if path == STDIN else Path(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; give the path of a log file") from error


def _encoding(head: bytes) -> str | None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # PowerShell and editors also write UTF-16 without a mark: every second byte of ASCII text is then zero
    sample = head[:512]
    if len(sample) >= 16 and sample[1::2].count(0) > 0.9 * len(sample[1::2]):
        return "utf-16-le"
    if len(sample) >= 16 and sample[0::2].count(0) > 0.9 * len(sample[0::2]):
        return "utf-16-be"
    return None


def chunks(path: str, *, size: int = CHUNK, on_read: Callable[[int], object] | None = None) -> Iterator[bytes]:
    """The file's content as UTF-8-compatible bytes, each chunk ending at a line's end (the last one wherever it ends).

    Args:
        path: a file, or ``-`` for standard input.
        size: bytes read at a time.
        on_read: called with the number of bytes of each read (decompressed).

    Raises:
        InputError: unreadable, or a damaged compressed stream.
    """
    stream = open_bytes(path)
    try:
        yield from _whole_lines(_decoded(path, stream, size, on_read))
    finally:
        if path != STDIN:
            stream.close()


def arrays(
    path: str, *, size: int = CHUNK, on_read: Callable[[int], object] | None = None
) -> Iterator[npt.NDArray[np.uint8]]:
    """Like ``chunks``, as arrays of bytes; a plain UTF-8 file is read without being copied again."""
    opened = open_bytes(path)
    with contextlib.nullcontext(opened) if path == STDIN else contextlib.closing(opened) as stream:
        # a named pipe may fall silent: what it had given by then would be lost in an unfinished read
        plain = path != STDIN and Path(path).is_file()
        plain = plain and isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO)
        head = cast("io.BufferedReader", stream).peek(512)[:512] if plain else b""
        if not plain or _encoding(head) is not None or head.startswith(codecs.BOM_UTF8):
            yield from (np.frombuffer(chunk, np.uint8) for chunk in _whole_lines(_decoded(path, stream, size, on_read)))
            return
        tail, count = bytearray(), -1
        while count:
            buffer = bytearray(len(tail) + size)
            buffer[: len(tail)] = tail
            count = cast("io.BufferedReader", stream).readinto(memoryview(buffer)[len(tail) :])
            end = len(tail) + count
            cut = buffer.rfind(b"\n", 0, end) + 1
            if not count or (not cut and end >= _MAX_LINE):
                cut = end
            elif on_read is not None:
                on_read(count)
            if cut:
                yield np.frombuffer(buffer, np.uint8, cut)
            tail = buffer[cut:end]


def _decoded(path: str, stream: BinaryIO, size: int, on_read: Callable[[int], object] | None) -> Iterator[bytes]:
    decoder: codecs.IncrementalDecoder | None = None
    first = True
    broken: str | KeyboardInterrupt = ""
    while True:
        data = b""
        if isinstance(broken, KeyboardInterrupt):
            raise broken
        if not broken:
            data, broken = _part(path, stream, size, first)
            if isinstance(broken, str) and broken:
                print(f"{path}: {broken}; using what could be read", file=sys.stderr)
        if not data:
            if decoder is not None and (rest := decoder.decode(b"", final=True)):
                yield rest.encode("utf-8", "replace")
            return
        if on_read is not None:
            on_read(len(data))
        if first:
            first = False
            name = _encoding(data)
            decoder = codecs.getincrementaldecoder(name)("replace") if name else None
            if data.startswith(codecs.BOM_UTF8):
                data = data[3:]
        yield decoder.decode(data).encode("utf-8", "replace") if decoder else data


def _part(path: str, stream: BinaryIO, size: int, first: bool) -> tuple[bytes, str | KeyboardInterrupt]:
    """Up to ``size`` bytes, and what ended the stream if it was not its end; what came before the damage is kept."""
    # read() would throw away what it had unpacked before the damage
    read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
    data = bytearray()
    try:
        while len(data) < size and (piece := read(size - len(data))):
            data += piece
    except KeyboardInterrupt as stop:
        return bytes(data), stop
    except EOFError:
        # a compressed file that is still being written, or was cut
        return bytes(data), "the compressed stream ends early"
    except OSError as error:
        if first and not data:
            raise InputError(f"{path}: cannot be read: {error}") from error
        return bytes(data), f"damaged: {error}"
    return bytes(data), ""


def _whole_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    tail = b""
    for piece in pieces:
        cut = piece.rfind(b"\n")
        if cut < 0:
            tail += piece
            if len(tail) > _MAX_LINE:
                # not a text file; a line this long is no record of anybody's
                yield tail + b"\n"
                tail = b""
            continue
        yield tail + piece[: cut + 1]
        tail = piece[cut + 1 :]
    if tail:
        yield tail


def sources(paths: Iterable[str]) -> list[Source]:
    """Group the given paths into streams: rotated files of one log belong together, ordered by their first time.

    Args:
        paths: files, directories (their ``*.log*`` and ``*.txt`` files are taken) or ``-``.

    Raises:
        InputError: a path does not exist, or a directory holds no log.
        UsageError: standard input given twice.
    """
    sets: dict[str, list[str]] = {}
    for path in _files(paths):
        if path == STDIN and STDIN in sets:
            raise UsageError("LOG: standard input (-) can be given once")
        match = _ROTATED.search(path)
        base = path if path == STDIN or match is None else path[: match.start()] + (match[1] or "")
        members = sets.setdefault(base, [])
        if path not in members:
            members.append(path)
    return [Source(base if len(found) > 1 else found[0], tuple(_in_order(found))) for base, found in sets.items()]


def _files(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        if path == STDIN:
            yield path
        elif Path(path).is_dir():
            members = sorted(p for p in Path(path).iterdir() if re.search(r"\.(log|txt|out|err)\b", p.name))
            inside = [str(p) for p in members if p.is_file()]
            if not inside:
                raise InputError(f"{path}: a directory without *.log, *.txt, *.out or *.err files; name the log file")
            yield from inside
        elif Path(path).exists():
            yield path
        else:
            raise InputError(
                f"{path}: no such file; give the path of a server log, a directory of logs, or - for standard input"
            )


def _in_order(paths: list[str]) -> list[str]:
    if len(paths) == 1:
        return paths
    first = {path: first_time(path) for path in paths}
    if all(first.values()):
        return sorted(paths, key=lambda path: first[path] or "")
    # without times: the highest rotation number is the oldest, the plain name the newest
    return sorted(
        paths,
        key=lambda path: -int(number[2]) if (number := _ROTATED.search(path)) and (number[2] or "").isdigit() else 1,
    )


def head_of(path: str) -> bytes:
    """The lines in the first 64 KiB of a file (unpacked): they say what it is, when it begins, and whether in a record.

    A file is looked at once, however many ask, until it changes.

    Raises:
        InputError: it cannot be read.
    """
    status = Path(path).stat() if Path(path).exists() else None
    return _head(path, status.st_mtime_ns if status else 0, status.st_size if status else 0)


@lru_cache(maxsize=128)
def _head(path: str, _changed_ns: int, _size: int) -> bytes:
    return next(chunks(path, size=_HEAD), b"")[:_HEAD]


def first_time(path: str) -> str | None:
    """The first time a record of the file carries, in ISO form; None if the first lines carry none."""
    lines = head_of(path).decode("utf-8", "replace").split("\n")
    return next((head.at.isoformat() for line in lines for head in records(line) if head.at is not None), None)


def begins_with_record(path: str) -> bool:
    """Whether the first line of a file holds the beginning of a record: it then continues no other file's last line."""
    line = head_of(path).split(b"\n", 1)[0].decode("utf-8", "replace")
    return any(head.headed for head in records(line))


def follow(
    path: str,
    *,
    poll_s: float = 0.5,
    stop: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bytes | None]:
    """Whole lines of a growing file, for ever, and ``None`` after each look that found nothing new.

    A file that was cut short or replaced is opened again; UTF-16 becomes UTF-8.

    Args:
        path: the file (not compressed), or ``-``.
        poll_s: seconds between looks.
        stop: asked between looks; ends the iteration.
        sleep: how to wait (tests give their own).

    Raises:
        InputError: it cannot be read.
        UsageError: it is compressed, so it does not grow line by line.
    """
    if path == STDIN:
        yield from iter(sys.stdin.buffer.readline, b"")
        return
    stream = _growing(path)
    identity = Path(path).stat().st_ino
    decoder: codecs.IncrementalDecoder | None = None
    tail = b""
    try:
        while True:
            at_start = stream.tell() == 0
            data = stream.read(CHUNK)
            if data:
                if at_start:
                    name = _encoding(data)
                    decoder = codecs.getincrementaldecoder(name)("replace") if name else None
                    data = data.removeprefix(codecs.BOM_UTF8)
                data = decoder.decode(data).encode("utf-8", "replace") if decoder else data
                *lines, tail = (tail + data).split(b"\n")
                yield from (line + b"\n" for line in lines)
                continue
            try:
                now = Path(path).stat()
                replaced, shorter = now.st_ino != identity, now.st_size < stream.tell()
            except FileNotFoundError:
                replaced = shorter = False
            if replaced or shorter:
                if tail:
                    yield tail + b"\n"
                    tail = b""
                stream.close()
                stream = _growing(path)
                identity = Path(path).stat().st_ino
                continue
            if stop():
                if tail:
                    yield tail
                return
            yield None
            sleep(poll_s)
    finally:
        stream.close()


def _growing(path: str) -> BinaryIO:
    stream = open_bytes(path)
    if not (isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO)):
        stream.close()
        raise UsageError(f"--follow: expected a plain file that grows, {path} is compressed; read it without --follow")
    return stream
