"""Write a large SGLang-like log: 80 % decode, 15 % prefill, 5 % other lines, 8 tensor-parallel ranks interleaved.

    python bench/gen_log.py OUT [--lines 1000000] [--seed 7] [--ranks 8]

The wording is that of 0.5.10 … 0.5.12. The file begins with a launch (server arguments, pools, capacity) and the
"other" lines are what a serving log holds: access lines, cache flushes, turned-away requests and a few retractions.
"""

from __future__ import annotations

import argparse
import datetime
import random
from collections.abc import Iterator
from pathlib import Path

START = datetime.datetime(2026, 1, 15, 8, 0, 0)
DEVICE_TOKENS = 116_000


def launch(ranks: int) -> Iterator[str]:
    """The lines of a start-up."""
    at = f"[{START:%Y-%m-%d %H:%M:%S}"
    yield (
        f"{at}] server_args=ServerArgs(model_path='kimi', tp_size={ranks}, pp_size=1, dp_size=1, nnodes=1, "
        f"page_size=1, "
        "enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_size=0)"
    )
    for rank in range(ranks):
        yield f"{at} TP{rank}] Load weight begin. avail mem=94.10 GB"
        yield f"{at} TP{rank}] KV Cache is allocated. #tokens: {DEVICE_TOKENS}, KV size: 7.59 GB"
        yield f"{at} TP{rank}] Allocating 16.30 GB host memory for hierarchical KV cache."
    yield (
        f"{at} TP0] max_total_num_tokens={DEVICE_TOKENS}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=64, context_len=262144, available_gpu_mem=5.31 GB"
    )
    yield f"{at}] The server is fired up and ready to roll!"


def other(rng: random.Random) -> str:
    """One line that is not a batch line, without its prefix."""
    draw = rng.random()
    if draw < 0.90:
        return (
            f'INFO:     10.0.0.{rng.randrange(1, 250)}:{rng.randrange(30000, 60000)} - "POST '
            f'/v1/chat/completions HTTP/1.1" 200 OK'
        )
    if draw < 0.97:
        return "Cache flushed successfully!"
    if draw < 0.995:
        return (
            f"Cache not flushed because there are pending requests. #queue-req: {rng.randrange(9)}, "
            f"#running-req: {rng.randrange(64)}"
        )
    return (
        f"KV cache pool is full. Retract requests. #retracted_reqs: {rng.randrange(1, 4)}, "
        f"#new_tokens_gained: {rng.randrange(500, 9000)}, #new_token_ratio: 0.1000 -> 0.2700"
    )


def lines(count: int, seed: int, ranks: int = 8) -> Iterator[str]:
    """``count`` lines in all, launch included."""
    rng = random.Random(seed)
    head = list(launch(ranks))
    yield from head[:count]
    ms = 0
    for index in range(max(count - len(head), 0)):
        if index % ranks == 0:
            ms += rng.randrange(20, 60)
        at = f"[{START + datetime.timedelta(milliseconds=ms):%Y-%m-%d %H:%M:%S}"
        draw = rng.random()
        if draw < 0.80:
            running, token = rng.randrange(1, 65), rng.randrange(1000, DEVICE_TOKENS)
            yield (
                f"{at} TP{index % ranks}] Decode batch, #running-req: {running}, #token: {token}, "
                f"token usage: {token / DEVICE_TOKENS:.2f}, cuda graph: {running < 33}, "
                f"gen throughput (token/s): {rng.uniform(200, 1350):.2f}, #queue-req: {rng.randrange(200)}"
            )
        elif draw < 0.95:
            yield (
                f"{at} TP{index % ranks}] Prefill batch, #new-seq: {rng.randrange(1, 9)}, #new-token: "
                f"{rng.randrange(1, 8193)}, "
                f"#cached-token: {rng.randrange(60000)}, token usage: {rng.random():.2f}, #running-req: "
                f"{rng.randrange(65)}, "
                f"#queue-req: {rng.randrange(200)}, cuda graph: False, input throughput (token/s): "
                f"{rng.uniform(500, 20000):.2f}"
            )
        else:
            message = other(rng)
            yield f"{at}] {message}" if message.startswith("INFO") else f"{at} TP{index % ranks}] {message}"


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    with args.out.open("w", buffering=1 << 20) as file:
        for line in lines(args.lines, args.seed, args.ranks):
            file.write(line + "\n")


if __name__ == "__main__":
    main()
