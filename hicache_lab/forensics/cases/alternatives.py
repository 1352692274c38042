"""What else would have bought tokens: alternatives beside the host tier, each computed for the same device memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hicache_lab.base.units import format_gb
from hicache_lab.forensics.cases.case import Case
from hicache_lab.preflight import Question, assess
from hicache_lab.sglang.launch.flags import known_flags, known_releases
from hicache_lab.sglang.releases import first_release_where
from hicache_lab.sizing.rank import RankPlanner


@dataclass(frozen=True)
class Alternative:
    """One change and what it buys; tokens are distinct device tokens of the whole engine, None where not computable."""

    change: str
    flag: str
    since: str
    device_tokens: int | None
    what: str

    @property
    def row(self) -> dict[str, str | int | None]:
        """The row as plain values."""
        return {
            "alternative": self.change,
            "flag": self.flag,
            "since": self.since,
            "distinct device tokens": self.device_tokens,
            "what it buys": self.what,
        }


def alternatives(case: Case) -> list[Alternative]:
    """Every alternative that applies to the case's model and launch, the host tier first, for comparison."""
    return list(_alternatives(case.question(), case.value("device_tokens")))


def _since(flag: str) -> str:
    """First release of those read that has the flag."""
    known = known_flags().get(flag)
    return str(known_releases()[known.periods[0].first]) if known else "unknown"


def _bytes_per_token(question: Question) -> int:
    planner = RankPlanner(question.config, question.geometry, question.rules, question.device)
    return planner.groups[0].bytes_per_token


def _alternatives(question: Question, tokens: int) -> Iterator[Alternative]:
    config, ranks = question.config, question.config.tp_size or 1
    answer = assess(question)
    host = answer.rank.tokens if answer.rank else 0
    yield Alternative(
        "host tier as launched",
        f"--hicache-size {config.hicache_size}" if config.hicache_size else "--hicache-ratio",
        _since("--hicache-size"),
        tokens,
        f"device tokens unchanged; {host:,} host tokens to reuse, if the host had {format_gb(answer.host_bytes, 0)}",
    )
    row = _bytes_per_token(question)
    small = _bytes_per_token(replace(question, config=replace(config, kv_cache_dtype="fp8_e4m3")))
    yield Alternative(
        "KV cache in fp8",
        "--kv-cache-dtype fp8_e4m3",
        _since("--kv-cache-dtype"),
        tokens * row // small,
        f"{row:,} → {small:,} bytes a token: {row / small:g} times the tokens in the same GPU memory",
    )
    if question.geometry.latent is not None and ranks > 1:
        yield Alternative(
            "one copy of the latent KV over the ranks",
            f"--dcp-size {ranks}",
            f"{_since('--dcp-size')} (host tier: {first_release_where(lambda rules: rules.dcp_host_pool)})",
            tokens * ranks,
            f"every rank keeps a copy now; spread over {ranks}, each holds its share, and the host pool follows",
        )
        yield Alternative(
            "data-parallel attention",
            f"--dp-size {ranks} --enable-dp-attention",
            _since("--enable-dp-attention"),
            tokens * ranks,
            "each rank keeps the KV of its own requests; a prefix is reused only on the rank that has it",
        )
        yield Alternative(
            "sharded prefill cache",
            "--enable-kv-cache-sharding",
            f"{_since('--enable-kv-cache-sharding')} (disaggregated prefill only)",
            tokens * ranks,
            "pages are striped over the ranks that replicate them",
        )
    yield Alternative(
        "smaller reserve on the GPU",
        "--mem-fraction-static",
        _since("--mem-fraction-static"),
        None,
        f"each GB given to the KV pool of a rank is {10**9 // row:,} tokens; watch activation memory",
    )
