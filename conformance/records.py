"""What the two referees share: recorded JSON lines, and how a script here becomes a command."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if importlib.util.find_spec("hicache_lab") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hicache_lab.base.errors import InputError
from hicache_lab.base.files import open_decompressed
from hicache_lab.cli import exit_code_of


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and record of a JSON-lines file, plain or compressed.

    Raises:
        InputError: the file is missing, unreadable or a line is not a JSON object.
    """
    try:
        with io.TextIOWrapper(open_decompressed(path), encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise InputError(f"{path}:{number}: expected one JSON object a line: {error}") from None
                if not isinstance(record, dict):
                    raise InputError(f"{path}:{number}: expected a JSON object, got {type(record).__name__}")
                yield number, record
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def run_as_command(name: str, what: str, command: Callable[[argparse.Namespace], int]) -> int:
    """Read the command line (FILE and --json), run, and return the exit code; errors are one line on stderr."""
    parser = argparse.ArgumentParser(prog=f"{name}.py", description=f"Replay {what} through this package.")
    parser.add_argument("file", type=Path, help=f"{what}, one JSON object a line, plain or compressed")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    args = parser.parse_args()
    return exit_code_of(parser.prog, lambda: command(args))
