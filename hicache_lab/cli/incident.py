"""``diagnose``, ``report`` and ``watch``: why it failed, written up, and a memory series for the next time."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_lab.base.errors import UsageError
from hicache_lab.cli.options import add_facts
from hicache_lab.forensics.logs.prefix import for_terminal
from hicache_lab.preflight.ask import DEVICE_FACTS, HOST_FACTS

if TYPE_CHECKING:
    from hicache_lab.forensics.incident import Diagnosis, Finding

WIDTH = 118


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """The arguments of one of the commands."""
    add = parser.add_argument
    if command == "watch":
        add("--output", type=Path, required=True, metavar="FILE", help="where samples are appended, a JSON line each")
        add("--interval", type=float, default=1.0, metavar="S", help="seconds between samples (default 1)")
        add("--pid", type=int, action="append", default=[], metavar="N", help="a process to look at (repeat)")
        add("--sglang", action="store_true", help="all processes of SGLang servers, found anew each time")
        add("--samples", type=int, metavar="N", help="stop after N samples (default: until interrupted)")
        return
    if command == "report":
        what = "a run folder, a sweep folder, an incident folder or its name, or server logs"
        add("targets", nargs="+", metavar="RUN|SWEEP|INCIDENT|LOG", help=what)
        add("--title", default="", help="title of the document")
        add("--timezone", default="UTC", help="zone of the logs' clock (IANA name, default UTC)")
        add("--output", type=Path, metavar="DIR", help="where the two files go (default: reports/NAME)")
    else:
        what = "server logs, kernel logs, memory series, a folder of them, or -"
        add("logs", nargs="+", metavar="LOG", help=what)
        add("--json", action="store_true", help="print JSON")
    what = "dmesg, journalctl, kern.log, kubectl describe pod, docker inspect (repeat)"
    add("--kernel-log", action="append", default=[], metavar="F", help=what)
    what = "watch file, CSV, free, meminfo, vmstat, node-exporter (repeat)"
    add("--memory", action="append", default=[], metavar="F", help=what)
    add_facts(parser, _FACTS)
    add("--sglang-version", metavar="V", help="the release, if it is known; else the wording tells")
    add("--model", metavar="M", help="a catalogue name, hub id or config.json, where the log's path is not")
    add("--tp-size", type=int, metavar="N", help="ranks, where the log does not show the arguments")


# what files often do not tell
_FACTS = (*HOST_FACTS, "overhead", "draft_model", *DEVICE_FACTS)


def facts_from(args: argparse.Namespace) -> dict[str, Any]:
    """What the user says beside the files, by the names of ``Stated``."""
    from hicache_lab.forensics.incident.question import stated_facts

    return stated_facts({name: getattr(args, name) for name in (*_FACTS, "model", "tp_size", "sglang_version")})


def run(command: str, args: argparse.Namespace) -> int:
    """Run one of the commands."""
    if command == "watch":
        return _watch(args)
    if command == "report":
        return _report(args)
    from hicache_lab.forensics.incident import diagnose, gather

    result = diagnose(gather(args.logs, kernel_logs=args.kernel_log, memory=args.memory, **facts_from(args)))
    if result.warning:
        print(result.warning, file=sys.stderr)
    print(json.dumps(result.to_json(), indent=2) if args.json else diagnosis_text(result))
    return 3 if result.findings else 0


def diagnosis_text(result: Diagnosis) -> str:
    """The findings with their evidence, and what was looked for and not found."""
    out = []
    if not result.findings:
        out.append(f"no finding  {result.recognised_lines:,} statements recognised in {result.lines:,} lines")
    if result.only_risks:
        out += ["nothing failed in these files; what follows are risks", ""]
    many = len(result.facts.log.runs) > 1
    for number, (finding, others) in enumerate(result.grouped(), 1):
        out += _finding_text(number, finding, others, with_run=many)
    missing = [f"{cause} ({looks_for})" for cause, looks_for in result.not_found()]
    if missing:
        out.append("looked for and not found:")
        out += _wrap("; ".join(missing), "  ")
    return "\n".join(out)


def _finding_text(number: int, finding: Finding, others: tuple[int, ...], *, with_run: bool) -> list[str]:
    from hicache_lab.forensics.incident.diagnosis import also_in

    run = f"  run {finding.run}{also_in(others)}" if with_run else ""
    out = [f"{number}. {finding.cause}  [{finding.role}, {finding.confidence} confidence]{run}"]
    out += _wrap(finding.explanation, "   ")
    out += _wrap(f"do: {finding.remedy}", "   ")
    for evidence in finding.evidence[:6]:
        out.append(f"     {evidence.file}:{evidence.line}  {for_terminal(evidence.text)[:140]}")
    if len(finding.evidence) > 6:
        out.append(f"     … {len(finding.evidence) - 6} more lines (--json)")
    return [*out, ""]


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        for_terminal(text), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _report(args: argparse.Namespace) -> int:
    from hicache_lab.views.report import postmortem, run_report, to_document, write_report

    first = Path(args.targets[0])
    if (first / "sweep.json").exists():
        from hicache_lab.sweeps import collect, compare_collection, write_comparison

        runs, target = collect(args.targets), (args.output or first) / "comparison"
        markdown, page, written = write_comparison(runs, compare_collection(runs), target, heading=args.title)
        print(markdown, page, *([written.note] if written and written.note else []), sep="\n")
        return 0
    if (first / "result.json").exists():
        if len(args.targets) > 1:
            raise UsageError("report: one run folder at a time")
        name, document = "report", run_report(first)
        folder = args.output or first
    else:
        post = postmortem(
            args.targets,
            kernel_logs=args.kernel_log,
            memory=args.memory,
            title=args.title,
            timezone=args.timezone,
            **facts_from(args),
        )
        name, document = "postmortem", to_document(post)
        folder = args.output or Path("reports") / (
            post.case.folder.name if post.case else first.name.split(".")[0] or "incident"
        )
    for path in write_report(document, folder, name):
        print(path)
    return 0


def _watch(args: argparse.Namespace) -> int:
    from hicache_lab.forensics.incident.watch import CrashSafeFile, process_share, samples

    if args.samples is not None and args.samples < 1:
        raise UsageError(f"--samples: expected a number above 0, got {args.samples}")
    for pid in args.pid:
        if process_share(pid) is None:
            raise UsageError(f"--pid {pid}: no such process")
    from tqdm import tqdm

    file = CrashSafeFile(args.output)
    shown = tqdm(total=args.samples, unit="sample", file=sys.stderr, disable=not sys.stderr.isatty())
    taken = 0
    try:
        for sample in samples(args.interval, pids=args.pid, all_sglang=args.sglang, count=args.samples):
            file.write(sample)
            taken += 1
            shown.set_postfix_str(f"{sample['available_bytes'] / 1e9:,.1f} GB available")
            shown.update()
    except KeyboardInterrupt:
        # watching ends this way; what was sampled is on the disk
        pass
    finally:
        shown.close()
        file.close()
    print(f"{taken} samples in {args.output}", file=sys.stderr)
    return 0
