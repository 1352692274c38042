"""Two ranks, MLA, every layout, and the incident itself on the real code."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from conftest import running
from test_tp1 import PROMPT, measure, probe, returning

import hicache_lab.serving.load as lab
from hicache_lab.base.errors import ServerError
from hicache_lab.base.units import GB, GIB
from hicache_lab.host import HostMemory, read_host
from hicache_lab.preflight import Answer, ask, assess
from hicache_lab.serving import cpu_server
from hicache_lab.sizing.tiny_models import tiny_config

CASES = [
    # release, model, ranks, page size, further flags
    ("0.5.10", "tiny-mla", 1, 1, ("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct")),
    ("0.5.23", "tiny-mla", 1, 1, ("--hicache-mem-layout", "layer_first")),
    ("0.5.10", "tiny-llama", 2, 16, ("--hicache-mem-layout", "page_head")),
    ("0.5.23", "tiny-mla", 2, 16, ("--hicache-io-backend", "direct")),
]


@pytest.mark.parametrize(("release", "model", "ranks", "page", "flags"), CASES)
def test_host_tier_of_ranks_models_and_layouts(release, model, ranks, page, flags) -> None:
    with running(
        release, "--page-size", str(page), "--hicache-ratio", "3", *flags, model=model, tp_size=ranks
    ) as server:
        told = probe(server)
        result = measure(server, returning())
        allocations = server.log().count("Allocating")
    assert told.server.tp_size == allocations == ranks
    answer = assess(
        ask(
            tiny_config(model),
            release,
            device_tokens=told.server.device_tokens,
            hicache_ratio=3.0,
            page_size=page,
            tp_size=ranks,
            hicache_mem_layout=told.server.hicache.mem_layout,
            host_ram="24GB",
        )
    )
    assert told.host_total_tokens == answer.rank.tokens == (3 * 2048 // page + 1) * page
    read = [r for r in result.succeeded if r.phase == "read"]
    whole_pages = (PROMPT - 1) // page * page
    assert [(r.cached_device, r.cached_host) for r in read] == [(0, whole_pages)] * 4
    written = [r.output_ids for r in result.succeeded if r.phase == "write"]
    assert [r.output_ids for r in read] == written
    # counted once although both ranks load back
    first, last = result.samples[0], result.samples[-1]
    assert 4 * whole_pages <= last.loaded_back_tokens - (first.loaded_back_tokens or 0) < 8 * whole_pages


# ---- the incident: each rank alone accepts what all together must not take

PROCESS_BYTES = 3 * GB  # what two ranks and the front end take before the pools, measured 2.7 GB
FLOOR_BYTES = 4 * GIB


def incident_size_gb(host: HostMemory) -> int:
    """Whole GB that one rank may take and two may not: 0.7 of what one check allows, so far from both limits."""
    budget = host.effective_available_bytes - PROCESS_BYTES - 10 * GIB
    size_gb = -(-7 * budget // (10 * GB))
    free = f"{host.available_bytes / GB:.1f} GB are available"
    assert budget / 2 < size_gb * GB < budget, f"the incident needs about 16 GB of free memory; {free}"
    left = host.effective_available_bytes - PROCESS_BYTES - 2 * size_gb * GB
    assert left > FLOOR_BYTES, f"two ranks would come too close to this machine's memory; {free}"
    return size_gb


def predicted(release: str, size_gb: int, host: HostMemory, overhead: str) -> Answer:
    config = tiny_config("tiny-llama")
    return assess(
        ask(config, release, host=host, tp_size=2, hicache_size=size_gb, device_tokens=2048, overhead=overhead)
    )


def test_the_incident_passes_both_checks_on_0_5_10() -> None:
    host = read_host()
    size_gb = incident_size_gb(host)
    answer = predicted("0.5.10", size_gb, host, f"{PROCESS_BYTES // GB}GB")
    together, _ = answer.orders
    assert together.passes
    assert answer.host_bytes > host.effective_available_bytes - PROCESS_BYTES - 10 * GIB
    with running("0.5.10", "--hicache-size", str(size_gb), tp_size=2, resident=True, floor_bytes=FLOOR_BYTES) as server:
        log = server.log()
        taken = host.available_bytes - read_host().available_bytes
        served = measure(server, lab.random_prompts(seed=1, prompts=2, prompt_tokens=20, answer_tokens=4))
    line = f"Allocating {size_gb}.00 GB host memory for hierarchical KV cache."
    assert log.count(line) == 2
    assert {rank for rank in ("TP0", "TP1") if re.search(rf"{rank}\] {re.escape(line)}", log)} == {"TP0", "TP1"}
    assert "Not enough host memory" not in log
    # the pages are really there: both pools together, beyond what one rank's check left free
    assert taken > 2 * size_gb * GB * 0.97
    assert len(served.succeeded) == 2


@contextmanager
def available_meanwhile() -> Iterator[list[int]]:
    """This machine's available bytes, looked at five times a second in a thread and at both ends."""
    amounts, over = [read_host().available_bytes], threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            amounts.append(read_host().available_bytes)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield amounts
    finally:
        over.set()
        thread.join()
        amounts.append(read_host().available_bytes)


def test_the_same_flags_are_refused_on_both_ranks_of_0_5_23() -> None:
    host = read_host()
    size_gb = incident_size_gb(host)
    answer = predicted("0.5.23", size_gb, host, f"{PROCESS_BYTES // GB}GB")
    assert answer.verdict == "REFUSED"
    launch = {"name": "e2e-refused", "tp_size": 2, "resident": True, "floor_bytes": FLOOR_BYTES}
    with (
        available_meanwhile() as available,
        pytest.raises(ServerError) as refused,
        running("0.5.23", "--hicache-size", str(size_gb), **launch),
    ):
        pass
    log = cpu_server.logs("e2e-refused").read_text()
    messages = re.findall(r"ValueError: (Not enough host memory available\. .*)", log)
    assert len(messages) >= 2
    assert {rank for rank in ("TP0", "TP1") if f"{rank}] Scheduler hit an exception" in log} == {"TP0", "TP1"}
    assert messages[0] in str(refused.value)
    for message in set(messages):
        shown = float(re.search(r"only have (-?[0-9.]+) GB free", message)[1])
        # what the rank saw is what this machine had meanwhile, after the release's own rule
        shares = [(amount - 10 * GIB) / 2 / GB for amount in available]
        assert min(shares) - 0.05 <= shown <= max(shares) + 0.05
        # and from what it saw, the message follows to the letter
        seen = HostMemory.stated(total_bytes=host.total_bytes, available_bytes=int(2 * shown * GB) + 10 * GIB)
        assert predicted("0.5.23", size_gb, seen, "0GB").refusal.message == message
