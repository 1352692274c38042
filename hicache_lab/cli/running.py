"""``hicache-lab run NOTEBOOK… -p k=v``: notebooks headless, each into its own run folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import HicacheLabError, UsageError
from hicache_lab.runs import (
    Limits,
    RunResult,
    execute,
    find_notebook,
    inspect_parameters,
    parse_parameter,
    terminated_as_interrupted,
)
from hicache_lab.runs.execution import RUN_NAME


class _NotebookArgument(argparse.Action):
    """Collects the notebooks and shows their parameters in ``run NOTEBOOK --help``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        setattr(namespace, self.dest, values)
        parser.epilog = "\n\n".join(_describe(str(name)) for name in values or [])


def _describe(name: str) -> str:
    try:
        notebook = find_notebook(name)
        lines = [f"  {parameter}" for parameter in inspect_parameters(notebook).values()]
    except HicacheLabError as error:
        return str(error)
    return "\n".join([f"parameters of {notebook.name} (name: type = default):", *(lines or ["  none"])])


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """The flags of ``run``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"`hicache-lab {command} NOTEBOOK --help` lists that notebook's parameters."
    parser.add_argument(
        "notebooks",
        nargs="+",
        action=_NotebookArgument,
        metavar="NOTEBOOK",
        help="an .ipynb, or the name of a shipped one such as 01_incident",
    )
    parser.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a notebook parameter; repeatable",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("reports"),
        metavar="DIR",
        help="where run folders go (default: reports)",
    )
    parser.add_argument("--name", help="the run folder's name (default: the notebook's)")
    parser.add_argument("--cell-timeout", type=float, default=600, metavar="SECONDS", help="limit for one cell (600)")
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="limit for one notebook (3600)")
    parser.add_argument("--no-html", action="store_true", help="leave the one-file HTML out")
    parser.add_argument("--json", action="store_true", help="print the result records as JSON")


def parse_assignments(notebook: Path, assignments: Sequence[str]) -> dict[str, Any]:
    """``["size_gb=48"]`` as typed values; an unknown name is kept for the check to refuse."""
    known = inspect_parameters(notebook)
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"-p {assignment}: expected NAME=VALUE, for example -p hicache_size_gb=48")
        if name in values:
            raise UsageError(f"-p {name}: given twice ({values[name]!r} and {text!r})")
        values[name] = parse_parameter(known[name], text) if name in known else text
    return values


def run(_command: str, args: argparse.Namespace) -> int:
    """Run each notebook; exit 1 if any did not complete."""
    notebooks = [find_notebook(name) for name in args.notebooks]
    if args.name is not None and not RUN_NAME.fullmatch(args.name):
        raise UsageError(f"--name: expected letters, digits, dot, dash and underscore, got {args.name!r}")
    if args.name and len(notebooks) > 1:
        raise UsageError("--name: names one run folder; give one notebook")
    limits = Limits(args.cell_timeout, args.timeout)
    # every notebook's parameters are checked before the first one runs
    values = {notebook: parse_assignments(notebook, args.parameter) for notebook in notebooks}
    results: list[tuple[Path, RunResult]] = []
    with terminated_as_interrupted():
        for notebook in notebooks:
            folder = args.output / (args.name or notebook.stem)
            result = execute(notebook, folder, values[notebook], limits=limits, html=not args.no_html)
            results.append((folder, result))
            if result.status == "interrupted":
                break
            if not args.json:
                print(_summary(folder, result), flush=True)
    if len(results) > 1 and not args.json:
        # how each ended, its verdict where it has one, and where to look
        print(f"\n{'notebook':<26} {'status':<12} {'verdict':<10} open")
        for folder, result in results:
            verdict = result.figures["verdict"].value if "verdict" in result.figures else ""
            print(f"{result.notebook:<26} {result.status:<12} {verdict:<10} {_page(folder, result)}")
    if args.json:
        json.dump([{"folder": str(folder), **asdict(result)} for folder, result in results], sys.stdout, indent=2)
        print()
    if any(result.status == "interrupted" for _, result in results):
        raise KeyboardInterrupt
    return 0 if all(result.complete for _, result in results) else 1


def _page(folder: Path, result: RunResult) -> Path:
    """The page to open, or the folder if there is none."""
    return folder / next((name for name in result.files if name.endswith(".html")), "")


def _shown(value: str | int | float) -> str:
    """A number with thousands separated, a long text on one line."""
    if isinstance(value, bool | str):
        text = " ".join(str(value).split())
        return text if len(text) <= 100 else f"{text[:97]}…"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    # two milliseconds are not "0.00 seconds"
    return f"{value:.4g}"


def _summary(folder: Path, result: RunResult) -> str:
    """What ran, how it ended, the first figures it left and where to look."""
    lines = [f"{result.notebook}: {result.status} in {result.seconds:.1f} s"]
    for name, figure in result.figures.items():
        if isinstance(figure.value, str | int | float):
            shown = _shown(figure.value)
            lines.append(f"  {name:<28} {shown} {figure.unit}".rstrip() + f"  ({figure.source})")
    if result.error:
        where = f" in code cell {result.error.cell}" if result.error.cell else ""
        lines.append(f"  {result.error.kind}{where}: {result.error.message}")
    page = _page(folder, result)
    lines.append(f"  see {folder}" if page == folder else f"  open {page}")
    return "\n".join(lines)
