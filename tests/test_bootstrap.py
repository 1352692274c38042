"""make's first step says plainly what is missing, and does nothing the second time."""

import importlib.util
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", str(tmp_path / ".venv"))
    return module


def pip_that_says(monkeypatch: pytest.MonkeyPatch, bootstrap: ModuleType, text: str, code: int) -> list[list[str]]:
    """Replace pip by a process that prints ``text``; returns the commands it was asked to run."""
    calls: list[list[str]] = []
    real = subprocess.Popen

    def popen(command: list[str], **kwargs: object) -> object:
        calls.append(command)
        talk = f"import sys; print({text!r}); sys.exit({code})"
        return real([sys.executable, "-c", talk], **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(bootstrap.subprocess, "Popen", popen)
    monkeypatch.setattr(bootstrap, "make_venv", lambda: Path(bootstrap.VENV).mkdir(exist_ok=True))
    return calls


def test_an_old_python_is_refused_by_name(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 2))
    assert bootstrap.main("lab") == 1
    assert "this is Python 3.9" in capsys.readouterr().err


def test_a_full_disk_is_said_before_anything_is_made(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda _: usage(10**11, 10**11, 3 * 10**8))
    assert bootstrap.main("dev") == 1
    assert "0.3 GB free" in capsys.readouterr().err
    assert not Path(bootstrap.VENV).exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ERROR: OSError: [Errno 28] No space left on device", "the disk is full"),
        ("NewConnectionError: Temporary failure in name resolution", "package index cannot be reached"),
        ("ERROR: no version satisfies the requirement numba (from versions: none)", "cannot be reached"),
        ("ERROR: Could not build wheels for x", "pip could not install the packages"),
    ],
)  # fmt: skip
def test_pips_failures_are_explained(
    bootstrap: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    message: str,
) -> None:
    pip_that_says(monkeypatch, bootstrap, text, 1)
    assert bootstrap.main("lab") == 1
    assert message in capsys.readouterr().err
    assert text in (Path(bootstrap.VENV) / "install.log").read_text()


def test_the_second_run_installs_nothing_and_dev_holds_lab(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pip_that_says(monkeypatch, bootstrap, "Installing collected packages: a, b", 0)
    assert bootstrap.main("lab") == 0
    assert bootstrap.main("lab") == 0
    assert len(calls) == 1
    assert "--constraint" in calls[0]
    assert bootstrap.main("dev") == 0
    assert bootstrap.main("lab") == 0
    assert len(calls) == 2
    monkeypatch.setattr(bootstrap, "ROOT", str(Path(bootstrap.VENV).parent))
    assert bootstrap.main("lab") == 0, "a moved checkout is linked anew"
    assert len(calls) == 3


def test_the_script_is_readable_by_the_python_it_refuses() -> None:
    import ast

    ast.parse(SCRIPT.read_text(), feature_version=(3, 5))
