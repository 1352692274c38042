"""How fast the exact curve, the two-tier replay and the way from a file to a curve are, beside named rivals.

    python bench/bench_cachesim.py [--references 10000000] [--repeats 5] [--large] [--rivals PYTHON]

Everything compared is measured in the same run, in turn, in CPU seconds, and the least of each counts: the machine may
be shared. ``--rivals`` names the python of an environment with bench/requirements.txt; without it one is made in a
temporary folder. ``--large`` adds 10⁸ references (about 4 GB of memory). Exit code 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hicache_lab.base.units import GIB, MIB
from hicache_lab.traffic.cachesim import ReplaySettings, WritePolicy, hit_curve, replay, replay_blocks, tier_rates
from hicache_lab.traffic.traces import Trace, generate

HERE = Path(__file__).resolve().parent
REFERENCES_A_REQUEST = 24.1
# the numbers of kimi-k2.5 in kvcache-simulator's catalogue: bytes of a 512-token block
BLOCK_BYTES = 70_272 * 512
BUDGETS_GIB = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
GOALS = {
    "curve / numpy sum of the ids": (20.0, "at most"),
    "OrderedDict at one size / curve": (50.0, "at least"),
    "libcachesim tuned at one size / curve": (5.0, "at least"),
    "two-tier replay, Mref/s": (20.0, "at least"),
    "two tiers, 60 × 60 sizes, ms": (1.0, "at most"),
    "kvcache-simulator / file to curve": (10.0, "at least"),
    "memory, file to curve / kvcache-simulator": (0.5, "at most"),
    "largest difference from kvcache-simulator": (1e-4, "at most"),
    "10^8: curve / numpy sum of the ids": (20.0, "at most"),
}


class Report:
    """Collects measurements, prints each as it comes, and judges those that have a goal."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def say(self, name: str, value: float, unit: str = "") -> None:
        """Print a figure, with its goal if there is one."""
        judged = ""
        if name in GOALS:
            bound, sense = GOALS[name]
            good = value <= bound if sense == "at most" else value >= bound
            judged = f"   goal {sense} {bound:g}: {'met' if good else 'MISSED'}"
            if not good:
                self.missed.append(name)
        print(f"  {name:<46} {value:12,.4g} {unit}{judged}", flush=True)


def least(repeats: int, *works: Callable[[], Any]) -> list[float]:
    """The least CPU seconds of each work, all of them in turn: what else runs on the machine hits them alike."""
    best = [float("inf")] * len(works)
    for _ in range(repeats):
        for index, work in enumerate(works):
            start = time.thread_time()
            work()
            best[index] = min(best[index], time.thread_time() - start)
    return best


def ordered_dict_hits(trace: Trace, capacity: int) -> int:
    """What one would write first: an LRU at one size."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    flat, bounds = trace.ids.tolist(), trace.offsets.tolist()
    for start, end in pairwise(bounds):
        blocks = flat[start:end]
        for block in blocks:
            if block not in cache:
                break
            hits += 1
        for block in reversed(blocks):
            if block in cache:
                cache.move_to_end(block)
            else:
                if len(cache) >= capacity:
                    cache.popitem(last=False)
                cache[block] = None
    return hits


def bench_curve(trace: Trace, report: Report, repeats: int, prefix: str = "") -> None:
    """The exact curve of all sizes against the time of merely summing the ids."""
    ids = trace.ids.astype(np.uint64)
    hit_curve(trace.head(100))
    # both are short: many turns find a quiet moment on a shared machine
    summing, curving = least(3 * repeats, ids.sum, lambda: hit_curve(trace))
    report.say(f"{prefix}numpy sum of 8-byte ids, ms", 1000 * summing)
    report.say(f"{prefix}exact curve of all sizes, ms", 1000 * curving)
    report.say(f"{prefix}exact curve, Mref/s", trace.references / curving / 1e6)
    report.say(f"{prefix}curve / numpy sum of the ids", curving / summing)


def bench_single_size(trace: Trace, report: Report) -> None:
    """OrderedDict at one size, and that its hits are the curve's."""
    curve = hit_curve(trace)
    for capacity in (226, 10_000, 1_000_000):
        hits = 0

        def rival(size: int = capacity) -> None:
            nonlocal hits
            hits = ordered_dict_hits(trace, size)

        curving, took, again = least(1, lambda: hit_curve(trace), rival, lambda: hit_curve(trace))
        curving = min(curving, again)
        if hits != curve.hits_at(capacity):
            raise SystemExit(f"OrderedDict finds {hits} hits at {capacity} blocks, the curve {curve.hits_at(capacity)}")
        report.say(f"OrderedDict LRU at {capacity:,} blocks, s", took)
        if capacity == 10_000:
            report.say("OrderedDict at one size / curve", took / curving)


def bench_tiers(trace: Trace, report: Report, repeats: int) -> None:
    """Two tiers request by request, pairs of sizes, and the node-granular replay."""
    device, host = 1_000_000, 8_000_000
    (took,) = least(repeats, lambda: replay_blocks(trace, device, host, WritePolicy.WRITE_THROUGH))
    report.say("two-tier replay, Mref/s", trace.references / took / 1e6)
    curve = hit_curve(trace)
    axis = np.linspace(0, curve.largest_useful_blocks * curve.block_tokens, 60).astype(np.int64)
    (looked,) = least(50, lambda: tier_rates(curve, axis[:, None], axis, WritePolicy.WRITE_BACK))
    report.say("two tiers, 60 × 60 sizes, ms", 1000 * looked)
    head = trace.head(12_000)
    (nodes,) = least(1, lambda: replay(head, ReplaySettings(device, host, page_size=64)))
    report.say("replay by node rules (12,000 requests), kreq/s", head.requests / nodes / 1e3)


def bench_libcachesim(trace: Trace, report: Report, python: str, folder: Path) -> None:
    """libcachesim's LRU at one size, by its own reader, with the hash table size that suits it best."""
    record = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    rows = np.zeros(trace.ids.size, record)
    order = np.concatenate([np.arange(b - 1, a - 1, -1) for a, b in pairwise(trace.offsets)])
    rows["id"], rows["size"], rows["next"] = trace.ids[order], 1, -1
    path = folder / "trace.oracleGeneral"
    rows.tofile(path)
    del rows
    (curving,) = least(3, lambda: hit_curve(trace))
    fastest = float("inf")
    for power in (12, 14, 16, 18, 24):
        done = json.loads(run([python, str(HERE / "rival_libcachesim.py"), str(path), "10000", str(power)]))
        report.say(f"libcachesim LRU at 10,000, hashpower {power}, s", done["seconds"])
        fastest = min(fastest, done["seconds"])
    report.say("libcachesim tuned at one size / curve", fastest / curving)


FILE_TO_CURVE = """
import json, sys, time
from hicache_lab.traffic.traces import read_trace
from hicache_lab.traffic.cachesim import hit_curve
trace = read_trace(sys.argv[1])
curve = hit_curve(trace, count="tokens", count_from=trace.requests // 2)
rates = [float(curve.rate_at(int(blocks))) for blocks in sys.argv[2:]]
# getrusage would count what the parent held before exec
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"seconds": time.process_time(), "rates": rates,
                  "mb": peak / 1024}))
"""


def bench_file(trace: Trace, report: Report, rivals: Path, folder: Path, repeats: int) -> None:
    """From a JSONL file to hit rates at fifteen budgets: ours in a fresh process, kvcache-simulator's command."""
    path = folder / "trace.jsonl"
    write_jsonl(trace, path)
    report.say("trace file, MB", path.stat().st_size / MIB)
    blocks = [int(budget * GIB // BLOCK_BYTES) for budget in BUDGETS_GIB]
    # one warm run first: compilation is paid once and kept on disk
    ours = [
        json.loads(run([sys.executable, "-c", FILE_TO_CURVE, str(path), *map(str, blocks)])) for _ in range(repeats + 1)
    ]
    best = min(done["seconds"] for done in ours[1:])
    report.say("file to curve, s (imports included)", best)
    report.say("file to curve, MB resident", ours[-1]["mb"])
    out = folder / "rival.json"
    command = [str(rivals / "kvcache-simulator"), "run", "--trace", str(path), "--model", "kimi-k2.5"]
    command += ["--kv-precision", "bf16_fp16", "--block-size", "512", "--policies", "lru", "--no-progress"]
    command += ["--budgets-gib", ",".join(map(str, BUDGETS_GIB)), "--format", "json", "--output", str(out)]
    peak, took = run_and_weigh(command)
    points = json.loads(out.read_text())["points"]
    differences = [
        abs(point["results"]["lru"]["hitRate"] - rate) for point, rate in zip(points, ours[-1]["rates"], strict=False)
    ]
    report.say("kvcache-simulator, s", took)
    report.say("kvcache-simulator, MB resident", peak)
    report.say("kvcache-simulator / file to curve", took / best)
    report.say("memory, file to curve / kvcache-simulator", ours[-1]["mb"] / peak)
    report.say(f"budgets compared of {len(BUDGETS_GIB)}", len(points))
    report.say("largest difference from kvcache-simulator", max(differences))


def write_jsonl(trace: Trace, path: Path) -> None:
    """Write a trace in Mooncake's format."""
    flat, bounds = trace.ids.tolist(), trace.offsets.tolist()
    arrival = trace.arrival_s if trace.arrival_s is not None else np.zeros(trace.requests)
    with path.open("w") as out:
        for r, (start, end) in enumerate(pairwise(bounds)):
            out.write(
                f'{{"timestamp": {int(1000 * arrival[r])}, "input_length": {trace.input_tokens[r]}, '
                f'"output_length": {trace.output_tokens[r]}, "hash_ids": [{", ".join(map(str, flat[start:end]))}]}}\n'
            )


def run(command: list[str]) -> str:
    """The output of a command that must succeed."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def run_and_weigh(command: list[str]) -> tuple[float, float]:
    """Run a command: (MB of the largest process of its tree, CPU seconds of all)."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(used.ru_maxrss / 1024, used.ru_utime + used.ru_stime)"
    )
    peak, took = run([sys.executable, "-c", code, *command]).strip().splitlines()[-1].split()
    return float(peak), float(took)


def rivals_in(folder: Path) -> Path:
    """Make an environment with the rivals; its bin folder."""
    import venv

    venv.create(folder / "rivals", with_pip=True)
    binaries = folder / "rivals" / "bin"
    run([str(binaries / "pip"), "install", "--quiet", "-r", str(HERE / "requirements.txt")])
    return binaries


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--rivals", type=Path, metavar="PYTHON")
    args = parser.parse_args()
    report = Report()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{args.references:,} references, {os.cpu_count()} cores, load average {load}")
    trace = generate("mooncake_like", requests=int(args.references / REFERENCES_A_REQUEST), seed=7)
    print(f"  {trace.requests:,} requests, {trace.references:,} references, {trace.unique_blocks:,} unique blocks")
    bench_curve(trace, report, args.repeats)
    bench_tiers(trace, report, args.repeats)
    bench_single_size(trace, report)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        binaries = args.rivals.parent if args.rivals else rivals_in(folder)
        bench_libcachesim(trace, report, str(binaries / "python"), folder)
        bench_file(trace, report, binaries, folder, max(args.repeats - 2, 1))
    if args.large:
        del trace
        large = generate("mooncake_like", requests=int(1e8 / REFERENCES_A_REQUEST), seed=8)
        print(f"  {large.references:,} references, {large.unique_blocks:,} unique blocks")
        bench_curve(large, report, 3, prefix="10^8: ")
    if report.missed:
        print("missed: " + "; ".join(report.missed))
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
