"""``sweep`` runs a grid of notebook runs; ``compare`` puts runs side by side and says what is more than noise."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.preflight.ask import HOST_FACTS, host_from_facts
from hicache_lab.runs import terminated_as_interrupted
from hicache_lab.runs.comparison import Comparison, recommend
from hicache_lab.runs.comparison.compare import Cell
from hicache_lab.runs.comparison.text import MOST_SHOWN, as_json, text
from hicache_lab.sweeps import (
    Options,
    Plan,
    Point,
    SweepRecord,
    collect,
    compare_collection,
    load_grid,
    make_plan,
    plan_rows,
    run_sweep,
    write_comparison,
)
from hicache_lab.sweeps.grid import LABEL

_SWEEP_EPILOG = """\
a grid file:
  label: host-tier                       # the sweep's folder below --output
  notebook: 06_server_run                # an .ipynb, or one that ships
  parameters: {concurrency: 4}           # fixed
  axes:                                  # the grid is their product
    - hicache_ratio: [1.5, 2, 4]         # a list, or {from: 1.5, to: 4, step: 0.5}
    - {tp_size: [4, 8], device_tokens: [232000, 116000]}   # several names change together
  repeats: 5                             # so that noise can be told from a difference
  server:                                # or cpu: {...}, or base_url: http://127.0.0.1:30000
    launch: python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --port {port} --tp-size 8
      --enable-hierarchical-cache --hicache-ratio {hicache_ratio}
    sglang_version: 0.5.8
    facts: {device_tokens: 116000, overhead: 40GB}
  limits: {cell_seconds: 600, run_seconds: 3600}
  compare: {baseline: hicache_ratio=1.5, objective: output_tokens_per_s}

exit: 0 all complete, 1 a point failed or a file cannot be read, 2 usage, 3 preflight skipped a point,
130 interrupted (--resume goes on)"""

_COMPARE_EPILOG = """\
PATH is a sweep folder, a run folder, a JSON-lines file of sglang.bench_serving, or aiperf's
profile_export_aiperf.json; LABEL=PATH names it, and paths of one label are repeats of one setting.

exit: 0, or 3 if --gate found a figure that is worse than the baseline by more than noise"""


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """The flags of both commands."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    (_sweep_arguments if command == "sweep" else _compare_arguments)(parser)


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = _SWEEP_EPILOG
    add("grid", type=Path, metavar="GRID.yaml", help="the grid")
    add("--output", type=Path, default=Path("reports"), metavar="DIR", help="where sweep folders go (default: reports)")
    add("--label", help="the sweep folder's name (default: the grid's label)")
    add("--check", action="store_true", help="check every point and show the verdicts; run nothing")
    add("--resume", action="store_true", help="go on with the sweep in the folder; complete points are kept")
    add("--allow-unsafe", action="store_true", help="also launch servers that preflight would skip")
    add(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs side by side, in processes (offline notebooks; default 1)",
    )
    add("--cell-timeout", type=float, metavar="SECONDS", help="limit for one cell (default: the grid's, else 600)")
    add("--timeout", type=float, metavar="SECONDS", help="limit for one run (default: the grid's, else 3600)")
    add("--no-html", action="store_true", help="leave each run's one-file HTML out")
    add("--no-images", action="store_true", help="no static images of the comparison's figures")
    for name in HOST_FACTS:
        add("--" + name.replace("_", "-"), metavar="SIZE", help=f"with --check: {name} of another host, e.g. 449GB")


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = _COMPARE_EPILOG
    add("paths", nargs="+", metavar="[LABEL=]PATH", help="what to compare; the first is the baseline")
    add("--baseline", metavar="LABEL", help="the setting the others are compared with")
    add("--metric", action="append", default=[], metavar="NAME", help="a figure to compare; repeatable (default: all)")
    add("--objective", metavar="NAME", help="the figure that decides")
    add("--all", action="store_true", help="print every figure, not only the first ones")
    add("--confidence", type=float, default=0.95, metavar="P", help="of the intervals (0.95)")
    add("--seed", type=int, default=0, metavar="N", help="of the resampling (0)")
    add("--gate", action="append", default=[], metavar="NAME", help="exit 3 if this figure is worse beyond the noise")
    add("--report", type=Path, metavar="FILE", help="also write FILE.md and FILE.html")
    add("--no-images", action="store_true", help="no static images beside the report")


def run(command: str, args: argparse.Namespace) -> int:
    """Run one of the two."""
    return _sweep(args) if command == "sweep" else _compare(args)


# ---- sweep


def _sweep(args: argparse.Namespace) -> int:
    if args.label and not LABEL.fullmatch(args.label):
        raise UsageError(f"--label: expected letters, digits, dot, dash and underscore, got {args.label!r}")
    grid = load_grid(args.grid)
    stated = {name: value for name in HOST_FACTS if (value := getattr(args, name)) is not None}
    if stated and not args.check:
        flag = next(iter(stated)).replace("_", "-")
        raise UsageError(f"--{flag}: only with --check; servers start on this machine, whose memory is measured")
    plan = make_plan(grid, host=host_from_facts(stated)[0] if stated else None, allow_unsafe=args.allow_unsafe)
    if args.check:
        return _show_plan(plan, args)
    folder = args.output / (args.label or grid.label)
    seconds = {"cell_seconds": args.cell_timeout, "run_seconds": args.timeout}
    limits = replace(grid.limits, **{name: value for name, value in seconds.items() if value is not None})
    options = Options(resume=args.resume, jobs=args.jobs, limits=limits, html=not args.no_html)

    def on_point(point: Point) -> None:
        if not args.json:
            from tqdm import tqdm

            # the bar is on standard error; this keeps the two from mixing on a terminal
            tqdm.write(_point_line(point), file=sys.stdout)

    with terminated_as_interrupted():
        record = run_sweep(plan, folder, options, on_point=on_point)
    return _finish(record, folder, args)


def _point_line(point: Point) -> str:
    repeat = f" (run {point.repeat + 1})" if point.repeat else ""
    seconds = f" in {point.seconds:.1f} s" if point.seconds is not None else ""
    again = ", from before" if point.reused else ""
    why = f": {point.why}" if point.why else ""
    return f"{point.status}{again}  {point.label}{repeat}{seconds}{why}"


def _show_plan(plan: Plan, args: argparse.Namespace) -> int:
    if args.json:
        points = [
            {
                "label": point.label,
                "repeat": point.repeat,
                "parameters": dict(point.parameters),
                "server": list(point.server),
                "folder": Path(point.folder).name,
                "run": point.status != "skipped",
                **asdict(point.decision),
            }
            for point in plan.points
        ]
        print(json.dumps({"label": plan.grid.label, "notebook": plan.notebook.stem, "points": points}, indent=2))
    else:
        for row in plan_rows(plan):
            print(f"{row['decision']:4}  {row['setting']}  {row['why']}".rstrip())
        print(f"{len(plan.points)} points, {len(plan.skipped)} skipped; nothing was run")
    return 3 if plan.skipped else 0


def _finish(record: SweepRecord, folder: Path, args: argparse.Namespace) -> int:
    """The comparison, the report, and the exit code."""
    collection = collect([str(folder)])
    comparison, report = None, None
    if collection.observations:
        comparison = compare_collection(collection)
        report = write_comparison(collection, comparison, folder / "comparison", images=not args.no_images)
    if args.json:
        found = as_json(comparison, recommend(comparison)) if comparison else None
        print(json.dumps({"folder": str(folder), **record.as_dict(), "comparison": found}, indent=2))
    else:
        _print_end(record, folder, comparison, report)
    return 1 if record.failed else 3 if record.count("skipped") else 0


def _print_end(record: SweepRecord, folder: Path, comparison: Comparison | None, report: Any) -> None:
    for point in record.points:
        if point.status == "skipped" and point.repeat == 0:
            print(_point_line(point))
    if comparison is not None:
        print()
        print(text(comparison, recommend(comparison)))
    reused = sum(point.reused for point in record.points)
    print(
        f"\n{record.count('complete')} of {len(record.points)} points complete ({reused} from before), "
        f"{record.failed} failed, {record.count('skipped')} skipped"
    )
    if report is not None:
        markdown, page, written = report
        if written is not None and written.note:
            print(written.note)
        print(f"open {page} (Markdown: {markdown.name})")
    print(f"see {folder}")


# ---- compare


def _compare(args: argparse.Namespace) -> int:
    collection = collect(args.paths)
    comparison = compare_collection(
        collection,
        baseline=args.baseline or "",
        objective=args.objective or "",
        metrics=args.metric,
        confidence=args.confidence,
        seed=args.seed,
    )
    worse = _gated(comparison, args.gate)
    report = write_comparison(collection, comparison, args.report, images=not args.no_images) if args.report else None
    if args.json:
        found = as_json(comparison, recommend(comparison)) | {"worse": worse}
        if report:
            found["report"] = [str(report[0]), str(report[1])]
        print(json.dumps(found, indent=2))
    else:
        print(text(comparison, recommend(comparison), most=len(comparison.metrics) if args.all else MOST_SHOWN))
        for line in worse:
            print(f"worse: {line}")
        if report:
            if report[2] is not None and report[2].note:
                print(report[2].note)
            print(f"open {report[1]} (Markdown: {report[0]})")
    return 3 if worse else 0


def _judged(comparison: Comparison, name: str) -> list[tuple[str, Cell]]:
    """Each setting's cell of a figure; a gate that could not have fallen is an error, never a pass."""
    cells = [(setting.label, setting.cells[name]) for setting in comparison.settings if name in setting.cells]
    if not cells:
        raise UsageError(f"--gate {name}: not among the figures compared ({', '.join(comparison.metrics)})")
    if not cells[0][1].better:
        raise UsageError(f"--gate {name}: it is not known which way is better for this figure")
    if len(comparison.settings) < 2:
        raise UsageError(
            f"--gate {name}: all runs are of one setting ({comparison.baseline}), so nothing is compared; LABEL=PATH "
            "tells settings apart"
        )
    without = [one.label for one in comparison.settings if name not in one.cells]
    if without:
        raise UsageError(f"--gate {name}: not recorded for {', '.join(without)}, so nothing says whether it is worse")
    single = [label for label, cell in cells if cell.finding == "one run"]
    if single:
        raise UsageError(
            f"--gate {name}: single runs cannot be told from noise; give repeats of each setting "
            f"(not judged: {', '.join(single)})"
        )
    return cells


def _gated(comparison: Comparison, names: list[str]) -> list[str]:
    """Settings that are worse than the baseline beyond the noise, in words."""
    found = []
    for name in names:
        for label, cell in _judged(comparison, name):
            if cell.improved is False:
                share = f" ({cell.delta_share:+.1%})" if cell.delta_share is not None else ""
                found.append(f"{name}: {label} has {cell.median:,.4g} {cell.unit}{share}")
    return found
