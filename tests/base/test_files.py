"""Whole files or none; streams unpacked by their first bytes, damage and bombs included."""

import bz2
import gzip
import io
import lzma
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_lab.base.files import atomic_write, open_decompressed

PACKERS = [bytes, gzip.compress, bz2.compress, lzma.compress, zstandard.compress]
PACKED = PACKERS[1:]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("größe\r\n", "größe\r\n".encode()),
        (b"\x00\xff", b"\x00\xff"),
        (lambda path: path.write_bytes(b"by a function"), b"by a function"),
    ],
)
def test_a_file_is_written_whole_and_nothing_else_is_left(
    tmp_path: Path, content: str | bytes | Callable[[Path], object], expected: bytes
) -> None:
    target = tmp_path / "result.json"
    target.write_text("before")
    atomic_write(target, content)
    assert target.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [target]


def test_what_was_there_stays_when_the_writer_fails(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("before")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        atomic_write(target, fail)
    assert target.read_text() == "before" and list(tmp_path.iterdir()) == [target]


def test_a_link_stays_a_link_and_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "link"
    target.symlink_to(tmp_path / "elsewhere" / "file")
    before = os.umask(0o027)
    try:
        atomic_write(target, "text")
    finally:
        os.umask(before)
    assert target.is_symlink() and target.read_text() == "text"
    assert target.stat().st_mode & 0o777 == 0o640


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PACKERS), st.lists(st.binary(max_size=3000), min_size=1, max_size=4), st.integers(1, 5000))
def test_every_form_gives_its_bytes_also_in_several_members(
    tmp_path: Path, pack: Callable[[bytes], bytes], parts: list[bytes], size: int
) -> None:
    path = tmp_path / "data"
    data = b"".join(parts)
    path.write_bytes(b"".join(map(pack, parts)) if pack is not bytes else b"plain " + data)
    with open_decompressed(path) as stream:
        pieces = list(iter(lambda: stream.read(size), b""))
    assert b"".join(pieces) == (data if pack is not bytes else b"plain " + data)
    assert all(len(piece) <= size for piece in pieces)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.sampled_from(PACKED), st.data())
def test_a_stream_that_ends_early_is_an_error_after_what_came_before_it(
    tmp_path: Path, pack: Callable[[bytes], bytes], data: st.DataObject
) -> None:
    content = random.Random(1).randbytes(3000) + bytes(100_000)
    packed = pack(content)
    path = tmp_path / "cut"
    path.write_bytes(packed[: data.draw(st.integers(6, len(packed) - 1))])
    read = bytearray()
    with open_decompressed(path) as stream, pytest.raises((EOFError, OSError)):
        while piece := stream.read1(700):
            read += piece
    assert content.startswith(read)


@pytest.mark.parametrize(
    "pack", [*PACKED[:3], zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress]
)
def test_damage_is_an_oserror_after_what_came_before_it(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    content = random.Random(1).randbytes(2_000_000)
    packed = bytearray(pack(content))
    packed[len(packed) // 2 : len(packed) // 2 + 1000] = bytes(1000)
    (tmp_path / "data").write_bytes(packed)
    read = bytearray()
    with open_decompressed(tmp_path / "data") as stream, pytest.raises((OSError, EOFError)):
        while piece := stream.read1(1 << 20):
            read += piece
    assert len(read) >= len(content) // 4


def test_a_skippable_frame_and_two_frames_are_one_stream(tmp_path: Path) -> None:
    skippable = bytes.fromhex("502a4d18") + (5).to_bytes(4, "little") + b"index"
    path = tmp_path / "seekable.zst"
    path.write_bytes(zstandard.compress(b"one ") + skippable + zstandard.compress(b"two") + skippable)
    with open_decompressed(path) as stream:
        assert stream.read() == b"one two"


def test_a_stream_that_was_handed_in_stays_open() -> None:
    raw = io.BufferedReader(io.BytesIO(gzip.compress(b"text")))  # type: ignore[arg-type]
    with open_decompressed(raw) as stream:
        assert stream.read() == b"text"
    assert not raw.closed


def test_a_bomb_is_unpacked_no_further_than_it_is_read(tmp_path: Path) -> None:
    """20 GB of zeros in a file of 650 kB, read for a moment in a process that may take 1 GB."""
    path = tmp_path / "bomb.zst"
    codec = zstandard.ZstdCompressor(level=3).compressobj()
    block = bytes(1 << 26)
    with path.open("wb") as out:
        for _ in range(8):
            out.write(codec.compress(block))
        out.write(codec.flush())
    path.write_bytes(path.read_bytes() * 40)
    program = (
        "import sys, resource\nfrom pathlib import Path\nfrom hicache_lab.base.files import open_decompressed\n"
        "stream = open_decompressed(Path(sys.argv[1]))\n"
        "assert all(len(stream.read(1 << 20)) == 1 << 20 for _ in range(20))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
    )
    assert int(done.stdout) < 300_000
