"""Predicted beside observed, and one run beside an earlier one; rows for tables, pure functions."""

from __future__ import annotations

from hicache_lab.serving.load import LoadResult
from hicache_lab.serving.measurement.predict import Prediction
from hicache_lab.serving.measurement.run import ServerRun, quoted
from hicache_lab.serving.measurement.simulate import Simulation

Row = dict[str, object]


def comparison(run: ServerRun, prediction: Prediction) -> list[Row]:
    """What was computed or counted at the client beside what the server counted; ``agrees`` None: one is missing."""
    result = run.result
    hits = result.hits()
    samples = [sample for sample in result.samples if sample.missing is None]

    def counted(name: str) -> int | None:
        if not samples or getattr(samples[-1], name) is None:
            return None
        return int(getattr(samples[-1], name) - (getattr(samples[0], name) or 0))

    told, kept = "the answers", "the server's counter"
    rows: list[tuple[str, str, int | None, str, int | None]] = [
        ("host pool of one rank", "computed", prediction.host_tokens, "the server's gauge", run.server.host_tokens),
        ("prompt tokens found on the host", told, hits.host, kept, counted("cached_host")),
        ("prompt tokens found on the device", told, hits.device, kept, counted("cached_device")),
    ]
    return [
        {
            "what": what,
            "tokens": here,
            "from": source,
            "tokens observed": there,
            "observed by": observer,
            "agrees": None if here is None or there is None else here == there,
        }
        for what, source, here, observer, there in rows
    ]


def throughput_row(result: LoadResult) -> Row:
    """Counts and rates of a load."""
    return {
        "requests": len(result.measured),
        "failed": len(result.measured) - len(result.succeeded),
        "seconds": round(result.duration_s, 2),
        "requests a second": round(result.requests_per_s, 3),
        "answer tokens a second": round(result.output_tokens_per_s, 1),
        "ended": result.ended,
    }


def latency_rows(result: LoadResult) -> list[Row]:
    """Percentiles in milliseconds."""
    spreads = {"time to first token": result.ttft, "inter-token": result.itl, "end to end": result.e2e}
    rows: list[Row] = []
    for title, spread in spreads.items():
        seconds = {name: getattr(spread, name) for name in ("mean", "p50", "p90", "p99", "max")}
        rounded = {name: None if value is None else round(1000 * value, 1) for name, value in seconds.items()}
        rows.append({"latency (ms)": title, "values": spread.count, **rounded})
    return rows


def hit_rows(result: LoadResult) -> list[Row]:
    """Prompt tokens by the tier they were found in, phase by phase."""
    rows: list[Row] = []
    for phase in dict.fromkeys(record.phase for record in result.measured):
        hits = result.hits(phase)
        computed = None if hits.cached_tokens is None else hits.prompt_tokens - hits.cached_tokens
        rows.append(
            {
                "phase": phase,
                "prompt tokens": hits.prompt_tokens,
                "on the device": hits.device,
                "on the host": hits.host,
                "in storage": hits.storage,
                "computed anew": computed,
                "share found": None if hits.share is None else round(hits.share, 4),
            }
        )
    return rows


def before_after(now: ServerRun, earlier: ServerRun) -> list[Row]:
    """The same figures of two runs and how far they moved, led by the workload and by every setting that differs."""
    same = now.result.parameters == earlier.result.parameters and now.result.seed == earlier.result.seed
    pairs: list[tuple[str, float | None, float | None]] = [
        ("requests a second", earlier.result.requests_per_s, now.result.requests_per_s),
        ("answer tokens a second", earlier.result.output_tokens_per_s, now.result.output_tokens_per_s),
        ("TTFT p50 (s)", earlier.result.ttft.p50, now.result.ttft.p50),
        ("TTFT p99 (s)", earlier.result.ttft.p99, now.result.ttft.p99),
        ("inter-token p50 (s)", earlier.result.itl.p50, now.result.itl.p50),
        ("share of prompt tokens found", earlier.result.hits().share, now.result.hits().share),
        ("host tokens a rank", earlier.server.host_tokens, now.server.host_tokens),
    ]
    rows: list[Row] = [
        {
            "figure": "same workload",
            "before": earlier.result.plan,
            "now": now.result.plan,
            "change": "yes" if same else "NO: another plan, seed or pace, so the rates do not compare",
        }
    ]
    for then, today in zip(earlier.server.rows, now.server.rows, strict=True):
        # host_tokens is a figure below, metrics_missing is not a setting
        if then["value"] != today["value"] and then["fact"] not in {"host_tokens", "metrics_missing"}:
            rows.append({"figure": then["fact"], "before": then["value"], "now": today["value"], "change": "CHANGED"})
    for name, before, after in pairs:
        change = None if before is None or after is None or not before else f"{100 * (after / before - 1):+.1f} %"
        rows.append({"figure": name, "before": before, "now": after, "change": change})
    return rows


def figures_of(run: ServerRun, prediction: Prediction, simulation: Simulation) -> list[tuple[str, object, str, str]]:
    """Name, value, unit and source of every figure that a run leaves in its record."""
    result, hits, read = run.result, run.result.hits(), run.result.hits("read")
    agree = comparison(run, prediction)[0]["agrees"]
    exact, device, host = simulation.agreeing, sum(simulation.device_tokens), sum(simulation.host_tokens)
    simulated = (None, None, None) if simulation.why_not else (exact, device, host)
    return [
        ("release", run.server.release, "", "measured"),
        ("recorded", run.recorded_in is not None, "", "measured"),
        ("device_tokens", run.server.device_tokens, "tokens of one rank", "measured"),
        ("predicted_host_tokens", prediction.host_tokens, "tokens of one rank", "computed"),
        ("observed_host_tokens", run.server.host_tokens, "tokens of one rank", "measured"),
        ("host_tokens_agree", agree, "", "computed"),
        ("predicted_host_bytes", prediction.host_bytes, "bytes, all ranks", "computed"),
        ("predicted_device_hit_tokens", simulated[1], "tokens", "simulated"),
        ("predicted_host_hit_tokens", simulated[2], "tokens", "simulated"),
        ("requests_simulated_exactly", simulated[0], "requests", "simulated"),
        ("ended", result.ended, "", "measured"),
        ("requests", len(result.measured), "requests", "measured"),
        ("failed_requests", len(result.measured) - len(result.succeeded), "requests", "measured"),
        ("requests_per_s", result.requests_per_s, "requests/s", "measured"),
        ("output_tokens_per_s", result.output_tokens_per_s, "tokens/s", "measured"),
        ("ttft_p50_s", result.ttft.p50, "s", "measured"),
        ("ttft_p99_s", result.ttft.p99, "s", "measured"),
        ("itl_p50_s", result.itl.p50, "s", "measured"),
        ("itl_p99_s", result.itl.p99, "s", "measured"),
        ("prompt_tokens", hits.prompt_tokens, "tokens", "measured"),
        ("device_hit_tokens", hits.device, "tokens", "measured"),
        ("host_hit_tokens", hits.host, "tokens", "measured"),
        ("read_host_tokens", read.host, "tokens of returning prompts", "measured"),
        ("hit_share", hits.share, "share of prompt tokens", "measured"),
        ("too_busy", result.lag.too_busy, "", "measured"),
        ("notes", list(result.notes), "", "measured"),
    ]


def run_conclusion(run: ServerRun, prediction: Prediction, simulation: Simulation) -> str:
    """A paragraph of Markdown with the numbers that matter."""
    observed, computed, hits = run.server.host_tokens, prediction.host_tokens, run.result.hits()
    if computed is None or observed is None:
        missing = prediction.why_not or run.server.metrics_missing or "this release does not export it"
        pool = f"The host pool could not be compared: {quoted(missing)}."
    elif computed == observed:
        pool = f"Prediction and server **agree exactly**: {observed:,} tokens in the host pool of each rank."
    else:
        pool = (
            f"Prediction and server **DISAGREE**: {computed:,} tokens computed, {observed:,} observed; "
            f"please report the launch line and the release."
        )
    warnings = dict.fromkeys((*prediction.warnings, *simulation.warnings))
    failures = [record.error for record in run.result.measured if record.error]
    if failures and not run.result.succeeded:
        hits_text = f"**No prompt was answered**; the first failure: {quoted(failures[0])}."
    elif hits.share is None:
        hits_text = "The server did not tell where prompts were found (--enable-cache-report)."
    else:
        host = "" if hits.host is None else f", {hits.host:,} of them on the host"
        hits_text = (
            f"Of {hits.prompt_tokens:,} prompt tokens {hits.cached_tokens:,} were found in a cache "
            f"({100 * hits.share:.1f} %){host}."
        )
    if simulation.why_not:
        replayed = f"The prompts could not be simulated: {quoted(simulation.why_not)}."
    else:
        total = len(simulation.records)
        replayed = f"The simulator gives the hits of {simulation.agreeing} of {total} requests exactly, tier by tier."
    sent = f"{len(run.result.measured)} requests, {len(failures)} failed; ended: {quoted(run.result.ended)}."
    warned = "".join(f"\n\n> **Warning**: {quoted(text)}" for text in warnings)
    return f"{pool}\n\n{hits_text} {replayed}\n\n{sent}{warned}"
