"""Predicted beside observed, and one run beside an earlier one; rows for tables, pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_lab.serving.load import LoadResult, Spread
from hicache_lab.serving.measurement.predict import Prediction
from hicache_lab.serving.measurement.run import ServerRun, quoted
from hicache_lab.serving.measurement.simulate import Simulation

Row = dict[str, object]


def comparison(run: ServerRun, prediction: Prediction) -> list[Row]:
    """What was computed or counted at the client beside what the server counted; ``agrees`` None: one is missing."""
    result = run.result
    hits = result.hits()
    samples = [sample for sample in result.samples if sample.missing is None]
    first, last = (samples[0], samples[-1]) if samples else (None, None)

    def counted(name: str) -> int | None:
        if first is None or last is None or getattr(last, name) is None:
            return None
        return int(getattr(last, name) - (getattr(first, name) or 0))

    rows: list[tuple[str, str, int | None, str, int | None]] = [
        ("host pool of one rank", "computed", prediction.host_tokens, "the server's gauge", run.server.host_tokens),
        ("prompt tokens found on the host", "the answers", hits.host, "the server's counter", counted("cached_host")),
        (
            "prompt tokens found on the device",
            "the answers",
            hits.device,
            "the server's counter",
            counted("cached_device"),
        ),
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
    return [{"latency (ms)": name, **_milliseconds(spread)} for name, spread in spreads.items()]


def _milliseconds(spread: Spread) -> Row:
    values = {"mean": spread.mean, "p50": spread.p50, "p90": spread.p90, "p99": spread.p99, "max": spread.max}
    rounded = {name: None if value is None else round(1000 * value, 1) for name, value in values.items()}
    return {"values": spread.count, **rounded}


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
            "change": _same_load(now, earlier),
        },
        *_settings_changed(now, earlier),
    ]
    for name, before, after in pairs:
        change = None if before is None or after is None or not before else f"{100 * (after / before - 1):+.1f} %"
        rows.append({"figure": name, "before": before, "now": after, "change": change})
    return rows


def _settings_changed(now: ServerRun, earlier: ServerRun) -> list[Row]:
    pairs = zip(earlier.server.rows, now.server.rows, strict=True)
    counted = {"host_tokens", "metrics_missing"}  # one is a figure below, the other no setting
    return [
        {"figure": before["fact"], "before": before["value"], "now": after["value"], "change": "CHANGED"}
        for before, after in pairs
        if before["value"] != after["value"] and before["fact"] not in counted
    ]


def _same_load(now: ServerRun, earlier: ServerRun) -> str:
    same = now.result.parameters == earlier.result.parameters and now.result.seed == earlier.result.seed
    return "yes" if same else "NO: another plan, seed or pace, so the rates do not compare"


def figures_of(run: ServerRun, prediction: Prediction, simulation: Simulation) -> list[tuple[str, object, str, str]]:
    """Name, value, unit and source of every figure that a run leaves in its record."""
    result, hits, read = run.result, run.result.hits(), run.result.hits("read")
    agree = None
    if prediction.host_tokens is not None and run.server.host_tokens is not None:
        agree = prediction.host_tokens == run.server.host_tokens
    return [
        ("release", run.server.release, "", "measured"),
        ("recorded", run.recorded_in is not None, "", "measured"),
        ("device_tokens", run.server.device_tokens, "tokens of one rank", "measured"),
        ("predicted_host_tokens", prediction.host_tokens, "tokens of one rank", "computed"),
        ("observed_host_tokens", run.server.host_tokens, "tokens of one rank", "measured"),
        ("host_tokens_agree", agree, "", "computed"),
        ("predicted_host_bytes", prediction.host_bytes, "bytes, all ranks", "computed"),
        ("predicted_device_hit_tokens", _simulated(simulation, simulation.device_tokens), "tokens", "simulated"),
        ("predicted_host_hit_tokens", _simulated(simulation, simulation.host_tokens), "tokens", "simulated"),
        ("requests_simulated_exactly", None if simulation.why_not else simulation.agreeing, "requests", "simulated"),
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


def _simulated(simulation: Simulation, tokens: Sequence[int]) -> int | None:
    return None if simulation.why_not else sum(tokens)


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
