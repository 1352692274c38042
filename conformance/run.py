"""Compare one SGLang release's own host-pool code with the library.

    python conformance/run.py --release 0.5.23

Downloads the release's wheel without its dependencies, unpacks its Python, runs its constructors and its check on
``cases.jsonl`` in an environment that has torch, and gives the outcome to ``vectors``; ``read-source``
reads the same tree. Exit code 0: equal; 3: a difference, named with era, field and case; 1: it could not be run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from records import read_records
from vectors import Report, replay

from hicache_lab.base.errors import HicacheLabError, HostError
from hicache_lab.serving.cpu_server.home import built_aside, home
from hicache_lab.sglang.releases import VERIFIED, parse_version, rules_for
from hicache_lab.sglang.source import open_tree, read_source

HERE = Path(__file__).resolve().parent
CASES = HERE / "cases.jsonl"
NEEDS = ("torch==2.13.0", "numpy", "psutil", "msgspec")
NEEDED_BYTES = 8 * 10**9  # the public torch wheel brings its CUDA libraries
ENOUGH_CASES = 30  # fewer than this were carried out: the harness does not fit the release any more


def torch_python(cache: Path) -> Path:
    """The interpreter of the environment that has torch, made once below ``cache``.

    Raises:
        HostError: no room for it, or pip failed.
    """
    place = cache / "torch-env"
    python = place / "bin" / "python"
    if python.exists():
        return python
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise HostError(f"{cache}: torch needs {NEEDED_BYTES / 1e9:.0f} GB of disk, {free / 1e9:.1f} GB are free")
    print(f"installing {', '.join(NEEDS)} into {place} (once, about 5 GB)", file=sys.stderr)
    # a virtual environment knows its own path, so it cannot be built aside; a failed one is removed
    try:
        venv.create(place, with_pip=True, symlinks=True)
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *NEEDS], "installing torch")
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return python


def unpacked(release: str, cache: Path) -> Path:
    """The Python files of a release, downloaded once.

    Raises:
        HostError: pip found no wheel of that release.
    """
    place = cache / "sources" / str(parse_version(release))
    if place.exists():
        return place
    with built_aside(place) as aside:
        wheels = aside / "wheel"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--python-version", "3.11", "--dest", str(wheels), f"sglang=={release}"]
        _run(command, f"downloading sglang {release}")
        [wheel] = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(aside, [name for name in archive.namelist() if name.endswith(".py")])
        shutil.rmtree(wheels)
    return place


def _run(command: Sequence[str | Path], what: str) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        # pip's own warnings are not the reason; its list of every version is long
        reason = "\n".join(line[:300] for line in said if not line.startswith("WARNING"))[-2000:]
        raise HostError(f"{what} failed (exit code {done.returncode}):\n{reason}")
    return done.stdout


def execute(release: str, root: Path, python: Path, cases: Path, out: Path) -> tuple[int, dict[str, int]]:
    """Run the release's code; how many cases it carried out, and why it could not carry out others."""
    # -I would hide the worker's own folder; nothing of this project is imported there
    told = _run([python, HERE / "worker.py", root, release, cases, out], f"running the code of {release}")
    summary = json.loads(told.splitlines()[-1])
    return int(summary["ran"]), dict(summary["skipped"])


def lines(release: str, ran: int, skipped: dict[str, int], report: Report) -> list[str]:
    """What a reader is told."""
    rules = rules_for(release)
    known = "examined before" if release in VERIFIED else f"NOT examined before: {rules.warning}"
    told = [f"sglang {release} (era {rules.era}, {known}): its own code carried out {ran} cases"]
    for kind, tally in sorted(report.by_kind.items()):
        told.append(f"  {kind}: {tally.checked} compared, {tally.mismatched} differ, {tally.unsupported} unsupported")
    told += [f"  not carried out: {count} × {reason}" for reason, count in sorted(skipped.items())]
    told += [f"  unsupported: {count} × {reason}" for reason, count in sorted(report.reasons.items())]
    for mismatch in report.mismatches:
        told.append(
            f"  DIFFERS era {rules.era}, field {mismatch.name}, case {mismatch.case_id} ({mismatch.kind}): "
            f"release {mismatch.recorded!r}, library {mismatch.computed!r}"
        )
    total = report.total
    told.append(f"{total.checked - total.mismatched} of {total.checked} cases equal")
    return told


def reading_of(root: Path) -> tuple[bool, list[str]]:
    """Whether the release's tree follows its era's rules for ``read-source``, and what a reader is told."""
    reading = read_source(open_tree(root))
    if reading.matches:
        return True, [f"read-source: the tree follows {reading.nearest}"]
    wrong = [str(difference) for difference in reading.differences] or [str(reading.contradiction)]
    return False, [f"  DIFFERS read-source: {line}" for line in wrong]


def not_carried_out(release: str, ran: int, report: Report) -> str:
    """What should have been compared and was not; empty when enough was."""
    if ran < ENOUGH_CASES:
        return f"only {ran} cases"
    kinds = [kind for kind, layouts in sorted(rules_for(release).layouts.items()) if layouts]
    missing = [kind for kind in kinds if kind not in report.by_kind or not report.by_kind[kind].checked]
    return f"no case of an {' or '.join(missing)} pool" if missing else ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare a release's own host-pool code with the library.")
    parser.add_argument("--release", required=True, action="append", help="e.g. 0.5.23; may be given again")
    parser.add_argument("--cases", type=Path, default=CASES, help="a case file (default: the project's)")
    parser.add_argument("--cache", type=Path, help="where wheels and torch are kept (default: the user's cache)")
    parser.add_argument("--python", type=Path, help="an interpreter that has torch, instead of its own environment")
    args = parser.parse_args(argv)
    cache = args.cache or home() / "conformance"
    worst = 0
    try:
        python = args.python or torch_python(cache)
        for release in args.release:
            root = unpacked(release, cache)
            out = cache / f"outcome-{parse_version(release)}.jsonl"
            ran, skipped = execute(release, root, python, args.cases, out)
            report = replay(read_records(out))
            follows, read = reading_of(root)
            print("\n".join([*lines(release, ran, skipped, report), *read]), flush=True)
            missing = not_carried_out(release, ran, report)
            if missing and args.cases == CASES:
                raise HostError(
                    f"{missing} could be carried out: this release constructs its pools in a new way; "
                    f"teach conformance/pools.py about it"
                )
            if report.total.mismatched or report.total.unsupported or not follows:
                worst = 3
    except HicacheLabError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return error.exit_code
    return worst


if __name__ == "__main__":
    sys.exit(main())
