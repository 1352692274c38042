"""How true are the latencies that the load generator reports? Beside sglang.bench_serving, in one run.

usage: bench_load.py [--streams 16 64 256] [--rounds 6]

A local server sends 64 tokens on a fixed schedule (first after 100 ms, then every 20 ms) and logs when it really sent
each. Both clients warm up with as many requests as streams, then run the same closed loop against a fresh server; an
error is what the client reported less what the server logged. bench_serving comes from an installed CPU server
(hicache-lab server install --release 0.5.10).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hicache_lab.serving.load as lab
from hicache_lab.serving import cpu_server

TTFT_MS, ITL_MS, TOKENS, PROMPT_TOKENS = 100.0, 20.0, 64, 64
IDEAL_S = (TTFT_MS + (TOKENS - 1) * ITL_MS) / 1e3
RIVAL_RELEASE = "0.5.10"  # the newest one whose bench_serving needs no further packages
SCHEDULE_SERVER = Path(__file__).with_name("schedule_server.py")
GOALS = {
    "ttft_error_ms": {16: 5.0, 64: 15.0},
    "itl_error_percent": {16: 1.0, 64: 1.0},
    "share_of_ideal_rate": {256: 0.9},
}


@dataclass(frozen=True)
class Row:
    """One client at one number of streams; errors against the server's own log."""

    client: str
    streams: int
    ttft_error_ms: float
    itl_error_percent: float
    share_of_ideal_rate: float
    note: str = ""

    @property
    def text(self) -> str:
        errors = f"{self.ttft_error_ms:>+7.1f} ms  {self.itl_error_percent:>+8.2f} %"
        return f"{self.client:<21} {self.streams:>7}  {errors}  {100 * self.share_of_ideal_rate:>6.1f} %  {self.note}"


@contextlib.contextmanager
def schedule_server(log: Path) -> Iterator[str]:
    """A fresh server; its URL."""
    command = [sys.executable, str(SCHEDULE_SERVER), "--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)]
    command += ["--tokens", str(TOKENS), "--log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def truth(log: Path, requests: int) -> tuple[float, float]:
    """Mean TTFT and mean inter-token time in seconds of the last ``requests`` streams, as they were sent."""
    sent = [json.loads(line)["sent_s"] for line in log.read_text().splitlines()][-requests:]
    ttft = sum(times[0] for times in sent) / len(sent)
    itl = sum((times[-1] - times[0]) / (len(times) - 1) for times in sent) / len(sent)
    return ttft, itl


def ours(streams: int, requests: int, folder: Path) -> Row:
    """This package's load generator."""
    log = folder / f"ours-{streams}.jsonl"
    with schedule_server(log) as url:
        plan = lab.random_prompts(seed=1, prompts=requests, prompt_tokens=PROMPT_TOKENS, answer_tokens=TOKENS)
        result = lab.run_load(url, plan, pace=lab.Pace(concurrency=streams), warmup=streams, progress=False)
    assert len(result.succeeded) == requests, result.ended
    ttft, itl = truth(log, requests)
    assert result.ttft.mean is not None and result.itl.mean is not None
    return Row(
        "hicache_lab",
        streams,
        1e3 * (result.ttft.mean - ttft),
        100 * (result.itl.mean / itl - 1),
        result.requests_per_s * IDEAL_S / streams,
        "machine too busy" if result.lag.too_busy else "",
    )


def rival(streams: int, requests: int, folder: Path, environment: cpu_server.Environment) -> Row:
    """sglang.bench_serving, with the same prompts' lengths."""
    log, report = folder / f"rival-{streams}.jsonl", folder / f"rival-{streams}.json"
    absent = folder / "absent"
    absent.mkdir(exist_ok=True)
    # imported at the top of bench_serving, not needed for random ids
    (absent / "datasets.py").write_text("def load_dataset(*words, **options):\n    raise RuntimeError('no data set')\n")
    environ = cpu_server.Launch(environment.release).environ()
    environ["PYTHONPATH"] += os.pathsep + str(absent)
    model = cpu_server.make_models(environment) / "tiny-llama"
    with schedule_server(log) as url:
        command = [str(environment.python), "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url]
        command += ["--dataset-name", "random-ids", "--tokenizer", str(model), "--model", str(model)]
        command += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(TOKENS)]
        command += ["--random-range-ratio", "1.0", "--num-prompts", str(requests), "--max-concurrency", str(streams)]
        command += ["--warmup-requests", str(streams)]
        command += ["--output-file", str(report), "--disable-tqdm"]
        subprocess.run(command, env=environ, check=True, capture_output=True)
    told = json.loads(report.read_text().splitlines()[-1])
    ttft, itl = truth(log, requests)
    return Row(
        f"bench_serving {environment.release}",
        streams,
        told["mean_ttft_ms"] - 1e3 * ttft,
        100 * (told["mean_itl_ms"] / (1e3 * itl) - 1),
        told["request_throughput"] * IDEAL_S / streams,
    )


def judged(row: Row) -> str:
    """Which goals this row meets or misses."""
    words = []
    for name, limits in GOALS.items():
        if row.streams in limits:
            value, limit = getattr(row, name), limits[row.streams]
            met = value >= limit if name == "share_of_ideal_rate" else abs(value) <= limit
            sign = "≥" if name == "share_of_ideal_rate" else "≤"
            words.append(f"{name} {sign} {limit:g} {'met' if met else 'MISSED'}")
    return "; ".join(words)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--rounds", type=int, default=6, help="requests a stream")
    settings = parser.parse_args()
    environment = cpu_server.installed(RIVAL_RELEASE)
    if environment is None:
        print(f"bench_serving is not measured: hicache-lab server install --release {RIVAL_RELEASE} brings it")
    before = os.getloadavg()[0]
    print(f"load average before: {before:.1f} on {os.cpu_count()} cores; the goals are for an idle machine")
    print("client                streams  TTFT error   ITL error   of the ideal rate")
    with tempfile.TemporaryDirectory() as name:
        for streams in settings.streams:
            requests = streams * settings.rounds
            rows = [ours(streams, requests, Path(name))]
            if environment is not None:
                rows.append(rival(streams, requests, Path(name), environment))
            for row in rows:
                print(row.text)
            print(f"  {'goals not judged: the machine was busy' if before > 1 else judged(rows[0])}")
            if len(rows) > 1:
                ratio = rows[1].ttft_error_ms / max(rows[0].ttft_error_ms, 0.1)
                print(f"  bench_serving's TTFT error is {ratio:.1f} times ours")


if __name__ == "__main__":
    main()
