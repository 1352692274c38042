"""The command line: one table of commands; a command's module is imported only when it is asked for.

A command module offers ``add_arguments(command, parser)`` and ``run(command, args) -> int`` (the exit code:
0 fits/ok, 1 error, 2 usage, 3 does not fit / finding). Commands in its ``TAKES_SERVER_FLAGS`` get the options that
argparse does not know as ``args.rest``; those in ``TAKES_LINE`` get what stands behind ``--`` as ``args.line``.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import hicache_lab
from hicache_lab.base.errors import HicacheLabError, missing_packages_named

COMMANDS: dict[str, tuple[str, str]] = {
    # name: (module below hicache_lab.cli, one line of help)
    "plan": ("capacity", "per pool, rank and host: what these flags take, and the verdict"),
    "preflight": ("capacity", "the same from a launch line as it is pasted"),
    "max": ("capacity", "the largest safe --hicache-size and --hicache-ratio"),
    "run": ("running", "run notebooks headless, each into a folder with its HTML and result.json"),
    "sweep": ("sweeping", "a grid of notebook runs: checked whole, resumable, compared"),
    "compare": ("sweeping", "runs side by side: medians, intervals, and what is more than noise"),
    "parse": ("logs", "what an SGLang log says: runs, ranks, pools, batches, throughput, errors"),
    "diagnose": ("incident", "why it failed: causes with the lines that show them, and what was looked for"),
    "report": ("incident", "a postmortem or a run's record as Markdown and one HTML file"),
    "watch": ("incident", "sample the host's memory into a file that survives a crash"),
    "server": (
        "servers",
        "a real SGLang with HiCache on this machine's CPU: install, start, stop, status, logs",
    ),
    "curve": ("curve", "the hit rate at every cache size, from a trace or a described workload"),
    "simulate": ("simulate", "replay a trace by a release's own cache rules: cached tokens by tier"),
    "replay": ("replays", "the incident again: virtually, or for real in a memory control group (--physical)"),
    "read-source": ("replays", "an SGLang tree or wheel: its host-pool sizing and check, and whose rules they are"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the process's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    wanted = next((word for word in words if word in COMMANDS), None)
    name = f"hicache-lab {wanted}" if wanted else "hicache-lab"
    return exit_code_of(name, lambda: _command(words, wanted))


def exit_code_of(name: str, command: Callable[[], int]) -> int:
    """Run a command; what it raises becomes one line on stderr, which begins with ``name``, and an exit code."""
    try:
        with missing_packages_named():
            code = command()
        sys.stdout.flush()
        return code
    except HicacheLabError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # the reader (head, less) has left: not our error, and nothing more may be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # an output that takes nothing more (a full disk behind ">"): files a command reads or writes have their own
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{name}: the output could not be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # also while the command's modules are still being imported
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _command(words: list[str], wanted: str | None) -> int:
    parser = argparse.ArgumentParser(
        prog="hicache-lab",
        description="Exact HiCache sizing, log forensics, cache simulation and end-to-end runs for SGLang.",
    )
    parser.add_argument("--version", action="version", version=f"hicache-lab {hicache_lab.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    module = import_module(f"hicache_lab.cli.{COMMANDS[wanted][0]}") if wanted else None
    line: list[str] = []
    if wanted in getattr(module, "TAKES_LINE", ()) and "--" in words:
        cut = words.index("--")
        words, line = words[:cut], words[cut + 1 :]
    for name, (_, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == wanted and module is not None:
            module.add_arguments(name, sub)
    try:
        args, rest = parser.parse_known_args(words)
        if rest and args.command not in getattr(module, "TAKES_SERVER_FLAGS", ()):
            parser.error(f"{args.command}: unknown argument {rest[0]!r}; see hicache-lab {args.command} --help")
    except SystemExit as stop:
        return int(stop.code or 0)
    args.rest, args.line = rest, line
    assert module is not None
    return int(module.run(args.command, args))
