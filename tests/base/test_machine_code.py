"""Loops that run without numba: the same results, kept on disk, and nothing trusted that is damaged."""

import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from hicache_lab.base import machine_code
from hicache_lab.base.machine_code import Loaded, Signature

loop_of = machine_code.loop_of.__wrapped__  # every call looks at the disk

SOURCE = '''
from hicache_lab.base.compiled import loop

@loop()
def fill(values, start, out):
    """Sum and count of what is above ``start``; the values themselves go to ``out``."""
    total, count = 0, 0
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            if values[row, column] > start:
                out[count] = values[row, column]
                total += int(values[row, column])
                count += 1
    return total, count
'''
FILL = Signature((("int16", 2), ("int64", 0), ("float64", 1)), results=2)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "loops_of_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.delitem(sys.modules, "loops_of_a_test", raising=False)
    return "loops_of_a_test"


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept").glob("*.o"))


def run(function) -> tuple[tuple[int, ...], list[float]]:
    out = np.zeros(6)
    values = np.array([[1, 20, 3], [40, 5, 60]], np.int16)
    return tuple(function(values, 4, out)), out.tolist()


EXPECTED = ((125, 4), [20.0, 40.0, 5.0, 60.0, 0.0, 0.0])


def test_the_first_use_compiles_and_keeps_and_the_next_loads(module: str, tmp_path: Path) -> None:
    first = loop_of(module, "fill", FILL)
    (file,) = kept(tmp_path)
    before = file.read_bytes()
    second = loop_of(module, "fill", FILL)
    assert isinstance(first, Loaded) and isinstance(second, Loaded)
    assert run(first) == run(second) == EXPECTED
    assert kept(tmp_path) == [file] and file.read_bytes() == before


def test_a_later_process_needs_no_numba(module: str, tmp_path: Path) -> None:
    loop_of(module, "fill", FILL)
    words = (
        "import sys, numpy as np; from hicache_lab.base.machine_code import Signature, loop_of;"
        f"loop = loop_of({module!r}, 'fill', {FILL!r});"
        "print(loop(np.array([[7]], np.int16), 4, np.zeros(1)), 'numba' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, check=True, env=_environment(tmp_path)
    )
    assert done.stdout.split() == ["(7,", "1)", "False"]
    assert "compiling" not in done.stderr


def _environment(tmp_path: Path) -> dict[str, str]:
    import os

    home = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{tmp_path}", "NUMBA_CACHE_DIR": str(tmp_path / "kept")}


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:200] + b"\x90" + b[201:], lambda _: b"", lambda b: b * 2]
)
def test_a_damaged_file_is_made_again(module: str, tmp_path: Path, damage) -> None:
    loop_of(module, "fill", FILL)
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert machine_code._read(file) is None
    assert run(loop_of(module, "fill", FILL)) == EXPECTED
    assert machine_code._read(file) is not None


def test_another_text_is_another_file(module: str, tmp_path: Path) -> None:
    loop_of(module, "fill", FILL)
    (tmp_path / "loops_of_a_test.py").write_text(SOURCE.replace("count += 1", "count += 2"))
    sys.modules.pop(module)
    assert run(loop_of(module, "fill", FILL))[0] == (125, 8)
    assert len(kept(tmp_path)) == 2


def test_a_folder_that_cannot_be_written_costs_only_time(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(machine_code, "_folders", lambda _: [tmp_path / "file" / "inside"])
    assert run(loop_of(module, "fill", FILL)) == EXPECTED


def test_a_user_without_a_home_has_the_folder_beside_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a number without an account
    (folder,) = machine_code._folders("hicache_lab.base.compiled")
    assert folder == Path(machine_code.__file__).parent / "__pycache__"


@pytest.mark.parametrize("failing", ["locator", "writing", "damage"])
def test_numba_s_own_cache_costs_only_time(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    from numba.core import caching

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if failing == "locator":
        monkeypatch.setattr(caching.FunctionCache._impl_class, "_locator_classes", [])
    elif failing == "writing":
        monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", full)
    else:
        assert run(import_module(module).fill) == EXPECTED
        for file in (tmp_path / "kept").rglob("*.nb?"):
            file.write_bytes(file.read_bytes()[:-20])
        sys.modules.pop(module)
    assert run(import_module(module).fill) == EXPECTED
    written = sorted(file.suffix for file in (tmp_path / "kept").rglob("*.nb?"))
    assert written == ([".nbc", ".nbi"] if failing == "damage" else [])


def test_a_package_in_an_archive_is_compiled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("packed_loops_of_a_test.py", SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path / "packed.zip"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    assert run(loop_of("packed_loops_of_a_test", "fill", FILL)) == EXPECTED
    assert len(kept(tmp_path)) == 1


def test_another_calling_convention_is_left_to_numba(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Signature, "native", property(lambda self: [True] * 9))
    loop = loop_of(module, "fill", FILL)
    assert not isinstance(loop, Loaded) and run(loop) == EXPECTED
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.zeros((2, 2), np.int32), 1, np.zeros(4)), "int16 array of 2 dimensions"),
        ((np.zeros(4, np.int16), 1, np.zeros(4)), "int16 array of 2 dimensions"),
        ((np.zeros((4, 4), np.int16)[:, ::2], 1, np.zeros(4)), "contiguous int16"),
        ((np.zeros((2, 2), np.int16), 1), "expected 3 arguments, got 2"),
        (([[1]], 1, np.zeros(4)), "int16 array"),
    ],
)
def test_nothing_of_another_shape_reaches_the_code(module: str, arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        loop_of(module, "fill", FILL)(*arguments)


def test_one_process_loads_a_loop_once(module: str) -> None:
    assert machine_code.loop_of(module, "fill", FILL) is machine_code.loop_of(module, "fill", FILL)
    machine_code.loop_of.cache_clear()


def test_an_unknown_loop_is_named() -> None:
    with pytest.raises(ImportError, match="no_such_module is not installed"):
        loop_of("no_such_module", "fill", FILL)
