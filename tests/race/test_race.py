"""The virtual race: the incident's figures, a brute-force referee, and what must hold for every scenario."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, GIB
from hicache_lab.preflight import ask, assess
from hicache_lab.race import RaceResult, Scenario, race_map, scenario_of_answer, simulate
from hicache_lab.race.scenario import NS
from hicache_lab.sglang.releases import rules_for

SHARED = rules_for("0.5.19")
INCIDENT = Scenario(rules_for("0.5.8"))


def outcomes(result: RaceResult) -> list[str]:
    return [rank.outcome for rank in result.ranks]


def test_the_incident_passes_eight_times_and_kills() -> None:
    result = simulate(INCIDENT)
    assert result.outcome == "oom"
    assert result.passed == 8
    assert result.refused == 0
    assert (result.oom_kills, result.survivors) == (7, 1)
    assert result.peak_bytes == 449 * GB
    # eight ranks at 2 GB/s meet 445 GB after 445/16 s
    first = min(rank.end_seconds for rank in result.ranks if rank.end_seconds is not None)
    assert first == pytest.approx(445 / 16)


def test_enough_skew_refuses_cleanly_with_the_share_of_the_second_rank() -> None:
    result = simulate(replace(INCIDENT, skew_seconds=150))
    assert (result.outcome, result.oom_kills, result.refused) == ("refused", 0, 1)
    second = result.ranks[1]
    assert second.saw_bytes == 145 * GB
    assert second.budget_bytes == 145 * GB - 10 * GIB
    assert round(second.budget_bytes / GB, 2) == 134.26
    assert outcomes(result)[0] == "stopped", "SGLang's launcher ends the whole launch"


def test_without_the_launcher_every_later_rank_is_refused_alone() -> None:
    result = simulate(replace(INCIDENT, skew_seconds=150, launcher=False))
    assert outcomes(result) == ["survived"] + ["refused"] * 7


def test_the_later_guard_refuses_300_at_once() -> None:
    result = simulate(replace(INCIDENT, rules=SHARED))
    assert (result.refused, result.oom_kills, result.survivors) == (8, 0, 0)
    assert round(result.ranks[0].budget_bytes / GB, 2) == 54.28


def test_48_fits_when_checked_together_and_may_be_refused_when_staggered() -> None:
    assert simulate(replace(INCIDENT, requested_bytes=48 * GB)).survivors == 8
    together = replace(INCIDENT, rules=SHARED, requested_bytes=48 * GB)
    assert simulate(together).survivors == 8
    staggered = simulate(replace(together, skew_seconds=24, launcher=False))
    budgets = [round(rank.budget_bytes / GB, 2) for rank in staggered.ranks[:3]]
    assert budgets == [54.28, 48.28, 42.28]
    assert outcomes(staggered)[:3] == ["survived", "survived", "refused"]


def test_an_allocator_that_rounds_up_kills_where_the_check_saw_room() -> None:
    # 37.25 GiB a rank pass at 256 GB of RAM; the power of two above it does not fit four times
    scenario = replace(INCIDENT, ranks=4, host_bytes=256 * GB, requested_bytes=40 * GB)
    assert simulate(scenario).outcome == "fits"
    assert simulate(replace(scenario, resident_bytes=64 * GIB)).outcome == "oom"


def test_the_map_holds_all_three_outcomes() -> None:
    drawn = race_map(INCIDENT, [0, 1, 10, 150], [48, 100, 300, 440])
    assert drawn.outcomes[0] == ("fits", "oom", "oom", "refused")
    assert drawn.outcomes[3] == ("fits", "refused", "refused", "refused")


def test_memory_between_two_corner_points() -> None:
    result = simulate(replace(INCIDENT, requested_bytes=48 * GB))
    times, used = [sample.seconds for sample in result.samples], [sample.used_bytes for sample in result.samples]
    assert np.interp([0, 12, 1000], times, used).tolist() == [4 * GB, 4 * GB + 8 * 24 * GB, 388 * GB]


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
def test_impossible_scenarios_name_the_flag(change, flag) -> None:
    with pytest.raises(UsageError, match=flag):
        replace(INCIDENT, **change)


def gib(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most).map(lambda number: number * GIB)


TINY = st.builds(
    Scenario,
    # alone; alone with a pinned allocator; divided by ranks; the container's limit read as well
    rules=st.sampled_from([rules_for(version) for version in ("0.5.8", "0.5.3", "0.5.19", "0.5.21")]),
    ranks=st.integers(1, 6),
    host_bytes=gib(40, 120),
    other_bytes=gib(0, 30),
    requested_bytes=gib(1, 70),
    resident_bytes=st.none() | gib(1, 90),
    limit_bytes=st.none() | gib(1, 120),
    cgroup_headroom_bytes=st.none() | gib(0, 120),
    ranks_per_engine=st.none() | st.integers(1, 6),
    pin_bytes_per_second=st.just(GIB * NS),  # one GiB a nanosecond: the referee can count every tick
    skew_seconds=st.integers(0, 40).map(lambda n: n / NS),
    jitter_seconds=st.integers(0, 20).map(lambda n: n / NS),
    order=st.sampled_from(["rank", "reversed", "random"]),
    seed=st.integers(0, 99),
    launcher=st.booleans(),
    teardown_seconds=st.integers(0, 30).map(lambda n: n / NS),
)


def tick_by_tick(scenario: Scenario) -> list[str]:
    """The referee: one nanosecond and one GiB at a time, no closed form."""
    arrivals, ranks = scenario.arrivals_ns(), range(scenario.ranks)
    held, state, stop = [0] * scenario.ranks, ["waiting"] * scenario.ranks, None
    for now in range(max(arrivals) + 1000):
        if now:
            for r in ranks:
                held[r] += GIB * (state[r] == "pinning")
        for r in ranks:
            if state[r] == "pinning" and held[r] == scenario.pool_bytes:
                state[r] = "survived"

        def kill_while_full() -> None:
            while sum(held) > scenario.room_bytes or ("pinning" in state and sum(held) == scenario.room_bytes):
                victim = max(ranks, key=lambda rank: (held[rank], rank))
                held[victim], state[victim] = 0, "oom_killed"

        kill_while_full()
        free = scenario.available_bytes - sum(held)
        for r in [r for r in ranks if state[r] == "waiting" and arrivals[r] == now]:
            visible = max(free, 0)
            if scenario.rules.guard_reads_cgroup and scenario.cgroup_headroom_bytes is not None:
                visible = min(visible, max(scenario.cgroup_headroom_bytes - sum(held), 0))
            budget = visible - 10 * GIB
            if scenario.rules.guard_divides_by_ranks:
                budget //= scenario.ranks_per_engine or scenario.ranks
            state[r] = "pinning" if scenario.requested_bytes <= budget else "refused"
            if state[r] == "refused" and scenario.launcher and stop is None:
                stop = now + round(scenario.teardown_seconds * NS)
        kill_while_full()
        if stop is not None and now >= stop:
            return ["stopped" if s in {"waiting", "pinning", "survived"} else s for s in state]
    assert not {"waiting", "pinning"} & set(state)
    return state


# two pools of which one fits, both full within one nanosecond
AT_ONCE = Scenario(
    rules_for("0.5.8"),
    ranks=2,
    host_bytes=40 * GIB,
    other_bytes=0,
    requested_bytes=GIB,
    pin_bytes_per_second=GIB * NS,
    limit_bytes=GIB,
)


@given(TINY)
@example(AT_ONCE)
@settings(max_examples=400, deadline=None)
def test_agrees_with_the_tick_by_tick_referee(scenario: Scenario) -> None:
    assert outcomes(simulate(scenario)) == tick_by_tick(scenario)


@given(TINY)
@example(AT_ONCE)
def test_what_holds_for_every_scenario(scenario: Scenario) -> None:
    result = simulate(scenario)
    assert result == simulate(scenario), "same seed, same scenario"
    assert result.peak_bytes <= scenario.full_bytes <= scenario.host_bytes
    assert result.peak_bytes == max(sample.used_bytes for sample in result.samples)
    assert [s.seconds for s in result.samples] == sorted(s.seconds for s in result.samples)
    counts = [result.oom_kills, result.survivors, result.refused, outcomes(result).count("stopped")]
    assert sum(counts) == scenario.ranks
    for rank in result.ranks:
        assert rank.peak_bytes <= scenario.pool_bytes
        assert (rank.passed is False) == (rank.outcome == "refused")
        assert rank.outcome != "oom_killed" or rank.passed
    if result.outcome == "fits":
        assert result.peak_bytes == scenario.other_bytes + scenario.ranks * scenario.pool_bytes


@given(TINY, gib(0, 80))
def test_a_smaller_request_never_turns_a_fit_into_a_kill(scenario: Scenario, less: int) -> None:
    scenario = replace(scenario, resident_bytes=None)
    if simulate(scenario).outcome == "fits":
        smaller = replace(scenario, requested_bytes=max(GIB, scenario.requested_bytes - less))
        assert simulate(smaller).outcome == "fits"


LAUNCHES = [
    (version, size, facts)
    for version in ("0.5.3", "0.5.8", "0.5.19", "0.5.21", "0.5.23")
    for size in (10, 40, 48, 54, 70, 300)
    for facts in (
        {"host_ram": "449GB", "available": "445GB"},
        {"host_ram": "2TB", "available": "1.9TB", "cgroup_limit": "300GB"},
        {"host_ram": "2TB", "available": "1.9TB", "cgroup_limit": "500GB", "cgroup_usage": "80GB", "overhead": "20GB"},
    )
]


@pytest.mark.parametrize(("version", "size", "facts"), LAUNCHES)
def test_the_race_and_preflight_give_the_same_numbers(version: str, size: int, facts: dict[str, str]) -> None:
    answer = assess(ask("kimi-k2.5", version, tp_size=8, hicache_size=size, device_tokens=20_000, **facts))
    together, apart = answer.orders
    limit = answer.question.limit_bytes
    at_once = simulate(scenario_of_answer(answer))
    assert (at_once.oom_kills > 0) == (together.resident_bytes > limit)
    assert (at_once.refused > 0) == (together.refusal is not None)
    assert at_once.ranks[0].budget_bytes == answer.question.budget().budget_bytes
    in_turn = simulate(scenario_of_answer(answer, skew_seconds=1000))
    assert (in_turn.oom_kills > 0) == (apart.resident_bytes > limit) == (apart.killed_rank is not None)
    if in_turn.oom_kills:
        first_kill = min(rank.end_seconds for rank in in_turn.ranks if rank.outcome == "oom_killed")
        assert first_kill // 1000 == apart.killed_rank, "the rank whose pages passed the limit"
    else:
        refused = [rank.rank for rank in in_turn.ranks if rank.outcome == "refused"]
        assert refused == ([] if apart.refusal is None else [apart.refusal.rank])
        peak = max(sum(sample.rank_bytes) for sample in in_turn.samples)
        assert peak == apart.resident_bytes
    if answer.verdict in {"FITS", "TIGHT"}:
        assert (at_once.outcome, in_turn.outcome) == ("fits", "fits")
    if answer.verdict == "OOM_RISK":
        assert "oom" in (at_once.outcome, in_turn.outcome)


def test_a_scenario_needs_a_host_and_bytes() -> None:
    with pytest.raises(UsageError, match="a race needs the host's memory"):
        scenario_of_answer(assess(ask("kimi-k2.5", "0.5.8", tp_size=8, hicache_size=48)))
