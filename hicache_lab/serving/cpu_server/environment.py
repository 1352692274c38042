"""The server's own virtual environment: pinned, installed atomically, found again by its pins' hash; and its models."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.base.resources import data_dir
from hicache_lab.base.units import GB, format_gb
from hicache_lab.serving.cpu_server.home import built_aside, home, made
from hicache_lab.sizing.tiny_models import TINY_MODELS, tiny_config

RELEASES = ("0.5.10", "0.5.23")
DISK_NEEDED_BYTES = 4 * GB  # 1.7 GB installed, and as much again while wheels are unpacked
_PYTHONS = ((3, 11), (3, 12))  # the pins have wheels for these; 3.11 is the one that is tested
_MARKER = "complete.json"


@dataclass(frozen=True)
class Environment:
    """An installed release.

    Attributes:
        release: SGLang release, e.g. ``"0.5.23"``.
        path: the virtual environment.
        content_hash: SHA-256 (first 12 digits) of the pins and the interpreter's version.
        python_version: e.g. ``"3.11.7"``.
        torch_version: e.g. ``"2.13.0+cpu"``.
        install_seconds: wall time the installation took.
    """

    release: str
    path: Path
    content_hash: str
    python_version: str
    torch_version: str
    install_seconds: float

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.path / "bin" / "python"


def requirements(release: str) -> tuple[str, ...]:
    """The pins of a release, as ``name==version`` strings.

    Raises:
        UsageError: the release is not one that is known to run on a CPU-only machine.
    """
    if release not in RELEASES:
        raise UsageError(
            f"--release: expected one of {', '.join(RELEASES)} (they run without a GPU), got {release!r}; "
            f"to measure another release, point base_url at a server that already runs it"
        )
    lines = (data_dir() / "cpu_server" / f"requirements-{release}.txt").read_text().splitlines()
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def installed(release: str, *, home_dir: Path | None = None, python: str | None = None) -> Environment | None:
    """The complete environment of a release, or None; ``python`` as for ``install``."""
    return _read(_target(release, _interpreter(python), home(home_dir)))


def install(
    release: str,
    *,
    home_dir: Path | None = None,
    python: str | None = None,
    index_arguments: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _line: None,
) -> Environment:
    """Install a release into its own environment; instant when the same pins are already there.

    Args:
        release: one of ``RELEASES``.
        home_dir: overrides the folder of the CPU server.
        python: the interpreter to build on; default the running one, or a python3.11 found on PATH.
        index_arguments: extra words for ``pip install`` such as ``--extra-index-url URL``.
        progress: receives a line for every step and every line pip prints.

    Returns:
        The environment, complete.

    Raises:
        UsageError: unknown release or unfit interpreter.
        HostError: pip failed, or the disk is too full; nothing half-installed is left.
    """
    if sys.platform != "linux":
        raise HostError(f"the CPU server needs Linux, this is {sys.platform}; measure a server elsewhere with base_url")
    base = _interpreter(python)
    root = home(home_dir)
    target = _target(release, base, root)
    if (existing := _read(target)) is not None:
        return existing
    if target.exists():  # no marker: not made by a rename of ours, so not to be trusted
        shutil.rmtree(target)
    made(root)
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < DISK_NEEDED_BYTES:
        raise HostError(
            f"server install: {format_gb(free_bytes)} free in {root}, {format_gb(DISK_NEEDED_BYTES)} needed: "
            f"make room or choose another folder with --home"
        )
    started = time.monotonic()
    with built_aside(target) as aside:
        log = root / "cpu_server" / f"install-{release}.log"
        with log.open("w") as log_file:
            step = _Steps(log_file.write, progress)
            step.run("virtual environment", [base, "-m", "venv", str(aside)])
            _install_packages(step, aside, release, index_arguments)
            versions = step.run("check", [str(aside / "bin/python"), "-c", _VERSIONS]).splitlines()[-1].split()
        record = Environment(
            release,
            target,
            _content_hash(release, base),
            versions[0],
            versions[1],
            time.monotonic() - started,
        )
        (aside / _MARKER).write_text(json.dumps({**asdict(record), "path": target.name}, indent=1))
    done = _read(target)
    if done is None:
        raise HostError(f"server install: {target} was not complete after its installation; run it again")
    return done


def make_models(environment: Environment, *, home_dir: Path | None = None) -> Path:
    """The folder that holds both tiny models, made on first use with the environment's own libraries.

    Raises:
        HostError: the environment's interpreter could not write them.
    """
    script = data_dir() / "cpu_server" / "tiny_weights.py"
    configs = {name: tiny_config(name) for name in TINY_MODELS}
    recipe = json.dumps(configs, sort_keys=True) + script.read_text()
    target = home(home_dir) / "cpu_server" / "models" / hashlib.sha256(recipe.encode()).hexdigest()[:12]
    if target.is_dir():
        return target
    with built_aside(target) as aside:
        for name, config in configs.items():
            folder = aside / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config, indent=1))
            done = subprocess.run(
                [str(environment.python), "-I", str(script), str(folder)],
                capture_output=True,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                check=False,
            )
            if done.returncode != 0:
                tail = "\n  ".join(done.stderr.splitlines()[-6:])
                raise HostError(f"server: could not make the tiny model {name} (exit {done.returncode}):\n  {tail}")
    return target


_VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"


def _install_packages(step: _Steps, path: Path, release: str, index_arguments: Sequence[str]) -> None:
    pins = requirements(release)
    pip = [str(path / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pip += ["--progress-bar", "off", *index_arguments]
    constraints = path / "pins.txt"
    constraints.write_text("\n".join(pins) + "\n")
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    # torch brings its own dependencies: which those are differs between a CPU wheel and the public CUDA one
    step.run("torch", [*pip, "--constraint", str(constraints), torch])
    step.run(f"SGLang {release} and {len(pins) - 2} pinned packages", [*pip, "--no-deps", "-r", str(constraints)])


class _Steps:
    """Runs the installation's commands; every line goes to the log file and to the caller."""

    def __init__(self, write: Callable[[str], object], progress: Callable[[str], None]) -> None:
        self._write, self._progress = write, progress

    def run(self, title: str, command: Sequence[str]) -> str:
        """Run one command; returns what it printed.

        Raises:
            HostError: it failed; the message ends with its last lines.
        """
        self._progress(f"# {title}")
        environ = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
        lines: list[str] = []
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ,
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    lines.append(line.rstrip())
                    self._write(line)
                    self._progress(line.rstrip())
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            tail = "\n  ".join(lines[-12:])
            raise HostError(f"server install: step {title!r} failed (exit {process.returncode}):\n  {tail}")
        return "\n".join(lines)


def _target(release: str, base: str, root: Path) -> Path:
    return root / "cpu_server" / "envs" / f"sglang-{release}-{_content_hash(release, base)}"


def _content_hash(release: str, base: str) -> str:
    version = ".".join(map(str, _version_of(base)))
    return hashlib.sha256("\n".join((version, *requirements(release))).encode()).hexdigest()[:12]


def _read(target: Path) -> Environment | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        record = json.loads((target / _MARKER).read_text())
        return Environment(**{**record, "path": target})
    return None


def _version_of(python: str) -> tuple[int, int]:
    if python == sys.executable:
        return sys.version_info[0], sys.version_info[1]
    try:
        out = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "strerror", None) or f"exit {getattr(error, 'returncode', '?')}"
        raise UsageError(f"--python: {python!r} does not run as a Python interpreter ({reason})") from error
    return int(out[0]), int(out[1])


def _interpreter(python: str | None) -> str:
    """The interpreter the environment is built on: the given one, the running one if fit, or one on PATH."""
    fit = " or ".join(f"{a}.{b}" for a, b in _PYTHONS)
    if python is not None:
        version = _version_of(python)
        if version not in _PYTHONS:
            raise UsageError(f"--python: expected Python {fit} (the pins' wheels), got {version[0]}.{version[1]}")
        return python
    if sys.version_info[:2] in _PYTHONS:
        return sys.executable
    for name in (f"python{a}.{b}" for a, b in _PYTHONS):
        if (path := shutil.which(name)) is not None:
            return path
    raise UsageError(f"--python: the pinned releases need Python {fit}, and none is on PATH; name one with --python")
