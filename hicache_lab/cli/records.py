"""``vectors`` and ``verdicts``: replay what was recorded, and fail when anything differs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hicache_lab.base.errors import InputError
from hicache_lab.preflight.cases import judge_cases
from hicache_lab.vectors import Report, read_records, replay


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """A JSON-lines file, plain or .gz."""
    what = "recorded sizing vectors" if command == "vectors" else "recorded cases (id, args, expect)"
    parser.add_argument("file", type=Path, help=f"{what}, one JSON object a line, plain or .gz")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")


def _vectors_words(report: Report) -> str:
    total = report.total
    lines = [
        f"{total.checked:,} vectors checked, {total.mismatched} mismatched, {total.unsupported} unsupported",
        *(f"  {kind}: {tally.checked:,} checked" for kind, tally in sorted(report.by_kind.items())),
        *(f"  mismatch: {mismatch}" for mismatch in report.mismatches[:20]),
        *(f"  unsupported ({count}): {reason}" for reason, count in report.reasons.most_common(20)),
    ]
    return "\n".join(lines)


def _vectors(args: argparse.Namespace) -> int:
    report = replay(read_records(args.file))
    if not report.total.checked and not report.total.unsupported:
        raise InputError(f"{args.file}: no record in it")
    print(json.dumps(report.as_dict(), indent=2) if args.json else _vectors_words(report))
    return 1 if report.total.mismatched or report.total.unsupported else 0


def _verdicts(args: argparse.Namespace) -> int:
    judged = judge_cases(record for _, record in read_records(args.file))
    if not judged["total"]:
        raise InputError(f"{args.file}: no case in it")
    if args.json:
        print(json.dumps(judged, indent=2))
    else:
        for case in judged["cases"]:
            mark = "agrees" if case["agrees"] else "MISSES"
            print(f"{mark}  {case['id']}: {case['verdict']}  {'' if case['agrees'] else case['reason']}".rstrip())
        print(f"{judged['agree']} of {judged['total']} agree")
    return 0 if judged["agree"] == judged["total"] else 3


def run(command: str, args: argparse.Namespace) -> int:
    """Exit 1 when a vector differs or cannot be answered, 3 when a verdict disagrees."""
    return _vectors(args) if command == "vectors" else _verdicts(args)
