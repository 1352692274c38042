"""Start, watch and stop the CPU server: one process group per named server, found again through a state file."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from hicache_lab.cpuserver.environment import Environment, install
from hicache_lab.cpuserver.home import home
from hicache_lab.cpuserver.tinymodels import TINY_MODELS, make_models
from hicache_lab.errors import HostError, ServerError, UsageError
from hicache_lab.units import GIB

HOST = "127.0.0.1"
READY_TIMEOUT_SECONDS = 420.0
TERM_SECONDS = 15.0
KILL_SECONDS = 10.0
_STANDINS = Path(__file__).with_name("standins")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# what an unmodified SGLang needs to run without a GPU
_CPU_FLAGS = (
    ("--device", "cpu"),
    ("--attention-backend", "torch_native"),
    ("--sampling-backend", "pytorch"),
    ("--grammar-backend", "none"),
    ("--disable-overlap-schedule",),
)
# a small server that shows its tiers; each gives way to the same flag from the user
_DEFAULT_FLAGS = (
    ("--context-length", "4096"),
    ("--max-total-tokens", "2048"),
    ("--decode-log-interval", "10"),
    ("--enable-metrics",),
    ("--enable-cache-report",),
)
_HICACHE_FLAGS = (("--enable-hierarchical-cache",), ("--hicache-ratio", "4"))
_SIZE_FLAGS = frozenset({"--hicache-ratio", "--hicache-size"})
# flags that this module decides, with what to use instead
_RESERVED = {
    "--host": "the server listens on loopback only",
    "--port": "use --port before the double dash",
    "--model": "use --model before the double dash",
    "--model-path": "use --model before the double dash",
    "--tp": "use --tp-size before the double dash",
    "--tp-size": "use --tp-size before the double dash",
    "--tensor-parallel-size": "use --tp-size before the double dash",
    "--nnodes": "this is one machine",
    "--dist-init-addr": "this is one machine",
    "--api-key": "the server is reachable from this machine only, and SGLang would write the key into its log",
    "--admin-api-key": "the server is reachable from this machine only, and SGLang would write the key into its log",
    "--config": "give the flags themselves, so that the run records them",
} | {flag[0]: "a machine without a GPU needs this setting" for flag in _CPU_FLAGS}


@dataclass(frozen=True)
class Launch:
    """What to start.

    Attributes:
        release: one of ``RELEASES``.
        model: a tiny model's name, or the path of a model folder.
        tp_size: tensor-parallel ranks, one core each.
        flags: SGLang's own flags, passed through as typed.
        hicache: with ``--enable-hierarchical-cache --hicache-ratio 4`` unless ``flags`` say otherwise.
        port: None picks a free one.
        name: the server's name in the state folder.
        resident: make host pages resident as pinning would (fills real memory).
        floor_bytes: ``resident`` stops before less than this stays available.
        copies: False is the negative control: host↔device copies do nothing.
    """

    release: str
    model: str = "tiny-llama"
    tp_size: int = 1
    flags: tuple[str, ...] = ()
    hicache: bool = True
    port: int | None = None
    name: str = "default"
    resident: bool = False
    floor_bytes: int = 4 * GIB
    copies: bool = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"--name: expected letters, digits, '.', '_' or '-', got {self.name!r}")
        cores = os.cpu_count() or 1
        if not 1 <= self.tp_size <= cores:
            raise UsageError(f"--tp-size: expected 1 to {cores} (one core a rank), got {self.tp_size}")
        if self.port is not None and not 1024 <= self.port <= 65535:
            raise UsageError(f"--port: expected 1024 to 65535, got {self.port}")
        for word in self.flags:
            flag = word.partition("=")[0]
            if flag in _RESERVED:
                raise UsageError(f"{flag}: not passed through: {_RESERVED[flag]}")

    @property
    def sglang_flags(self) -> tuple[str, ...]:
        """The complete flags, without model, ranks and port; a flag of the user replaces our default of that name."""
        given = {word.partition("=")[0] for word in self.flags if word.startswith("--")}
        if given & _SIZE_FLAGS:
            given |= _SIZE_FLAGS
        defaults = _DEFAULT_FLAGS + (_HICACHE_FLAGS if self.hicache else ())
        words = [word for flag in _CPU_FLAGS for word in flag]
        words += [word for flag in defaults if flag[0] not in given for word in flag]
        return (*words, *self.flags)

    def environ(self) -> dict[str, str]:
        """The server's environment variables."""
        drop = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_CPU_OMP_THREADS_BIND"}
        environ = {name: value for name, value in os.environ.items() if name not in drop}
        environ |= {
            "PYTHONPATH": str(_STANDINS),
            "PYTHONUNBUFFERED": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HICACHE_LAB_RESIDENT": "1" if self.resident else "0",
            "HICACHE_LAB_FLOOR_BYTES": str(self.floor_bytes),
            "HICACHE_LAB_NO_COPY": "0" if self.copies else "1",
        }
        if self.tp_size > 1:  # one core a rank; SGLang refuses the variable for a single rank
            environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(self.tp_size)))
        return environ


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
    ready_seconds: float | None = field(default=None)

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the launcher itself still runs (a recycled pid does not count)."""
        return _start_ticks(self.pid) == self.start_ticks and _boot_id() == self.boot_id

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
    progress: Callable[[float, str], None] = lambda seconds, line: None,
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
            ready = _wait_until_ready(server, timeout_seconds, progress)
        except BaseException:
            _end(server)
            (folder / "state.json").unlink(missing_ok=True)
            raise
        server = Server(**{**_plain(server), "ready_seconds": ready})
        _write_state(folder, server)
        return server


def status(*, home_dir: Path | None = None) -> tuple[Server, ...]:
    """All servers that run now, oldest first."""
    found = [_read_state(folder) for folder in sorted(_root(home_dir).glob("*/"))]
    return tuple(sorted((s for s in found if s and s.alive), key=lambda s: s.started_unix_s))


def stop(
    name: str = "default", *, home_dir: Path | None = None, term_seconds: float = TERM_SECONDS
) -> Stopped:
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
    port = _free_port() if launch.port is None else _checked_port(launch.port)
    model = launch.model
    if model not in TINY_MODELS:
        path = Path(model).expanduser().absolute()
        if not (path / "config.json").is_file():
            tiny = ", ".join(TINY_MODELS)
            raise UsageError(f"--model: expected {tiny} or a folder with a config.json, got {launch.model!r}")
        model = str(path)
    command = ("-m", "sglang.launch_server", "--model-path", model, "--host", HOST, "--port", str(port))
    command += ("--tp-size", str(launch.tp_size), *launch.sglang_flags)
    log_path = folder / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [str(environment.python), *command],
            cwd=models,  # a relative model path keeps this machine's folders out of logs and replies
            env=launch.environ(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children[process.pid] = process
    server = Server(
        launch.name,
        launch.release,
        launch.model,
        launch.tp_size,
        port,
        process.pid,
        _start_ticks(process.pid) or 0,
        _boot_id(),
        command,
        log_path,
        time.time(),
    )
    _write_state(folder, server)
    return server


# started by this process: kept so that they are reaped when they end
_children: dict[int, subprocess.Popen[bytes]] = {}


def _wait_until_ready(
    server: Server, timeout_seconds: float, progress: Callable[[float, str], None]
) -> float:
    began = time.monotonic()
    while True:
        seconds = time.monotonic() - began
        lines = server.log().splitlines()
        if not server.alive:
            raise ServerError(
                _why_it_ended(server, lines, f"ended after {seconds:.0f} s, before it was ready")
            )
        if seconds > timeout_seconds:
            raise ServerError(_why_it_ended(server, lines, f"was not ready after {timeout_seconds:.0f} s"))
        if health(server.port) == http.client.OK:
            return time.monotonic() - began
        progress(seconds, next((line for line in reversed(lines) if line.startswith("[")), ""))
        time.sleep(0.5)


def health(port: int, timeout_seconds: float = 10.0) -> int | None:
    """The status code of /health on a local port, or None if nothing answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_seconds)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


_REASON = re.compile(
    r"^(?:\[[^]]*\] )?[\w.]*(?:Error|Exception|NeedsGpu): .+|^.*launch_server\.py: error: .+"
)


def _why_it_ended(server: Server, lines: Sequence[str], what: str) -> str:
    """SGLang's own reasons, each once, or the end of its log."""
    reasons = list(dict.fromkeys(line for line in lines if _REASON.match(line)))
    shown = reasons[-6:] or list(lines[-8:])
    text = "\n  ".join(line[:500] for line in shown)
    return f"SGLang {server.release} on port {server.port} {what}; its log says:\n  {text}\nwhole log: {server.log_path}"


def _end(server: Server, term_seconds: float = TERM_SECONDS) -> str:
    members = _members(server)
    if not members:
        return "gone"
    _signal_group(server, members, signal.SIGTERM)
    if _all_gone(server, members, term_seconds):
        return "TERM"
    # 0.5.10 can loop in "Gracefully exiting" for ever
    left = _members(server) or members
    _signal_group(server, left, signal.SIGKILL)
    if not _all_gone(server, left, KILL_SECONDS):
        raise HostError(
            f"server {server.name}: pid {server.pid} survived KILL (uninterruptible?); see ps -o pid,stat,wchan"
        )
    return "KILL"


def _members(server: Server) -> list[psutil.Process]:
    """Living processes of the server's own group; empty if the group is not ours any more."""
    if _boot_id() != server.boot_id:
        return []
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == server.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    leader = _start_ticks(server.pid)
    # a leader with another start time means that the number went to somebody else's group
    return found if leader in {None, server.start_ticks} else []


def _signal_group(server: Server, members: Sequence[psutil.Process], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if any(process.pid == server.pid for process in members):
            os.killpg(server.pid, number)
            return
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _all_gone(server: Server, members: Sequence[psutil.Process], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (child := _children.get(server.pid)) is not None and child.poll() is not None:
            del _children[server.pid]
        if not _members(server):
            return True
        psutil.wait_procs(members, timeout=0.2)
    return not _members(server)


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, or None if there is no such living process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _checked_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(
                f"--port {port}: already in use on {HOST}; choose another or leave it out"
            ) from error
    return port


def _root(home_dir: Path | None) -> Path:
    return home(home_dir) / "cpuserver" / "servers"


def _folder(name: str, home_dir: Path | None, *, make: bool = True) -> Path:
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name: expected letters, digits, '.', '_' or '-', got {name!r}")
    folder = _root(home_dir) / name
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"--name {folder.name}: another start of this name is under way") from error
        yield


def _plain(server: Server) -> dict[str, object]:
    return {**asdict(server), "command": server.command, "log_path": server.log_path}


def _write_state(folder: Path, server: Server) -> None:
    text = json.dumps({**asdict(server), "log_path": server.log_path.name}, indent=1)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".state-", delete=False) as file:
        file.write(text)
    Path(file.name).rename(folder / "state.json")


def _read_state(folder: Path) -> Server | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        record = json.loads((folder / "state.json").read_text())
        record |= {"command": tuple(record["command"]), "log_path": folder / record["log_path"]}
        return Server(**record)
    return None
