"""A server that is started on this machine: its port on loopback, and waiting until it is ready."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hicache_lab.base.errors import ServerError

HOST = "127.0.0.1"
_REASON = re.compile(r"^(?:\[[^]]*\] )?[\w.]*(?:Error|Exception): .+|^[\w. -]+: error: .+")
_LAST_LINES = 8
_MOST_REASONS = 6

Progress = Callable[[float, str], None]


def free_port() -> int:
    """A port that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def spawn(
    command: Sequence[str], log_path: Path, *, environ: Mapping[str, str], folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a server as the leader of a process group of its own; everything that it prints goes into a log."""
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


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


def wait_until_ready(
    port: int,
    *,
    name: str,
    alive: Callable[[], bool],
    log_path: Path,
    timeout_seconds: float,
    progress: Progress = lambda _seconds, _line: None,
) -> float:
    """Wait until /health answers 200; returns the seconds that it took.

    Args:
        port: on loopback.
        name: the server in messages.
        alive: whether its process still runs.
        log_path: what it prints; not trusted text.
        timeout_seconds: give up after this long.
        progress: called twice a second with the seconds so far and the last line of the log.

    Raises:
        ServerError: it ended, or was not ready in time; the message holds the reasons that its log gives.
    """
    began = time.monotonic()
    while True:
        seconds = time.monotonic() - began
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines() if log_path.exists() else []
        if not alive():
            raise ServerError(_why(name, log_path, lines, f"ended after {seconds:.0f} s, before it was ready"))
        if seconds > timeout_seconds:
            raise ServerError(_why(name, log_path, lines, f"was not ready after {timeout_seconds:g} s"))
        if health(port) == http.client.OK:
            return time.monotonic() - began
        progress(seconds, next((line for line in reversed(lines) if line.startswith("[")), ""))
        time.sleep(0.5)


def _why(name: str, log_path: Path, lines: Sequence[str], what: str) -> str:
    """The server's own reasons, each once, or the end of its log."""
    reasons = list(dict.fromkeys(line for line in lines if _REASON.match(line)))
    shown = reasons[-_MOST_REASONS:] or list(lines[-_LAST_LINES:])
    text = "\n  ".join("".join(filter(str.isprintable, line))[:500] for line in shown)
    return f"{name} {what}; its log says:\n  {text}\nwhole log: {log_path}"
