"""The command line: one table of commands; a command's module is imported only when it is asked for.

A command module offers ``add_arguments(command, parser)`` and ``run(command, args) -> int`` (the exit code:
0 fits/ok, 1 error, 2 usage, 3 does not fit / finding).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import hicache_lab
from hicache_lab.errors import HicacheLabError

COMMANDS: dict[str, tuple[str, str]] = {
    # name: (module below hicache_lab.cli, one line of help)
    "parse": ("logs", "What an SGLang log says: runs, ranks, pools, batches, throughput, errors"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the process's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="hicache-lab",
        description="Exact HiCache sizing, log forensics, cache simulation and end-to-end runs for SGLang.",
    )
    parser.add_argument("--version", action="version", version=f"hicache-lab {hicache_lab.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in words if word in COMMANDS), None)
    for name, (module, line) in COMMANDS.items():
        sub = commands.add_parser(name, help=line, description=line)
        if name == wanted:
            import_module(f"hicache_lab.cli.{module}").add_arguments(name, sub)
    try:
        args = parser.parse_args(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        return int(import_module(f"hicache_lab.cli.{COMMANDS[args.command][0]}").run(args.command, args))
    except HicacheLabError as error:
        print(f"hicache-lab {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # the reader (head, less) has left: not our error, and nothing more may be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"hicache-lab {args.command}: interrupted", file=sys.stderr)
        return 130
