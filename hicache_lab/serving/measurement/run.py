"""Measure a server, or read a recorded measurement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hicache_lab.base.errors import HostError, InputError, UsageError
from hicache_lab.base.files import atomic_write
from hicache_lab.base.resources import data_dir
from hicache_lab.serving import load
from hicache_lab.serving.client import Description, SglangClient
from hicache_lab.serving.load.thread_loop import run_in_thread
from hicache_lab.traffic.traces import read_trace

DESCRIPTION_FILE = "server.json"
WORKLOADS = ("write_evict_read", "multi_turn", "rounds", "shared_prefix", "random", "trace_replay")


@dataclass(frozen=True)
class ServerRun:
    """A server and what a load measured on it.

    Attributes:
        server: what ran there.
        result: what was measured.
        recorded_in: the folder it was read from; None for a live measurement.
    """

    server: Description
    result: load.LoadResult
    recorded_in: Path | None = None

    @property
    def banner(self) -> str:
        """A sentence that says where the numbers come from."""
        what = f"SGLang {quoted(self.server.release)}, {quoted(self.server.model_path)}"
        if self.recorded_in is None:
            return f"**Measured** just now on {what} at {quoted(self.result.base_url)}."
        return (
            f"**These data are recorded, not live**: *measured* on {what} on a CPU and kept in "
            f"{quoted(self.recorded_in.name)}. The load's parameters are those of that run. "
            f"Throughput and latency of a CPU say nothing about a GPU."
        )

    def write(self, folder: Path) -> None:
        """Write the load's files and the server's description.

        Raises:
            HostError: the folder cannot be written, or the disk is full.
        """
        self.result.write(folder)
        try:
            atomic_write(folder / DESCRIPTION_FILE, self.server.as_json())
        except OSError as error:
            raise HostError(f"could not write {folder / DESCRIPTION_FILE}: {error.strerror or error}") from error


def quoted(text: str) -> str:
    """A server's words as a Markdown code span: neither Markdown nor HTML in them is interpreted."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`"


def describe(base_url: str, api_key_env: str = "", ca_file: str = "") -> Description:
    """Ask a server what it is.

    Raises:
        ServerError: not reachable, not ready, not SGLang.
    """

    async def ask() -> Description:
        async with SglangClient(base_url, api_key_env=api_key_env, ca_file=ca_file or None) as client:
            return Description.of(await client.probe())

    return run_in_thread(ask())


def make_load_plan(
    workload: str,
    *,
    seed: int,
    prompts: int,
    prompt_tokens: int,
    answer_tokens: int,
    evict_tokens: int = 0,
    device_tokens: int | None = None,
    trace: str = "",
    shrink: float = 1.0,
    context_tokens: int | None = None,
) -> load.Plan:
    """A plan from a notebook's parameters.

    Args:
        workload: one of ``WORKLOADS``.
        seed: of the prompts.
        prompts: prompts to write and read, conversations of three turns, groups of four, or random prompts.
        prompt_tokens: one prompt, first message or shared prefix.
        answer_tokens: one answer.
        evict_tokens: tokens between writing and reading; 0 takes one and a half device pools.
        device_tokens: the device pool, for that default.
        trace: file of the trace to replay; ``prompts`` says how many of its requests.
        shrink: replay blocks and answers this many times shorter.
        context_tokens: the server's context, which prompts of a trace are cut to.

    Raises:
        UsageError: an unknown workload or a size that makes no sense.
    """
    _at_least(1, prompts=prompts, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, shrink=shrink)
    _at_least(0, evict_tokens=evict_tokens)
    if workload not in WORKLOADS:
        raise UsageError(f"workload: expected one of {', '.join(WORKLOADS)}, got {workload!r}")
    if workload == "trace_replay":
        if not trace:
            raise UsageError("trace: name the file of the trace to replay")
        return load.trace_replay(
            read_trace(Path(trace)),
            prompts,
            seed=seed,
            shrink=shrink,
            most_prompt_tokens=None if context_tokens is None else context_tokens - answer_tokens,
            most_answer_tokens=answer_tokens,
        )
    evict_tokens = evict_tokens or int(1.5 * (device_tokens or 0))
    if workload == "write_evict_read" and not evict_tokens:
        raise UsageError("evict_tokens: the server does not tell its device pool, so say how many tokens fill it")
    later_tokens = max(prompt_tokens // 4, 1)
    # each plan takes the sizes that it has
    sizes = {
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "evict_tokens": evict_tokens,
        "conversations": prompts,
        "turns": 3,
        "first_tokens": prompt_tokens,
        "turn_tokens": later_tokens,
        "groups": prompts,
        "prompts_per_group": 4,
        "prefix_tokens": prompt_tokens,
        "suffix_tokens": later_tokens,
    }
    return load.plan_of(workload, seed, sizes)


def _at_least(least: int, **given: float) -> None:
    for name, value in given.items():
        if not value >= least:
            raise UsageError(f"{name}: expected {least} or more, got {value}")


def measure(
    base_url: str,
    *,
    workload: str = "write_evict_read",
    seed: int = 1,
    prompts: int = 8,
    prompt_tokens: int = 400,
    answer_tokens: int = 8,
    evict_tokens: int = 0,
    trace: str = "",
    shrink: float = 1.0,
    concurrency: int = 1,
    rate_per_s: float = 0.0,
    duration_s: float = 0.0,
    max_requests: int = 10_000,
    max_tokens: int = 20_000_000,
    warmup: int = 2,
    api_key_env: str = "",
    ca_file: str = "",
    folder: Path | None = None,
    progress: bool = True,
) -> ServerRun:
    """Describe a server and put a load on it.

    Args:
        base_url: the server; an empty text reads the newest recorded run instead, after the same checks.
        workload, seed, prompts, prompt_tokens, answer_tokens, evict_tokens, trace, shrink: see ``make_load_plan``.
        concurrency: sessions at once (a trace comes at its own times).
        rate_per_s: sessions a second (Poisson); 0 keeps ``concurrency`` of them running.
        duration_s: start no prompt after this long; 0: no limit.
        max_requests, max_tokens: hard caps.
        warmup: prompts before measuring.
        api_key_env: NAME of the environment variable that holds the key.
        ca_file: certificate authority (PEM) of a server with a private TLS certificate; empty: the system's.
        folder: write the run there at once, so that an interrupted load is kept although its caller goes down too.
        progress: a bar on stderr.

    Raises:
        UsageError: parameters that make no sense.
        ServerError: the server cannot be measured.
        HostError: the folder cannot be written.
    """
    pace = load.Pace(rate_per_s=rate_per_s, seed=seed) if rate_per_s else load.Pace(concurrency=concurrency)
    if workload == "trace_replay" and not rate_per_s:
        pace = load.Pace(by_trace=True)
    limits = load.Limits(duration_s=duration_s or None, max_requests=max_requests, max_tokens=max_tokens)
    recorded = None if base_url else read_run(recorded_runs()[-1])
    server = recorded.server if recorded else describe(base_url, api_key_env, ca_file)
    plan = make_load_plan(
        workload,
        seed=seed,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        evict_tokens=evict_tokens,
        device_tokens=server.device_tokens,
        trace=trace,
        shrink=shrink,
        context_tokens=server.context_length,
    )
    if recorded is None:
        result = load.run_load(
            base_url,
            plan,
            pace=pace,
            limits=limits,
            warmup=warmup,
            watch_period_s=0.5,
            api_key_env=api_key_env,
            progress=progress,
            client_options={"ca_file": ca_file or None},
        )
    run = recorded or ServerRun(server, result)
    if folder is not None:
        run.write(folder)
    return run


def read_run(folder: str | Path) -> ServerRun:
    """A recorded run.

    Raises:
        InputError: not such a folder, or files that do not fit together.
    """
    folder = Path(folder).expanduser()
    if not (folder / DESCRIPTION_FILE).exists():
        raise InputError(
            f"{folder}: expected a measured run (with {DESCRIPTION_FILE}, load.json and two parquet files)"
        )
    return ServerRun(Description.from_file(folder / DESCRIPTION_FILE), load.LoadResult.read(folder), folder)


def recorded_runs() -> tuple[Path, ...]:
    """The folders of the recorded runs that ship with the package, oldest release first.

    Raises:
        HostError: there is none.
    """
    folders = sorted(path.parent for path in (data_dir() / "runs").glob(f"*/{DESCRIPTION_FILE}"))
    if not folders:
        raise HostError(f"no recorded run below {data_dir() / 'runs'}; reinstall the package")
    return tuple(folders)
