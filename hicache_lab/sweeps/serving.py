"""The servers of a sweep: one at a time, started on loopback, told apart from run to run, stopped whatever happens."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from hicache_lab.base.errors import HostError, ServerError
from hicache_lab.runs.recording import write_json
from hicache_lab.serving import cpu_server
from hicache_lab.serving.client import SglangClient
from hicache_lab.serving.cpu_server.process import health
from hicache_lab.serving.cpu_server.spec import HOST
from hicache_lab.serving.load.thread_loop import in_own_loop
from hicache_lab.sglang.launch import parse_launch
from hicache_lab.sweeps.plan import Point
from hicache_lab.sweeps.serverside import CpuServer, ExistingServer, LaunchLine, ServerSide, split_environment

SERVERS = "servers"
_STATE = "server.json"
_TERM_SECONDS, _KILL_SECONDS = 15.0, 10.0
_LOG_LINES = 12

Say = Callable[[str], None]


class ServerHost:
    """Gives each point the base URL of a server with its settings; use it as a context.

    Args:
        side: the grid's server side.
        folder: the sweep's folder; logs go into ``servers/``.
        say: told what is going on (starting, stopping).
    """

    def __init__(self, side: ServerSide, folder: Path, say: Say = lambda _text: None) -> None:
        self._side, self._folder, self._say = side, folder, say
        self._words: tuple[str, ...] | None = None
        self._url = ""
        self._process: subprocess.Popen[bytes] | None = None
        digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
        self._name = f"sweep-{digest[:12]}"

    def __enter__(self) -> ServerHost:
        if isinstance(self._side, ExistingServer):
            # said before the first point, not once a point
            in_own_loop(_check_existing(self._side, flush=False))
        else:
            self._end_leftovers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def ready(self, point: Point) -> str:
        """The base URL of a server for this point, healthy and, if the grid says so, with an empty cache.

        Raises:
            ServerError: it did not start, or does not answer.
        """
        if isinstance(self._side, ExistingServer):
            in_own_loop(_check_existing(self._side, flush=self._side.between_runs == "flush"))
            return self._side.base_url
        between = self._side.between_runs
        same = self._words == point.server and between != "restart" and self._answers()
        if same and (between == "keep" or self._flushed()):
            return self._url
        self._stop()
        self._start(point)
        self._words = point.server
        return self._url

    def _answers(self) -> bool:
        port = int(self._url.rpartition(":")[2])
        return health(port) == http.client.OK

    def _flushed(self) -> bool:
        """Whether the cache could be emptied; a server that refuses is started anew instead."""
        try:
            in_own_loop(_flush(self._url))
        except ServerError as error:
            self._say(f"the cache was not emptied ({error}); starting the server anew")
            return False
        return True

    def _start(self, point: Point) -> None:
        self._say(f"starting the server of {point.label}")
        if isinstance(self._side, CpuServer):
            release, flags = self._side.release, point.server[3:]
            environment = cpu_server.install(release)
            server = cpu_server.start(
                self._side.launch(flags, self._name),
                environment=environment,
                timeout_seconds=self._side.ready_seconds,
            )
            self._url = server.base_url
        else:
            assert isinstance(self._side, LaunchLine)
            self._url = self._launch(self._side, point)

    def _stop(self) -> None:
        if self._words is not None and isinstance(self._side, CpuServer):
            self._keep_cpu_log()
            cpu_server.stop(self._name)
        if self._process is not None:
            _end_group(self._process.pid)
            self._process.wait()
            self._process = None
            (self._folder / _STATE).unlink(missing_ok=True)
        self._words = None

    def _keep_cpu_log(self) -> None:
        with contextlib.suppress(OSError):
            _log_path(self._folder).write_bytes(cpu_server.logs(self._name).read_bytes())

    # ---- launch lines

    def _launch(self, line: LaunchLine, point: Point) -> str:
        port = parse_launch([word.replace("{port}", str(_free_port())) for word in point.server]).port
        environment, command = split_environment(tuple(word.replace("{port}", str(port)) for word in point.server))
        log_path = _log_path(self._folder)
        with log_path.open("wb") as log:
            try:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"{command[0]}: cannot be started ({error.strerror})") from error
        self._process = process
        with contextlib.suppress(psutil.NoSuchProcess):
            state = {"pid": process.pid, "created": psutil.Process(process.pid).create_time()}
            write_json(self._folder / _STATE, state)
        self._wait(process, port or 0, line.ready_seconds, log_path)
        return f"http://{HOST}:{port}"

    def _wait(self, process: subprocess.Popen[bytes], port: int, limit: float, log_path: Path) -> None:
        began = time.monotonic()
        try:
            while health(port) != http.client.OK:
                seconds = time.monotonic() - began
                if process.poll() is not None:
                    raise ServerError(_why(log_path, f"ended with {process.returncode} after {seconds:.0f} s"))
                if seconds > limit:
                    raise ServerError(_why(log_path, f"was not ready after {limit:g} s"))
                time.sleep(0.2)
        except BaseException:
            self._stop()
            raise

    def _end_leftovers(self) -> None:
        """A server that a killed sweep left behind in this folder is stopped, if it is still the same process."""
        if isinstance(self._side, CpuServer):
            if any(server.name == self._name for server in cpu_server.status()):
                self._say("stopping the server that an earlier sweep left behind")
                cpu_server.stop(self._name)
            return
        state = self._folder / _STATE
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
            left: dict[str, Any] = json.loads(state.read_text(encoding="utf-8"))
            # a number that was given to another process since has another start time
            if abs(psutil.Process(int(left["pid"])).create_time() - float(left["created"])) < 0.1:
                self._say("stopping the server that an earlier sweep left behind")
                _end_group(int(left["pid"]))
        state.unlink(missing_ok=True)


def _log_path(folder: Path) -> Path:
    servers = folder / SERVERS
    servers.mkdir(exist_ok=True)
    return servers / f"{len(list(servers.glob('*.log'))) + 1:03d}.log"


def _why(log_path: Path, what: str) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    shown = "\n  ".join("".join(filter(str.isprintable, line))[:300] for line in lines)
    return f"the server {what}; {log_path.parent.name}/{log_path.name} ends with:\n  {shown}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _group(pid: int) -> list[psutil.Process]:
    """Living processes of the group that ``pid`` leads."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _end_group(pid: int) -> None:
    """TERM, then KILL, to the group of a server that this sweep started.

    Raises:
        HostError: something survived.
    """
    for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        members = _group(pid)
        if not members:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
        psutil.wait_procs(members, timeout=seconds)
    if _group(pid):
        raise HostError(f"the server of process group {pid} survived KILL; see ps -o pid,stat,wchan")


async def _flush(base_url: str) -> None:
    async with SglangClient(base_url) as client:
        await client.flush_cache()


async def _check_existing(side: ExistingServer, *, flush: bool) -> None:
    async with SglangClient(side.base_url, api_key_env=side.api_key_env) as client:
        if not (await client.health()).ready:
            raise ServerError(f"{side.base_url}: /health says it is not ready; wait until the server has loaded")
        if flush:
            await client.flush_cache()
