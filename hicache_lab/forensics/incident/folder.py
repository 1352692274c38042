"""What each file of an incident is, judged by its content: people hand over a folder and not a list of flags."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hicache_lab.base.errors import InputError
from hicache_lab.forensics.incident.kernel import journal_line, looks_like_kernel
from hicache_lab.forensics.incident.memory import holds_samples
from hicache_lab.forensics.incident.oom_reports import reports_a_kill
from hicache_lab.forensics.logs.reader import STDIN, chunks, head_of

_LOG_NAME = re.compile(r"\.(log|txt|out|err)\b")
_DOCUMENTS = (".json", ".yaml", ".yml")
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
    by_kind: dict[str, list[str]] = {"log": [], "kernel": [], "memory": []}
    for path in paths:
        if path != STDIN and Path(path).is_dir():
            for member, kind in _members(Path(path)):
                # in a folder, a file that says nothing of the kind is a log only by its name
                if kind != "log" or _LOG_NAME.search(member.name):
                    by_kind["log" if kind == "server" else kind].append(str(member))
        else:
            # a pipe can be read once
            is_pipe = path == STDIN or (Path(path).exists() and not Path(path).is_file())
            kind = "log" if is_pipe else kind_of(path)
            by_kind["log" if kind == "server" else kind].append(path)
    return Files(tuple(by_kind["log"]), tuple(by_kind["kernel"]), tuple(by_kind["memory"]))


def _members(folder: Path) -> list[tuple[Path, str]]:
    """The files of a folder with their kinds; of documents only those in which kubectl or docker report a kill."""
    inside = []
    for path in sorted(folder.iterdir()):
        is_other = _OTHER_NAME.search(path.name) is not None
        if not path.is_file() or path.name.startswith(".") or (is_other and path.suffix not in _DOCUMENTS):
            continue
        kind = kind_of(str(path))
        if not is_other or kind == "kernel":
            inside.append((path, kind))
    if not inside:
        raise InputError(f"{folder}: no server log in this folder; name the log file itself")
    return inside


def kind_of(path: str) -> str:
    """``"server"`` where SGLang speaks, ``"memory"``, ``"kernel"``, or ``"log"`` for anything else.

    Raises:
        InputError: it cannot be read.
    """
    head = head_of(path)
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
    lines = reports = server = 0
    for chunk in chunks(path):
        for raw in chunk.split(b"\n"):
            lines += 1
            server += _SERVER.search(raw) is not None
            reports += reports_a_kill(raw.decode("utf-8", "replace").rstrip("\r"))
    return bool(reports) and 2 * server < lines
