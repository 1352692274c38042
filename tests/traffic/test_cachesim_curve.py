from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.resources import data_dir
from hicache_lab.traffic.cachesim import (
    WritePolicy,
    hit_curve,
    hits_by_request,
    replay_blocks,
    sampled_curve,
    tier_rates,
)
from hicache_lab.traffic.traces import Trace, generate, read_trace

CONVERSATION = data_dir() / "traces" / "mooncake_conversation.jsonl.zst"
SYNTHETIC = data_dir() / "traces" / "mooncake_synthetic.jsonl.zst"


def lru_hits(trace: Trace, capacity: int) -> list[int]:
    """Request by request: look up from the root, then make everything recent, root last."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for r in range(trace.requests):
        blocks = trace.ids[trace.offsets[r] : trace.offsets[r + 1]].tolist()
        found = 0
        while found < trace.prompt_blocks[r] and blocks[found] in cache:
            found += 1
        hits.append(found)
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def two_tier_hits(trace: Trace, device: int, host: int, *, exclusive: bool) -> tuple[list[int], list[int]]:
    """Two dictionaries that hand blocks to each other: (hits on the device, hits on both)."""
    near: OrderedDict[int, None] = OrderedDict()
    far: OrderedDict[int, None] = OrderedDict()  # exclusive: what the device gave up; else: copies, newest last
    on_device, on_both = [], []
    for r in range(trace.requests):
        blocks = trace.ids[trace.offsets[r] : trace.offsets[r + 1]].tolist()
        prompt = blocks[: int(trace.prompt_blocks[r])]
        first = next((i for i, b in enumerate(prompt) if b not in near), len(prompt))
        both = next((i for i, b in enumerate(prompt) if b not in near and b not in far), len(prompt))
        on_device.append(first)
        on_both.append(both)
        for block in reversed(blocks):
            near[block] = None
            near.move_to_end(block)
            if exclusive:
                far.pop(block, None)
            elif block in far or len(far) < host or any(b not in near for b in far):
                if block not in far and len(far) >= host:
                    del far[next(b for b in far if b not in near)]
                far[block] = None
                far.move_to_end(block)
            if len(near) > device:
                victim, _ = near.popitem(last=False)
                if exclusive and host:
                    far[victim] = None
                    if len(far) > host:
                        far.popitem(last=False)
    return on_device, on_both


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Small trees of prompts, with or without known outputs."""
    requests = draw(
        st.lists(
            st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3), max_size=5)),
            min_size=1,
            max_size=40,
        )
    )
    return Trace.from_tokens(requests, block_tokens=draw(st.sampled_from([1, 2])))


@settings(deadline=None, max_examples=200)
@given(traces())
def test_equal_to_an_lru_at_every_size(trace: Trace) -> None:
    curve = hit_curve(trace)
    for capacity in range(curve.largest_useful_blocks + 3):
        each = lru_hits(trace, capacity)
        assert curve.hits_at(capacity) == sum(each)
        assert hits_by_request(trace, [capacity])[:, 0].tolist() == each


@settings(deadline=None, max_examples=100)
@given(traces(), st.integers(0, 12), st.integers(0, 20))
def test_both_tiers_are_cuts_of_one_curve(trace: Trace, device: int, host: int) -> None:
    for policy in (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK):
        near, both = two_tier_hits(trace, device, host, exclusive=policy is WritePolicy.WRITE_BACK)
        found = hits_by_request(trace, [device, int(policy.effective_capacity(device, host))])
        assert found[:, 0].tolist() == near
        if policy is WritePolicy.WRITE_BACK or host > device:
            assert found[:, 1].tolist() == both


@settings(deadline=None, max_examples=60)
@given(traces())
def test_more_room_never_means_fewer_hits(trace: Trace) -> None:
    for count in ("blocks", "tokens"):
        curve = hit_curve(trace, count=count)  # type: ignore[arg-type]
        assert (np.diff(curve.hits) >= 0).all()
        assert 0 <= curve.hits[0] <= curve.hits[-1] <= curve.references


@settings(deadline=None, max_examples=60)
@given(traces(), st.data())
def test_a_warm_up_leaves_out_its_requests_and_nothing_else(trace: Trace, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, trace.requests - 1))
    curve = hit_curve(trace, count_from=start)
    for capacity in (0, 1, 3, 10):
        assert curve.hits_at(capacity) == sum(lru_hits(trace, capacity)[start:])
    assert curve.references == trace.prompt_blocks[start:].sum()


@pytest.mark.parametrize("path", [CONVERSATION, SYNTHETIC], ids=lambda path: path.stem)
def test_equal_to_an_lru_on_the_published_traces(path: object) -> None:
    trace = read_trace(str(path))
    curve = hit_curve(trace)
    for capacity in (226, 2_000, 20_000):
        assert curve.hits_at(capacity) == sum(lru_hits(trace, capacity))


def test_the_published_facts_of_the_mooncake_traces() -> None:
    """README of FAST25-release: requests, mean lengths; the ideal hit rates as counted in the files."""
    conversation, synthetic = read_trace(CONVERSATION), read_trace(SYNTHETIC)
    assert (conversation.requests, synthetic.requests) == (12_031, 3_993)
    assert round(conversation.input_tokens.mean()) == 12_035 and round(conversation.output_tokens.mean()) == 343
    assert int(synthetic.input_tokens.mean()) == 15_325 and round(synthetic.output_tokens.mean()) == 149
    assert conversation.references == 288_500 and conversation.unique_blocks == 182_790
    assert round(hit_curve(conversation).ceiling, 3) == 0.366
    assert round(hit_curve(conversation, count="tokens").ceiling, 3) == 0.374
    assert round(hit_curve(synthetic).ceiling, 3) == 0.640
    assert round(hit_curve(synthetic, count="tokens").ceiling, 3) == 0.651


def test_tokens_count_a_partial_block_as_its_tokens() -> None:
    trace = Trace.build(
        np.array([1, 2, 1, 2]),
        np.array([0, 2, 4]),
        block_tokens=512,
        input_tokens=np.array([700, 700]),
    )
    curve = hit_curve(trace, count="tokens")
    assert (curve.hits_at(2), curve.references) == (700, 1400)
    assert curve.hits_at(1) == 512


def test_two_tiers_are_the_curve() -> None:
    trace = generate("multi_turn", sessions=80, seed=1)
    curve = hit_curve(trace, count="tokens")
    device, host = np.array([5_000, 50_000]), np.array([0, 40_000, 400_000])
    through = tier_rates(curve, device[:, None], host, WritePolicy.WRITE_THROUGH)
    back = tier_rates(curve, device[:, None], host, WritePolicy.WRITE_BACK)
    alone = curve.rate_at_tokens(device)
    assert through.shape == (2, 3)
    assert through[1, 1] == alone[1], "a host tier below the device tier adds nothing"
    assert (back >= through).all()
    assert (through >= alone[:, None]).all()
    blocks = replay_blocks(trace, 50_000, 400_000, WritePolicy.WRITE_THROUGH)
    assert blocks.total_rate == pytest.approx(through[1, 2], abs=1e-9)


def test_the_smallest_size_for_a_rate() -> None:
    curve = hit_curve(generate("cyclic_scan", items=4, item_tokens=640, rounds=3))
    enough = curve.blocks_for(0.5)
    assert enough is not None and 0 < enough < 40
    assert curve.rate_at(enough) >= 0.5 > curve.rate_at(enough - 1)
    assert curve.blocks_for(0.99) is None
    assert curve.blocks_for(0.0) == 0


def test_a_sample_reports_the_error_it_makes() -> None:
    trace = read_trace(SYNTHETIC)
    exact = hit_curve(trace)
    whole = sampled_curve(trace, 1.0, seeds=(1, 2))
    sizes = np.array([1, 100, 5_000, 40_000])
    assert whole.rate_at(sizes) == pytest.approx(exact.rate_at(sizes))
    assert whole.head_error_max == pytest.approx(0, abs=1e-12)
    sample = sampled_curve(trace, 0.2)
    assert sample.head_error_max >= sample.head_error_mean > 0
    error = np.abs(sample.rate_at(sizes) - exact.rate_at(sizes))
    # the head is the whole trace here, so the measured error is the error
    assert error.max() <= sample.head_error_max + 1e-9
    assert sampled_curve(SYNTHETIC, 0.2).rate_at(sizes) == pytest.approx(sample.rate_at(sizes))


def test_what_cannot_be_asked() -> None:
    trace = generate("cyclic_scan", items=2, rounds=2)
    with pytest.raises(UsageError, match="warm-up"):
        hit_curve(trace, count_from=4)
    with pytest.raises(UsageError, match="--sample"):
        sampled_curve(trace, 0.0)
    with pytest.raises(UsageError, match="two seeds"):
        sampled_curve(trace, 0.5, seeds=(1,))
    with pytest.raises(UsageError, match="at least 0 blocks"):
        hit_curve(trace).hits_at(-1)
    with pytest.raises(UsageError, match="cache sizes"):
        hits_by_request(trace, [])
    with pytest.raises(InputError, match="lengths only"):
        hit_curve(Trace.lengths_only([1], [1], origin="azure.csv"))
