"""Preflight of every point that starts a server: what would be refused or risk the host is never launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hicache_lab.base.errors import UnknownFact, UsageError
from hicache_lab.base.secrets import is_secret, redact
from hicache_lab.base.units import format_gb
from hicache_lab.host import HostMemory, read_host
from hicache_lab.preflight import Question, ask, assess, headline
from hicache_lab.preflight.ask import DEVICE_FACTS
from hicache_lab.sglang.launch import LaunchConfig, parse_launch
from hicache_lab.sizing.tiny_models import TINY_MODELS, tiny_config
from hicache_lab.sweeps.serverside import CpuServer, LaunchLine

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
SAFE = frozenset({"FITS", "TIGHT"})


@dataclass(frozen=True)
class Decision:
    """Whether a point may run, and what preflight said (empty for a point that starts nothing).

    Attributes:
        run: False: it is skipped.
        verdict: preflight's word.
        reason: the arithmetic in one line, or what is missing.
        host_bytes: what all ranks of the host would ask for.
        limit_bytes: what the host can give.
    """

    run: bool = True
    verdict: str = ""
    reason: str = ""
    host_bytes: int | None = None
    limit_bytes: int | None = None

    def allowing(self, unsafe: bool) -> Decision:
        """The same verdict, run all the same if the user said so."""
        return replace(self, run=True) if unsafe else self


def judge_launch(line: LaunchLine, words: Sequence[str], host: HostMemory | None = None) -> Decision:
    """Judge one rendered launch line.

    Args:
        line: the template, with its release and facts.
        words: the line itself.
        host: a stated host; None measures this machine.

    Raises:
        UsageError: not an SGLang launch, a --host beyond loopback, no port, or a key in the line.
    """
    for word in words:
        name = word.partition("=")[0]
        if is_secret(name) or redact(word) != word:
            raise UsageError(f"{name}: the line is recorded; export a key in your shell instead of writing it here")
    config = parse_launch([word.replace("{port}", "30000") for word in words], sglang_version=line.sglang_version)
    if config.host is not None and config.host not in LOOPBACK:
        raise UsageError(f"--host {config.host}: expected 127.0.0.1; a sweep starts servers for this machine only")
    if config.port is None:
        raise UsageError("launch: expected --port {port} (a free one is put in) or a fixed --port")
    model = line.model or config.model
    if model is None:
        raise UsageError("launch: the line names no --model-path; give `model:` beside it")
    return _judge(model, line.sglang_version, config, host, dict(line.facts))


def judge_cpu(server: CpuServer, flags: Sequence[str], host: HostMemory | None = None) -> Decision:
    """Judge the CPU server with these flags; its device pool is what --max-total-tokens says.

    Raises:
        UsageError: an option SGLang would not understand, or that the CPU server decides itself.
    """
    whole = server.launch(tuple(flags), "preflight").sglang_flags
    words = ["python", "-m", "sglang.launch_server", "--model-path", server.model, *whole]
    config = parse_launch([*words, "--tp-size", str(server.tp_size)], sglang_version=server.release)
    model = tiny_config(server.model) if server.model in TINY_MODELS else server.model
    return _judge(model, server.release, config, host, {"device_tokens": config.max_total_tokens})


def _judge(
    model: object, release: str, config: LaunchConfig, host: HostMemory | None, facts: dict[str, object]
) -> Decision:
    if not config.enable_hierarchical_cache:
        return Decision(True, "FITS", "no --enable-hierarchical-cache: no host pool is built", 0)
    known = {name: value for name, value in facts.items() if value is not None}
    try:
        question = ask(model, release, host=host or read_host(), config=config, **known)  # type: ignore[arg-type]
    except UnknownFact as error:
        return Decision(False, "UNKNOWN", str(error))
    return _decision(question)


def _decision(question: Question) -> Decision:
    answer = assess(question)
    reason = headline(answer)
    if answer.missing:
        known = ", ".join(DEVICE_FACTS)
        reason += f" (missing: {'; '.join(answer.missing)}; `server: facts:` takes {known})"
    if answer.refusal is not None and answer.ranks and answer.verdict in {"REFUSED", "ASSERT"}:
        reason += f"; it would print: {answer.refusal.message}"
    limit = question.limit_bytes
    if limit is not None and answer.verdict == "OOM_RISK":
        reason += f"; the host can give {format_gb(limit)}"
    return Decision(answer.verdict in SAFE, answer.verdict, reason, answer.host_bytes, limit)
