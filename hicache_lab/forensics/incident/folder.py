"""What each file of an incident is, told by its content: people hand over a folder and not a list of flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hicache_lab.base.errors import InputError
from hicache_lab.forensics.incident.kernel import journal_line, looks_like_kernel
from hicache_lab.forensics.incident.memory import holds_samples
from hicache_lab.forensics.incident.oom_reports import reports_a_kill
from hicache_lab.forensics.logs.reader import STDIN, chunks

_HEAD = 1 << 16
_LOG_NAME = re.compile(r"\.(log|txt|out|err)\b")
# documents and results that lie beside the logs
_OTHER_NAME = re.compile(r"\.(md|html?|json|ya?ml|toml|png|svg|pdf|ipynb|parquet|py|sh)$")
# a record of SGLang's, wherever a container has put it
_SERVER = re.compile(rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]{0,80}\] |\[\d\d:\d\d:\d\d (?:DP|TP)\d|\bserver_args=")
# how kubectl describe, -o yaml, -o json and docker inspect begin
_REPORT = re.compile(
    rb'\s*(?:Name:[^\n]*\n(?:[A-Z][^\n]*\n)?Namespace:|apiVersion:|\{\s*"apiVersion":|\[\s*\{\s*"Id":)'
)
_OOM = re.compile(r"invoked oom-killer|oom-kill:constraint|[Oo]ut of memory: Kill")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of an incident by what they are; what is none of these is taken for a server log."""

    logs: tuple[str, ...] = ()
    kernel_logs: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()


def sort_files(paths: Iterable[str]) -> Files:
    """Tell server logs, kernel logs and memory series apart by their content.

    Args:
        paths: files, folders (of which documents and hidden files are left out), or ``-``, which is a server log.

    Raises:
        InputError: a path does not exist, or a folder holds nothing of the kind.
    """
    found: dict[str, list[str]] = {"log": [], "kernel": [], "memory": []}
    for path in paths:
        for member in _members(path):
            # a pipe can be read once
            once = member == STDIN or (Path(member).exists() and not Path(member).is_file())
            kind = "log" if once else kind_of(member)
            # in a folder, a file that says nothing of the kind is a log only by its name
            if kind == "log" and member != path and not _LOG_NAME.search(Path(member).name):
                continue
            found["log" if kind == "server" else kind].append(member)
    return Files(tuple(found["log"]), tuple(found["kernel"]), tuple(found["memory"]))


def _members(path: str) -> Iterator[str]:
    if path == STDIN or not Path(path).is_dir():
        yield path
        return
    inside = [p for p in sorted(Path(path).iterdir()) if p.is_file() and not p.name.startswith(".")]
    inside = [p for p in inside if not _OTHER_NAME.search(p.name) or _describes_a_kill(p)]
    if not inside:
        raise InputError(f"{path}: no server log in this folder; name the log file itself")
    yield from (str(p) for p in inside)


def _describes_a_kill(path: Path) -> bool:
    """Whether a document is what kubectl or docker tell of a killed container."""
    return path.suffix in (".json", ".yaml", ".yml") and kind_of(str(path)) == "kernel"


def kind_of(path: str) -> str:
    """``"server"`` where SGLang speaks, ``"memory"``, ``"kernel"``, or ``"log"`` for anything else.

    Raises:
        InputError: it cannot be read.
    """
    head = next(chunks(path, size=_HEAD), b"")[:_HEAD]
    if _REPORT.match(head) and _report_of_a_kill(path):
        return "kernel"
    if _SERVER.search(head):
        return "server"
    lines = [journal_line(line.rstrip("\r")) for line in head.decode("utf-8", "replace").split("\n")]
    if holds_samples(path, lines):
        return "memory"
    written = [line for line in lines if line.strip()]
    kernel = sum(looks_like_kernel(line) for line in written)
    if not (2 * kernel > len(written) or any(_OOM.search(line) or reports_a_kill(line) for line in written)):
        return "log"
    # the journal of a whole machine may hold the server's lines too
    return "server" if any(_SERVER.search(chunk) for chunk in chunks(path)) else "kernel"


def _report_of_a_kill(path: str) -> bool:
    """Whether a container's description tells of its end; the message in it may quote the server's last lines."""
    lines = told = server = 0
    for chunk in chunks(path):
        for raw in chunk.split(b"\n"):
            lines += 1
            server += _SERVER.search(raw) is not None
            told += reports_a_kill(raw.decode("utf-8", "replace").rstrip("\r"))
    return bool(told) and 2 * server < lines
