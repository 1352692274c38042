"""The servers of a sweep: one at a time, started on loopback, told apart from run to run, stopped whatever happens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from http import HTTPStatus
from pathlib import Path
from types import TracebackType

from hicache_lab.base.errors import ServerError
from hicache_lab.host.processes import ProcessId, end_group
from hicache_lab.runs.recording import write_json
from hicache_lab.serving import cpu_server
from hicache_lab.serving.client import SglangClient
from hicache_lab.serving.load.thread_loop import run_in_thread
from hicache_lab.serving.local import HOST, free_port, health, spawn, wait_until_ready
from hicache_lab.sweeps.server_side import ExistingServer, ServerSide, ServerStart

SERVERS = "servers"
_STATE = "server.json"

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
        self._running: ServerStart | None = None
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
        self._name = f"sweep-{digest[:12]}"

    def __enter__(self) -> ServerHost:
        if isinstance(self._side, ExistingServer):
            # checked before the first point, not once a point
            run_in_thread(_check_existing(self._side, flush=False))
        else:
            self._end_leftovers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def ready(self, label: str, start: ServerStart | None) -> str:
        """The base URL of a server for a point, healthy and, if the grid says so, with an empty cache.

        Args:
            label: the point's setting in words.
            start: the server it starts; None where the grid names an existing one.

        Raises:
            ServerError: it did not start, or does not answer.
        """
        if isinstance(self._side, ExistingServer):
            run_in_thread(_check_existing(self._side, flush=self._side.between_runs == "flush"))
            return self._side.base_url
        assert start is not None
        if not self._can_stay(start):
            self._stop()
            self._say(f"starting the server of {label}")
            if start.cpu is not None:
                environment = cpu_server.install(start.cpu.release)
                launch = replace(start.cpu, name=self._name)
                seconds = self._side.ready_seconds
                self._port = cpu_server.start(launch, environment=environment, timeout_seconds=seconds).port
            else:
                self._start_line(start, self._side.ready_seconds)
            self._running = start
        return self._url

    @property
    def _url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def _can_stay(self, start: ServerStart) -> bool:
        """Whether the running server serves the next point, its cache emptied if the grid says so."""
        between = self._side.between_runs
        if self._running is None or self._running.words != start.words or between == "restart":
            return False
        if health(self._port) != HTTPStatus.OK:
            return False
        if between == "flush":
            try:
                run_in_thread(_flush(self._url))
            except ServerError as error:
                self._say(f"the cache was not emptied ({error}); starting the server anew")
                return False
        return True

    def _start_line(self, start: ServerStart, ready_seconds: float) -> None:
        self._port = start.port(free_port())
        environment, command = start.command(self._port)
        log_path = self._new_log()
        try:
            process = spawn(command, log_path, environ={**os.environ, **environment})
        except OSError as error:
            raise ServerError(f"{command[0]}: cannot be started ({error.strerror})") from error
        self._process = process
        write_json(self._folder / _STATE, asdict(ProcessId.of(process.pid)))
        try:
            wait_until_ready(
                self._port,
                name="the server",
                alive=lambda: process.poll() is None,
                log_path=log_path,
                timeout_seconds=ready_seconds,
            )
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._running is not None and self._running.cpu is not None:
            with contextlib.suppress(OSError):
                self._new_log().write_bytes(cpu_server.logs(self._name).read_bytes())
            cpu_server.stop(self._name)
        if self._process is not None:
            end_group(ProcessId.of(self._process.pid))
            self._process.wait()
            self._process = None
            (self._folder / _STATE).unlink(missing_ok=True)
        self._running = None

    def _new_log(self) -> Path:
        servers = self._folder / SERVERS
        servers.mkdir(exist_ok=True)
        return servers / f"{len(list(servers.glob('*.log'))) + 1:03d}.log"

    def _end_leftovers(self) -> None:
        """A server that a killed sweep left behind in this folder is stopped, if it is still the same process."""
        if any(server.name == self._name for server in cpu_server.status()):
            self._say("stopping the server that an earlier sweep left behind")
            cpu_server.stop(self._name)
        state = self._folder / _STATE
        with contextlib.suppress(OSError, ValueError, TypeError):
            leader = ProcessId(**json.loads(state.read_text(encoding="utf-8")))
            if leader.alive:
                self._say("stopping the server that an earlier sweep left behind")
                end_group(leader)
        state.unlink(missing_ok=True)


async def _flush(base_url: str) -> None:
    async with SglangClient(base_url) as client:
        await client.flush_cache()


async def _check_existing(side: ExistingServer, *, flush: bool) -> None:
    async with SglangClient(side.base_url, api_key_env=side.api_key_env) as client:
        if await client.health() != HTTPStatus.OK:
            raise ServerError(f"{side.base_url}: /health says it is not ready; wait until the server has loaded")
        if flush:
            await client.flush_cache()
