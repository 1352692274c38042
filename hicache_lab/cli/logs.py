"""``parse``: what a log says."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.sglang.releases import EXAMINED


def add_arguments(_command: str, parser: argparse.ArgumentParser) -> None:
    """The arguments of ``parse``."""
    parser.add_argument(
        "logs", nargs="+", metavar="LOG", help="server log, rotated set, directory, or - for standard input"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/parse-json.md)")
    parser.add_argument(
        "--parquet", type=Path, metavar="DIR", help="also write batches, allocations and errors as parquet"
    )
    parser.add_argument("--follow", action="store_true", help="keep reading a growing log and print what it says")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar on standard error")


def run(_command: str, args: argparse.Namespace) -> int:
    """Read the logs and print what they say."""
    if args.follow:
        return _follow(args)
    from hicache_lab.forensics.incident.folder import sort_files
    from hicache_lab.forensics.logs.collect import read_log
    from hicache_lab.forensics.logs.summary import to_json, to_text

    files = sort_files(args.logs)
    if files.logs:
        args.logs = list(files.logs)
        for other in (*files.kernel_logs, *files.memory):
            print(f"{other}: a kernel log or memory series, left out; hicache-lab diagnose reads it", file=sys.stderr)
    with progress(args.logs, quiet=args.no_progress) as on_read:
        log = read_log(args.logs, columns=args.parquet is not None, keep_partial=True, on_read=on_read)
    if log.interrupted and not log.is_sglang:
        raise KeyboardInterrupt  # too early to say what the log is
    if log.interrupted:
        print("interrupted: what follows is what was read until then", file=sys.stderr)
    if not log.is_sglang:
        raise InputError(not_sglang([source.name for source in log.sources], log.lines))
    if args.parquet is not None:
        from hicache_lab.forensics.logs.frames import write_parquet

        for path in write_parquet(log, args.parquet):
            print(f"wrote {path}", file=sys.stderr)
    print(json.dumps(to_json(log), indent=2, allow_nan=False) if args.json else to_text(log))
    return 130 if log.interrupted else 0


def not_sglang(names: list[str], lines: int | None) -> str:
    """The message for input without a single line that SGLang prints; None: nobody counted the lines."""
    known = f"is known from an SGLang server (releases {EXAMINED})"
    what = "nothing in it" if lines is None else f"{lines:,} lines and none of them"
    what = "empty" if lines == 0 else f"{what} {known}"
    return f"{', '.join(names)}: {what}; give the server's own log (standard output and standard error)"


def _follow(args: argparse.Namespace) -> int:
    from hicache_lab.forensics.logs.collect import follow_events
    from hicache_lab.forensics.logs.prefix import for_terminal
    from hicache_lab.forensics.logs.summary import event_json

    if len(args.logs) != 1 or args.parquet is not None:
        raise UsageError("--follow: reads one LOG and writes no parquet; give a single path")
    own = 0
    for event in follow_events(args.logs[0]):
        own += event.is_servers_own
        if event.kind == "access":
            continue
        if args.json:
            print(json.dumps(event_json(event), allow_nan=False), flush=True)
        else:
            at = event.at.isoformat(sep=" ") if event.at else "-"
            print(f"{at}  {event.rank.label or '-'}  {event.kind}  {for_terminal(event.text)[:200]}", flush=True)
    # only standard input comes to an end by itself
    if not own:
        raise InputError(not_sglang(args.logs, None))
    return 0


@contextmanager
def progress(paths: list[str], *, quiet: bool) -> Iterator[Callable[[int], object] | None]:
    """A progress bar on standard error over the bytes of the given files; none for small ones or a pipe."""
    total = sum(Path(path).stat().st_size for path in paths if Path(path).is_file())
    if quiet or total < 32 << 20 or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", file=sys.stderr) as bar:
        yield bar.update
