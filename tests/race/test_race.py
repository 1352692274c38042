"""The virtual replay: the incident's figures, a brute-force referee, and what must hold for every story."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, GIB
from hicache_lab.race import Guard, Story, memory_at, race_map, simulate
from hicache_lab.race.scenario import NS

ALONE = Guard("0.5.8")
SHARED = Guard("0.5.19", divides_by_ranks=True)
INCIDENT = Story(ALONE)


def fates(replay) -> list[str]:
    return [rank.fate for rank in replay.ranks]


def test_the_incident_passes_eight_times_and_kills() -> None:
    told = simulate(INCIDENT)
    assert told.outcome == "oom"
    assert told.passed == 8
    assert told.refused == 0
    assert (told.oom_kills, told.survivors) == (7, 1)
    assert told.peak_bytes == 449 * GB
    # eight ranks at 2 GB/s meet 445 GB after 445/16 s
    first = min(rank.end_seconds for rank in told.ranks if rank.end_seconds is not None)
    assert first == pytest.approx(445 / 16)


def test_enough_skew_refuses_cleanly_with_the_share_of_the_second_rank() -> None:
    told = simulate(replace(INCIDENT, skew_seconds=150))
    assert (told.outcome, told.oom_kills, told.refused) == ("refused", 0, 1)
    second = told.ranks[1]
    assert second.saw_bytes == 145 * GB
    assert second.budget_bytes == 145 * GB - 10 * GIB
    assert round(second.budget_bytes / GB, 2) == 134.26
    assert fates(told)[0] == "stopped", "SGLang's launcher ends the whole launch"


def test_without_the_launcher_every_later_rank_is_refused_alone() -> None:
    told = simulate(replace(INCIDENT, skew_seconds=150, launcher=False))
    assert fates(told) == ["survived"] + ["refused"] * 7


def test_the_later_guard_refuses_300_at_once() -> None:
    told = simulate(replace(INCIDENT, guard=SHARED))
    assert (told.refused, told.oom_kills, told.survivors) == (8, 0, 0)
    assert round(told.ranks[0].budget_bytes / GB, 2) == 54.28


def test_48_fits_when_checked_together_and_may_be_refused_when_staggered() -> None:
    assert simulate(replace(INCIDENT, requested_bytes=48 * GB)).survivors == 8
    together = replace(INCIDENT, guard=SHARED, requested_bytes=48 * GB)
    assert simulate(together).survivors == 8
    staggered = simulate(replace(together, skew_seconds=24, launcher=False))
    budgets = [round(rank.budget_bytes / GB, 2) for rank in staggered.ranks[:3]]
    assert budgets == [54.28, 48.28, 42.28]
    assert fates(staggered)[:3] == ["survived", "survived", "refused"]


def test_an_allocator_that_rounds_up_kills_where_the_check_saw_room() -> None:
    # 37.25 GiB a rank pass at 256 GB of RAM; the power of two above it does not fit four times
    story = replace(INCIDENT, ranks=4, host_bytes=256 * GB, requested_bytes=40 * GB)
    assert simulate(story).outcome == "fits"
    assert simulate(replace(story, resident_bytes=64 * GIB)).outcome == "oom"


def test_the_map_holds_all_three_outcomes() -> None:
    drawn = race_map(INCIDENT, [0, 1, 10, 150], [48, 100, 300, 440])
    assert drawn.outcomes[0] == ("fits", "oom", "oom", "refused")
    assert drawn.outcomes[3] == ("fits", "refused", "refused", "refused")


def test_memory_between_two_corner_points() -> None:
    told = simulate(replace(INCIDENT, requested_bytes=48 * GB))
    assert memory_at(told.samples, 0) == 4 * GB
    assert memory_at(told.samples, 12) == 4 * GB + 8 * 24 * GB
    assert memory_at(told.samples, 1000) == 388 * GB


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"ranks": 0}, "--ranks"),
        ({"requested_bytes": -1}, "--hicache-size"),
        ({"pin_bytes_per_second": 0}, "--pin-rate"),
        ({"skew_seconds": float("nan")}, "--skew"),
        ({"other_bytes": 449 * GB}, "--available"),
        ({"order": "alphabetical"}, "--order"),
    ],
)
def test_impossible_stories_name_the_flag(change, flag) -> None:
    with pytest.raises(UsageError, match=flag):
        replace(INCIDENT, **change)


TINY = st.builds(
    Story,
    guard=st.builds(Guard, st.just("x"), reserve_bytes=st.integers(0, 12), divides_by_ranks=st.booleans()),
    ranks=st.integers(1, 6),
    host_bytes=st.integers(40, 120),
    other_bytes=st.integers(0, 30),
    requested_bytes=st.integers(1, 70),
    resident_bytes=st.none() | st.integers(1, 90),
    pin_bytes_per_second=st.just(NS),  # one byte a nanosecond: the referee can count every tick
    skew_seconds=st.integers(0, 40).map(lambda n: n / NS),
    jitter_seconds=st.integers(0, 20).map(lambda n: n / NS),
    order=st.sampled_from(["rank", "reversed", "random"]),
    seed=st.integers(0, 99),
    launcher=st.booleans(),
    teardown_seconds=st.integers(0, 30).map(lambda n: n / NS),
)


def tick_by_tick(story: Story) -> list[str]:
    """The referee: one nanosecond and one byte at a time, no closed form."""
    arrivals, ranks = story.arrivals_ns(), range(story.ranks)
    held, state, stop = [0] * story.ranks, ["waiting"] * story.ranks, None
    for now in range(max(arrivals) + 1000):
        if now:
            for r in ranks:
                held[r] += state[r] == "pinning"
        for r in ranks:
            if state[r] == "pinning" and held[r] == story.pool_bytes:
                state[r] = "survived"

        def kill_while_full() -> None:
            while "pinning" in state and sum(held) >= story.available_bytes:
                victim = max(ranks, key=lambda rank: (held[rank], rank))
                held[victim], state[victim] = 0, "oom_killed"

        kill_while_full()
        free = story.available_bytes - sum(held)
        for r in [r for r in ranks if state[r] == "waiting" and arrivals[r] == now]:
            budget = max(free, 0) - story.guard.reserve_bytes
            budget = budget // story.ranks if story.guard.divides_by_ranks else budget
            state[r] = "pinning" if story.requested_bytes <= budget else "refused"
            if state[r] == "refused" and story.launcher and stop is None:
                stop = now + round(story.teardown_seconds * NS)
        kill_while_full()
        if stop is not None and now >= stop:
            return ["stopped" if s in {"waiting", "pinning", "survived"} else s for s in state]
    assert not {"waiting", "pinning"} & set(state)
    return state


@given(TINY)
@settings(max_examples=400, deadline=None)
def test_agrees_with_the_tick_by_tick_referee(story: Story) -> None:
    assert fates(simulate(story)) == tick_by_tick(story)


@given(TINY)
def test_what_holds_for_every_story(story: Story) -> None:
    told = simulate(story)
    assert told == simulate(story), "same seed, same story"
    assert told.peak_bytes <= story.host_bytes
    assert told.peak_bytes == max(sample.used_bytes for sample in told.samples)
    assert [s.seconds for s in told.samples] == sorted(s.seconds for s in told.samples)
    counts = [told.oom_kills, told.survivors, told.refused, fates(told).count("stopped")]
    assert sum(counts) == story.ranks
    for rank in told.ranks:
        assert rank.peak_bytes <= story.pool_bytes
        assert (rank.passed is False) == (rank.fate == "refused")
        assert rank.fate != "oom_killed" or rank.passed
    if told.outcome == "fits":
        assert told.peak_bytes == story.other_bytes + story.ranks * story.pool_bytes


@given(TINY, st.integers(0, 80))
def test_a_smaller_request_never_turns_a_fit_into_a_kill(story: Story, less: int) -> None:
    story = replace(story, resident_bytes=None)
    if simulate(story).outcome == "fits":
        smaller = replace(story, requested_bytes=max(1, story.requested_bytes - less))
        assert simulate(smaller).outcome == "fits"
