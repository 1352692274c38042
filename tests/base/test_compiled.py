"""Compiled loops: numba's own cache saves time, and whatever is wrong with it costs time only."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SOURCE = '''
from hicache_lab.base.compiled import loop, part

@part
def above(value, start):
    return value > start

@loop
def fill(values, start, out):
    """Sum and count of what is above ``start``; the values themselves go to ``out``."""
    total, count = 0, 0
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            if above(values[row, column], start):
                out[count] = values[row, column]
                total += int(values[row, column])
                count += 1
    return total, count
'''
RUN = """
import numpy as np
from loops_of_a_test import fill
out = np.zeros(6)
print(fill(np.array([[1, 20, 3], [40, 5, 60]], np.int16), 4, out), out.tolist())
"""
EXPECTED = "(125, 4) [20.0, 40.0, 5.0, 60.0, 0.0, 0.0]"


def run(folder: Path, before: str = "", path: Path | None = None, **variables: str) -> tuple[str, bool]:
    """What a process of its own prints, and whether it compiled."""
    home = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([home, str(path or folder)]),
        "NUMBA_CACHE_DIR": str(folder / "cache"),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", before + RUN], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.strip(), "compiling hot loops" in done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "loops_of_a_test.py").write_text(SOURCE)
    return tmp_path


def cached(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.nb?"))


def test_the_first_process_compiles_and_says_so_and_the_next_loads(folder: Path) -> None:
    assert run(folder) == (EXPECTED, True)
    assert [file.suffix for file in cached(folder)] == [".nbc", ".nbi"], "an entry is cached, its parts within it"
    assert run(folder) == (EXPECTED, False)


def test_another_text_is_compiled_again(folder: Path) -> None:
    run(folder)
    (folder / "loops_of_a_test.py").write_text(SOURCE.replace("count += 1", "count += 2 - 1 "))
    assert run(folder) == (EXPECTED, True)


def test_a_full_disk_costs_only_time(folder: Path) -> None:
    nothing = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); sys.dont_write_bytecode = True"
    for _ in range(2):
        assert run(folder, nothing) == (EXPECTED, True)


@pytest.mark.parametrize("suffix", [".nbc", ".nbi"])
@pytest.mark.parametrize("content", [b"", b"\x80\x05garbage", None])
def test_a_damaged_cache_costs_only_time(folder: Path, suffix: str, content: bytes | None) -> None:
    run(folder)
    for file in cached(folder):
        if file.suffix == suffix:
            file.write_bytes(file.read_bytes()[:-20] if content is None else content)
    assert run(folder) == (EXPECTED, True)


def test_nowhere_to_write_costs_only_time(folder: Path) -> None:
    nowhere = (
        "import numba; njit = numba.njit\n"
        "def refuse(*args, cache=False, **options):\n"
        "    if cache: raise RuntimeError('cannot cache function: no locator available')\n"
        "    return njit(*args, **options)\n"
        "numba.njit = refuse\n"
    )
    assert run(folder, nowhere) == (EXPECTED, True)


def test_a_package_in_an_archive_is_compiled_too(folder: Path) -> None:
    archive = folder / "packed.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("loops_of_a_test.py", SOURCE)
    assert run(folder, path=archive)[0] == EXPECTED
