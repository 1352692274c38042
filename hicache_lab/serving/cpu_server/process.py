"""Start, watch and stop the CPU server: one process group per name, found again through a state file."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hicache_lab.base.errors import UsageError
from hicache_lab.base.files import atomic_write
from hicache_lab.host.processes import TERM_SECONDS, ProcessId, end_group
from hicache_lab.serving.cpu_server.environment import Environment, install, make_models
from hicache_lab.serving.cpu_server.home import home, made
from hicache_lab.serving.cpu_server.spec import Launch, checked_name
from hicache_lab.serving.local import HOST, Progress, free_port, spawn, wait_until_ready
from hicache_lab.sizing.tiny_models import TINY_MODELS

READY_TIMEOUT_SECONDS = 420.0


@dataclass(frozen=True)
class Server:
    """A started server, as its state file remembers it.

    Attributes:
        name, release, model, tp_size, port: what was asked for.
        pid: the launcher, which leads a process group of its own.
        start_ticks: the launcher's start in clock ticks since boot, and
        boot_id: that boot; together they keep a recycled pid from being taken for ours.
        command: the command line, without the interpreter.
        log_path: everything it printed.
        ready_seconds: from start until /health answered 200.
    """

    name: str
    release: str
    model: str
    tp_size: int
    port: int
    pid: int
    start_ticks: int
    boot_id: str
    command: tuple[str, ...]
    log_path: Path
    started_unix_s: float
    ready_seconds: float | None = None

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the launcher itself still runs (a recycled pid does not count)."""
        return self.process.alive

    @property
    def process(self) -> ProcessId:
        """The launcher."""
        return ProcessId(self.pid, self.start_ticks, self.boot_id)

    def log(self) -> str:
        """What it has printed so far; not trusted text."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""


@dataclass(frozen=True)
class Stopped:
    """How a server ended: ``"gone"`` (it was not running), ``"TERM"`` or ``"KILL"``."""

    server: Server
    how: str
    seconds: float


def start(
    launch: Launch,
    *,
    home_dir: Path | None = None,
    environment: Environment | None = None,
    timeout_seconds: float = READY_TIMEOUT_SECONDS,
    progress: Progress = lambda _seconds, _line: None,
) -> Server:
    """Start a server and wait until /health answers 200.

    Args:
        launch: what to start.
        home_dir: overrides the folder of the CPU server.
        environment: an installed release; default: installed on first use.
        timeout_seconds: give up (and stop it) after this long.
        progress: called about once a second with the seconds so far and the last line of the log.

    Returns:
        The running server; it outlives this process until ``stop``.

    Raises:
        UsageError: the name or the port is taken.
        ServerError: it ended or hung before it was ready; the message holds SGLang's own reason.
    """
    environment = environment or install(launch.release, home_dir=home_dir)
    folder = _folder(launch.name, home_dir)
    with _locked(folder):
        previous = _read_state(folder)
        if previous is not None and previous.alive:
            raise UsageError(
                f"--name {launch.name}: already runs SGLang {previous.release} at {previous.base_url} "
                f"(pid {previous.pid}); stop it or choose another --name"
            )
        models = make_models(environment, home_dir=home_dir)
        server = _spawn(launch, environment, folder, models)
        try:
            ready = wait_until_ready(
                server.port,
                name=f"SGLang {server.release} on port {server.port}",
                alive=lambda: server.alive,
                log_path=server.log_path,
                timeout_seconds=timeout_seconds,
                progress=progress,
            )
        except BaseException:
            _end(server)
            (folder / "state.json").unlink(missing_ok=True)
            raise
        server = replace(server, ready_seconds=ready)
        _write_state(folder, server)
        return server


def status(*, home_dir: Path | None = None) -> tuple[Server, ...]:
    """All servers that run now, oldest first."""
    servers = [_read_state(folder) for folder in sorted(_root(home_dir).glob("*/"))]
    return tuple(sorted((s for s in servers if s and s.alive), key=lambda s: s.started_unix_s))


def stop(name: str = "default", *, home_dir: Path | None = None, term_seconds: float = TERM_SECONDS) -> Stopped:
    """Stop a server: TERM to its process group, KILL to what is left after ``term_seconds``.

    Raises:
        UsageError: no server of this name was ever started.
    """
    folder = _folder(name, home_dir)
    server = _read_state(folder)
    if server is None:
        known = ", ".join(s.name for s in status(home_dir=home_dir)) or "none"
        raise UsageError(f"--name: no server {name!r} was started here (running: {known})")
    began = time.monotonic()
    how = _end(server, term_seconds)
    (folder / "state.json").unlink(missing_ok=True)
    return Stopped(server, how, time.monotonic() - began)


def logs(name: str = "default", *, home_dir: Path | None = None) -> Path:
    """The log of the newest server of this name, running or not.

    Raises:
        UsageError: there is none.
    """
    path = _folder(name, home_dir, make=False) / "server.log"
    if not path.exists():
        raise UsageError(f"--name: server {name!r} has no log here")
    return path


def _spawn(launch: Launch, environment: Environment, folder: Path, models: Path) -> Server:
    port = free_port() if launch.port is None else _checked_port(launch.port)
    model = launch.model
    if model not in TINY_MODELS:
        path = Path(model).expanduser().absolute()
        if not (path / "config.json").is_file():
            tiny = ", ".join(TINY_MODELS)
            raise UsageError(f"--model: expected {tiny} or a folder with a config.json, got {launch.model!r}")
        model = str(path)
    place = ("--model-path", model, "--host", HOST, "--port", str(port), "--tp-size", str(launch.tp_size))
    command = ("-m", "sglang.launch_server", *place, *launch.sglang_flags)
    log_path = folder / "server.log"
    # a relative model path keeps this machine's folders out of logs and replies
    process = spawn([str(environment.python), *command], log_path, environ=launch.environ(), folder=models)
    _children[process.pid] = process
    started = ProcessId.of(process.pid)
    server = Server(
        name=launch.name,
        release=launch.release,
        model=launch.model,
        tp_size=launch.tp_size,
        port=port,
        **asdict(started),
        command=command,
        log_path=log_path,
        started_unix_s=time.time(),
    )
    _write_state(folder, server)
    return server


# started by this process: kept so that they are reaped when they end
_children: dict[int, subprocess.Popen[bytes]] = {}


def _end(server: Server, term_seconds: float = TERM_SECONDS) -> str:
    # 0.5.10 can loop in "Gracefully exiting" for ever: then it is killed
    how = end_group(server.process, term_seconds)
    if (child := _children.pop(server.pid, None)) is not None:
        child.poll()  # a launcher that nobody waits for stays a zombie
    return how


def _checked_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(f"--port {port}: already in use on {HOST}; choose another or leave it out") from error
    return port


def _root(home_dir: Path | None) -> Path:
    return home(home_dir) / "cpu_server" / "servers"


def _folder(name: str, home_dir: Path | None, *, make: bool = True) -> Path:
    folder = _root(home_dir) / checked_name(name)
    return made(folder) if make else folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"--name {folder.name}: another start of this name is under way") from error
        yield


def _write_state(folder: Path, server: Server) -> None:
    text = json.dumps({**asdict(server), "log_path": server.log_path.name}, indent=1)
    atomic_write(folder / "state.json", text)


def _read_state(folder: Path) -> Server | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        record = json.loads((folder / "state.json").read_text())
        record |= {"command": tuple(record["command"]), "log_path": folder / record["log_path"]}
        return Server(**record)
    return None
