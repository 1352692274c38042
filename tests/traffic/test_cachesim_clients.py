"""The closed loop: nobody sends before it was answered, nothing is sent twice or left out."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.errors import UsageError
from hicache_lab.traffic.cachesim import ReplaySettings, replay
from hicache_lab.traffic.cachesim.clients import Clients
from hicache_lab.traffic.traces import Trace, generate


@given(requests=st.integers(0, 40), clients=st.integers(1, 8), turnaround=st.integers(0, 5), seed=st.integers(0, 10**6))
def test_every_request_is_sent_once_by_an_idle_client(requests: int, clients: int, turnaround: int, seed: int) -> None:
    rng = random.Random(seed)
    loop = Clients(requests, clients, turnaround)
    served: list[int] = []
    under_way: list[tuple[int, int]] = []  # (the step that answers it, request)
    idle = [0] * clients  # the naive model: when each client can send
    now = 0
    while len(served) < requests:
        assert loop.next_sending == (min(idle) if idle and loop.unsent else None)
        arrived = loop.sent(now, idle=not under_way)
        assert len(arrived) == sum(at <= now for at in idle[: loop.unsent + len(arrived)]) or not under_way
        for index in arrived:
            able = min(idle)
            assert able <= now
            idle.remove(able)
            under_way.append((now + rng.randint(1, 9), index))
        assert len(under_way) <= clients
        now += 1
        for end, index in [one for one in under_way if one[0] <= now]:
            under_way.remove((end, index))
            served.append(index)
            loop.answered(now)
            idle.append(now + turnaround)
    assert sorted(served) == list(range(requests))
    assert loop.unsent == 0 and loop.next_sending is None


def test_a_client_misses_the_step_that_starts_at_once() -> None:
    loop = Clients(3, 1, 1)
    assert list(loop.sent(0, idle=True)) == [0]
    loop.answered(5)
    assert list(loop.sent(5, idle=True)) == []
    assert loop.next_sending == 6
    assert list(loop.sent(6, idle=True)) == [1]


def test_an_idle_scheduler_starts_with_the_first_of_those_that_come_together() -> None:
    loop = Clients(5, 4, 1)
    assert list(loop.sent(0, idle=True)) == [0]
    assert list(loop.sent(1, idle=False)) == [1, 2, 3]
    assert list(loop.sent(2, idle=False)) == []


def test_one_client_is_alone_however_long_it_takes() -> None:
    trace = generate("multi_turn", sessions=30, seed=4)
    found = [
        replay(trace, ReplaySettings(30_000, 60_000, page_size=64, turnaround_steps=steps)).cached_tokens.tolist()
        for steps in (0, 1, 50)
    ]
    assert found[0] == found[1] == found[2]


def test_requests_of_one_batch_do_not_find_what_their_neighbours_compute() -> None:
    # a long answer keeps the scheduler busy; beside it prompts in threes of one token each go by in batches of two
    prompts = [list(range(100 * three, 100 * three + 50)) for three in range(3) for _ in range(3)]
    trace = Trace.from_tokens(
        [(list(range(900, 950)), list(range(1000, 1200))), *((prompt, [1]) for prompt in prompts)]
    )
    found = replay(trace, ReplaySettings(10_000, 0, concurrency=3, turnaround_steps=0))
    assert found.device_tokens.tolist() == [0, 0, 0, 49, 0, 49, 49, 0, 0, 49]
    alone = replay(trace, ReplaySettings(10_000, 0))
    assert alone.device_tokens.tolist() == [0, *[0, 49, 49] * 3]


def test_a_turnaround_is_not_negative() -> None:
    with pytest.raises(UsageError, match="--turnaround-steps: expected at least 0, got -1"):
        replay(generate("cyclic_scan", items=2, rounds=2), ReplaySettings(1000, 0, turnaround_steps=-1))
