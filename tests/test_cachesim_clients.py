"""The closed loop: nobody sends before it was answered, nothing is sent twice or left out."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.cachesim import ReplaySettings, replay
from hicache_lab.cachesim.clients import Clients
from hicache_lab.errors import UsageError
from hicache_lab.traces import Trace, generate


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
        for index in loop.sent(now):
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
    assert list(loop.sent(0)) == [0]
    loop.answered(5)
    assert list(loop.sent(5)) == []
    assert loop.next_sending == 6
    assert list(loop.sent(6)) == [1]


def test_one_client_is_alone_however_long_it_takes() -> None:
    trace = generate("multi_turn", sessions=30, seed=4)
    found = [
        replay(trace, ReplaySettings(30_000, 60_000, page_size=64, turnaround_steps=steps)).cached_tokens.tolist()
        for steps in (0, 1, 50)
    ]
    assert found[0] == found[1] == found[2]


def test_clients_that_need_no_time_share_a_batch_and_compute_the_same_prompt_twice() -> None:
    # two clients, prompts in pairs, one token each: at once, a pair is one batch and neither finds the other's tokens
    prompts = [list(range(100 * pair, 100 * pair + 50)) for pair in range(4) for _ in range(2)]
    trace = Trace.from_tokens([(prompt, [1]) for prompt in prompts])
    at_once = replay(trace, ReplaySettings(10_000, 0, concurrency=2, turnaround_steps=0))
    assert at_once.device_tokens.sum() == 0
    assert replay(trace, ReplaySettings(10_000, 0)).device_tokens.tolist() == [0, 49] * 4


def test_a_turnaround_is_not_negative() -> None:
    with pytest.raises(UsageError, match="turnaround_steps: expected at least 0, got -1"):
        replay(generate("cyclic_scan", items=2, rounds=2), ReplaySettings(1000, 0, turnaround_steps=-1))
