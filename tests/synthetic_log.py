"""A server log as a launch would have printed it: its arguments, its pools in the release's own words, its end."""

from __future__ import annotations

from hicache_lab.preflight import Question, assess
from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import parse_version
from hicache_lab.sizing.pools import allocating_text
from hicache_lab.sizing.rank import DeviceFacts

FIELDS = ("tp_size", "pp_size", "dp_size", "page_size", "kv_cache_dtype", "hicache_ratio", "hicache_size")


def arguments(config: LaunchConfig, release: str) -> str:
    """The line with the server's arguments."""
    shown = {"model_path": config.model, **{name: getattr(config, name) for name in FIELDS}}
    shown = {name: value for name, value in shown.items() if value is not None} | {"enable_hierarchical_cache": True}
    if parse_version(release) >= parse_version("0.5.19"):
        return f"server_args={shown}"
    return f"server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def died(release: str, rank: int) -> str:
    """The lines about a scheduler that SIGKILL ended."""
    if parse_version(release) < parse_version("0.5.10"):
        return (
            f"[2026-01-02 03:04:20] Rank {rank} scheduler is dead. Please check if there are relevant logs.\n"
            "[2026-01-02 03:04:20] Exit code: -9"
        )
    return (
        f"[2026-01-02 03:04:20] Subprocess scheduler_{rank} (pid=4242) crashed with exit code -9. "
        "Triggering SIGQUIT for cleanup..."
    )


def device_lines(device: DeviceFacts, release: str) -> list[str]:
    """The lines about the device pools and the capacity."""
    version, tokens = parse_version(release), device.tokens
    others = []
    if device.swa_tokens:
        others.append(
            f"Use sliding window memory pool. full_layer_tokens={tokens}, swa_layer_tokens={device.swa_tokens}"
        )
    if device.mamba_slots:
        others.append(
            f"Mamba Cache is allocated. max_mamba_cache_size: {device.mamba_slots}, conv_state size: 0.10GB, "
            "ssm_state size: 2.58GB "
        )
    dtype = "dtype: torch.bfloat16, " if version >= parse_version("0.5.13") else ""
    left = ", available_gpu_mem=6.10 GB" if version >= parse_version("0.4.7") else ""
    return [
        *others,
        f"KV Cache is allocated. {dtype}#tokens: {tokens}, K size: 3.82 GB, V size: 3.82 GB",
        f"max_total_num_tokens={tokens}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        f"max_running_requests=2048, context_len=131072{left}",
    ]


def server_log(question: Question) -> str:
    """The log of a launch that was killed while its ranks took their first pools, or that its own check refused."""
    release, answer = question.rules.version, assess(question)
    lines = [f"[2026-01-02 03:04:00] {arguments(question.config, release)}"]
    device = question.device
    for number, rank in enumerate(answer.ranks):
        prefix = f"[2026-01-02 03:04:05 TP{number}]"
        if device.tokens:
            lines += [f"{prefix} {text}" for text in device_lines(device, release)]
        refusal = answer.refusal if answer.verdict == "REFUSED" else None
        if refusal is not None and refusal.rank == number:
            lines.append(f"{prefix} Scheduler hit an exception: Traceback (most recent call last):")
            lines.append(f"{refusal.error}: {refusal.message}")
        elif refusal is None:
            # a rank dies while its first pool is touched: the second one's line is never written
            lines += [f"{prefix} {allocating_text(pool, question.rules)}" for pool in rank.pools[:1]]
    if answer.verdict != "REFUSED":
        lines.append(died(release, 3 % max(len(answer.ranks), 1)))
    return "\n".join(lines) + "\n"
