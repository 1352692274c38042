"""``hicache-lab server``: install, start, stop, look at a real SGLang on this machine's CPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import parse_bytes
from hicache_lab.host.processes import TERM_SECONDS
from hicache_lab.serving import cpu_server
from hicache_lab.serving.cpu_server.home import HOME_VARIABLE
from hicache_lab.serving.cpu_server.process import READY_TIMEOUT_SECONDS
from hicache_lab.serving.local import health
from hicache_lab.sizing.tiny_models import TINY_MODELS

TAKES_SERVER_FLAGS = frozenset({"server"})  # only to say where they belong
_EPILOG = """\
examples:
  hicache-lab server install --release 0.5.23
  hicache-lab server start --release 0.5.23 --tp-size 2 -- --hicache-ratio 4 --page-size 16
  hicache-lab server start --release 0.5.10 --model tiny-mla --name old -- --hicache-size 1
  hicache-lab run notebooks/06_server_run.ipynb -p base_url=http://127.0.0.1:PORT
  hicache-lab server stop --name old

Everything after -- goes to SGLang as it is. The server listens on loopback only; its throughput and latency
say nothing about a GPU, its pools, guards, logs and counters are the real ones."""


def add_arguments(_command: str, parser: argparse.ArgumentParser) -> None:
    """The five actions."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (line, add, _) in _ACTIONS.items():
        sub = actions.add_parser(name, help=line, description=line, allow_abbrev=False)
        sub.add_argument(
            "--home",
            metavar="DIR",
            type=Path,
            help=f"where environments, models, state and logs live (default ${HOME_VARIABLE}, "
            "$XDG_CACHE_HOME/hicache_lab or ~/.cache/hicache_lab)",
        )
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        if add is not None:
            add(sub)


def _release_argument(sub: argparse.ArgumentParser) -> None:
    newest = cpu_server.RELEASES[-1]
    known = " or ".join(cpu_server.RELEASES)
    sub.add_argument("--release", default=newest, metavar="V", help=f"SGLang release: {known} (default {newest})")


def _install_arguments(sub: argparse.ArgumentParser) -> None:
    _release_argument(sub)
    sub.add_argument("--python", metavar="EXE", help="interpreter to build on (default: this one, if 3.11 or 3.12)")
    sub.add_argument(
        "--extra-index-url",
        metavar="URL",
        action="append",
        default=[],
        help="an extra index for pip; https://download.pytorch.org/whl/cpu spares you torch's CUDA wheels",
    )


def _start_arguments(sub: argparse.ArgumentParser) -> None:
    _release_argument(sub)
    tiny = " or ".join(TINY_MODELS)
    sub.add_argument("--model", default="tiny-llama", help=f"{tiny}, or a model folder (default tiny-llama)")
    sub.add_argument("--tp-size", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    sub.add_argument("--port", type=int, metavar="N", help="port on 127.0.0.1 (default: a free one)")
    sub.add_argument("--name", default="default", help="name of the server (default: default)")
    sub.add_argument("--no-hicache", dest="hicache", action="store_false", help="without hierarchical cache")
    sub.add_argument(
        "--resident", action="store_true", help="make host pages resident as pinning would: takes real memory"
    )
    sub.add_argument(
        "--floor",
        default="4GiB",
        metavar="SIZE",
        help="--resident stops before less than this stays available",
    )
    sub.add_argument(
        "--no-copies",
        dest="copies",
        action="store_false",
        help="negative control: host-device copies do nothing, so outputs of returning prompts change",
    )
    sub.add_argument(
        "--timeout",
        type=float,
        default=READY_TIMEOUT_SECONDS,
        metavar="S",
        help="seconds to wait for /health",
    )
    sub.add_argument("flags", nargs="*", metavar="-- FLAGS", help="SGLang's own flags")


def _stop_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--name", default="default", help="name of the server (default: default)")
    sub.add_argument("--all", action="store_true", help="stop every server that runs")
    sub.add_argument(
        "--term-seconds", type=float, default=TERM_SECONDS, metavar="S", help="seconds between TERM and KILL"
    )


def _logs_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--name", default="default", help="name of the server (default: default)")
    sub.add_argument("--lines", type=int, default=40, metavar="N", help="how many, from the end; 0 for all")
    sub.add_argument("--follow", action="store_true", help="go on printing until Ctrl-C")


def run(_command: str, args: argparse.Namespace) -> int:
    """Run one action; 0 when it did what it says, 3 from ``status`` when nothing runs."""
    if args.rest:
        flag = args.rest[0]
        hint = f"; SGLang's own come after a double dash: server start … -- {flag} …" if args.action == "start" else ""
        raise UsageError(f"{flag}: not a flag of server {args.action}{hint}")
    return _ACTIONS[args.action][2](args)


def _install(args: argparse.Namespace) -> int:
    before = cpu_server.installed(args.release, home_dir=args.home, python=args.python)
    index = [word for url in args.extra_index_url for word in ("--extra-index-url", url)]
    with _StatusLine(f"installing SGLang {args.release}") as line:
        done = cpu_server.install(
            args.release, home_dir=args.home, python=args.python, index_arguments=index, progress=line.show
        )
    if args.json:
        print(json.dumps({**asdict(done), "path": str(done.path), "reused": before is not None}))
    else:
        how = "already installed" if before else f"installed in {done.install_seconds:.0f} s"
        versions = f"Python {done.python_version}, torch {done.torch_version}"
        print(f"SGLang {done.release} {how}: {done.path} ({versions})")
    return 0


def _start(args: argparse.Namespace) -> int:
    launch = cpu_server.Launch(
        release=args.release,
        model=args.model,
        tp_size=args.tp_size,
        flags=tuple(args.flags),
        hicache=args.hicache,
        port=args.port,
        name=args.name,
        resident=args.resident,
        floor_bytes=parse_bytes(args.floor, what="--floor"),
        copies=args.copies,
    )
    with _StatusLine(f"installing SGLang {args.release}") as line:
        environment = cpu_server.install(args.release, home_dir=args.home, progress=line.show)
    with _StatusLine(f"starting SGLang {args.release}") as line:
        server = cpu_server.start(
            launch,
            home_dir=args.home,
            environment=environment,
            timeout_seconds=args.timeout,
            progress=lambda _seconds, text: line.show(text),
        )
    if args.json:
        print(json.dumps(_as_json(server)))
    else:
        print(f"SGLang {server.release} is ready at {server.base_url} after {server.ready_seconds:.0f} s")
        print(f"  {server.model}, tp {server.tp_size}, pid {server.pid}; log {server.log_path}")
        print(f"  stop it with: hicache-lab server stop --name {server.name}")
    return 0


def _stop(args: argparse.Namespace) -> int:
    names = [s.name for s in cpu_server.status(home_dir=args.home)] if args.all else [args.name]
    done = [cpu_server.stop(name, home_dir=args.home, term_seconds=args.term_seconds) for name in names]
    if args.json:
        print(json.dumps([{"name": d.server.name, "how": d.how, "seconds": d.seconds} for d in done]))
        return 0
    ends = {
        "gone": "was not running any more",
        "TERM": "stopped on TERM",
        "KILL": "did not end on TERM: killed",
    }
    for d in done:
        print(f"server {d.server.name} (pid {d.server.pid}) {ends[d.how]} after {d.seconds:.1f} s")
    if not done:
        print("no server runs")
    return 0


def _status(args: argparse.Namespace) -> int:
    servers = cpu_server.status(home_dir=args.home)
    if args.json:
        print(json.dumps([{**_as_json(s), "health": health(s.port)} for s in servers]))
        return 0 if servers else 3
    for s in servers:
        code = health(s.port)
        state = "ready" if code == HTTPStatus.OK else f"not ready (/health: {code or 'no answer'})"
        print(f"{s.name}: SGLang {s.release} {s.model} tp {s.tp_size} at {s.base_url}, pid {s.pid}, {state}")
    if not servers:
        print("no server runs; start one with: hicache-lab server start")
    return 0 if servers else 3


def _logs(args: argparse.Namespace) -> int:
    if args.lines < 0:
        raise UsageError(f"--lines: expected 0 or more, got {args.lines}")
    path = cpu_server.logs(args.name, home_dir=args.home)
    with path.open(errors="replace") as log:
        lines = log.readlines()
        sys.stdout.writelines(lines[-args.lines :] if args.lines else lines)
        while args.follow:
            sys.stdout.write(log.read())
            sys.stdout.flush()
            time.sleep(0.5)
    return 0


def _as_json(server: cpu_server.Server) -> dict[str, object]:
    return {**asdict(server), "log_path": str(server.log_path), "base_url": server.base_url}


_ACTIONS: dict[
    str,
    tuple[str, Callable[[argparse.ArgumentParser], None] | None, Callable[[argparse.Namespace], int]],
] = {
    "install": ("install a pinned release into an environment of its own", _install_arguments, _install),
    "start": ("start a server and wait until it is ready", _start_arguments, _start),
    "stop": ("stop a server (TERM, then KILL, its own processes only)", _stop_arguments, _stop),
    "status": ("list the running servers", None, _status),
    "logs": ("print a server's log", _logs_arguments, _logs),
}

_QUIET_SECONDS = 20.0


class _StatusLine:
    """The seconds and what is going on, on stderr: one changing line on a terminal, else a line now and then."""

    def __init__(self, title: str) -> None:
        self._title = title

    def __enter__(self) -> _StatusLine:
        from tqdm import tqdm

        self._began = self._told = time.monotonic()
        self._bar = tqdm(
            desc=self._title,
            bar_format="{desc}: {elapsed} {postfix}",
            file=sys.stderr,
            leave=False,
            delay=0.3,
            mininterval=0.2,
            disable=None,  # only on a terminal
        )
        return self

    def show(self, line: str) -> None:
        """What is going on now; log text, so control characters are dropped."""
        text = "".join(character for character in line if character.isprintable())
        self._bar.set_postfix_str(text[:100], refresh=False)
        self._bar.update(1)
        now = time.monotonic()
        if self._bar.disable and now - self._told > _QUIET_SECONDS:
            self._told = now
            print(f"{self._title}: {now - self._began:.0f} s, {text[:100]}", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        self._bar.close()
