"""The race with real processes and the kernel's OOM killer, in a memory control group of its own.

Where the machine offers no such group, each test asserts the refusal and its reason; in CI that is a failure.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.base.units import GB, MB
from hicache_lab.race import RaceResult, Scenario, physical, run_physical, simulate
from hicache_lab.race.cgroup import PREFIX, find_controller, memory_group
from hicache_lab.sglang.releases import rules_for

pytestmark = pytest.mark.physical

INCIDENT = Scenario(rules_for("0.5.8"))
SHARED = rules_for("0.5.19")


@pytest.fixture(scope="module")
def refusal() -> str | None:
    """Why this machine offers no memory control group; None when it does."""
    try:
        with memory_group(64 * MB):
            return None
    except HostError as error:
        return str(error)


def raced(scenario: Scenario, refusal: str | None) -> RaceResult | None:
    """The result; None when the machine cannot, and then its refusal has been checked."""
    if refusal is None:
        result = run_physical(scenario, pin_seconds=0.5)
        assert result.group is not None
        assert not Path(result.group).exists()
        return result
    assert os.environ.get("CI") != "true", f"CI must offer a memory control group: {refusal}"
    with pytest.raises(HostError, match="control group"):
        run_physical(scenario)
    return None


def test_the_kernel_kills_seven_of_eight(refusal) -> None:
    result = raced(INCIDENT, refusal)
    if result is None:
        return
    expected = simulate(INCIDENT)
    assert result.passed == 8, "each check alone said yes"
    assert (result.outcome, result.oom_kills, result.survivors, result.refused) == ("oom", 7, 1, 0)
    assert (expected.oom_kills, expected.survivors) == (result.oom_kills, result.survivors)
    assert 440 * MB < result.peak_bytes <= 449 * MB
    assert len(result.samples) > 10
    assert max(sum(s.rank_bytes) for s in result.samples) > 300 * MB, "the sampler saw the ranks fill up"
    survivor = next(rank for rank in result.ranks if rank.outcome == "survived")
    assert survivor.peak_bytes == pytest.approx(300 * MB, rel=0.01)
    assert survivor.end_seconds is None
    for line in result.kernel_lines:
        assert "oom-kill:" in line or "out of memory" in line


def test_48_each_survive_and_match_the_model(refusal) -> None:
    scenario = replace(INCIDENT, requested_bytes=48 * GB)
    result = raced(scenario, refusal)
    if result is None:
        return
    assert (result.outcome, result.oom_kills, result.survivors, result.refused) == ("fits", 0, 8, 0)
    assert result.peak_bytes * result.scale == pytest.approx(simulate(scenario).peak_bytes, rel=0.03)


def test_a_late_rank_is_refused_with_what_the_model_says(refusal) -> None:
    scenario = replace(INCIDENT, skew_seconds=200)
    result = raced(scenario, refusal)
    if result is None:
        return
    expected = simulate(scenario)
    assert (result.outcome, result.oom_kills, result.refused) == ("refused", 0, 1)
    assert [rank.outcome for rank in result.ranks] == [rank.outcome for rank in expected.ranks]
    assert result.ranks[1].budget_bytes * result.scale == pytest.approx(expected.ranks[1].budget_bytes, rel=0.03)


def test_the_later_guard_refuses_eight(refusal) -> None:
    result = raced(replace(INCIDENT, rules=SHARED), refusal)
    if result is None:
        return
    assert (result.refused, result.oom_kills, result.survivors) == (8, 0, 0)
    assert result.ranks[0].budget_bytes * 1000 == pytest.approx(54.28 * GB, rel=0.01)


def test_a_container_kills_where_the_checks_see_the_host(refusal) -> None:
    scenario = replace(INCIDENT, host_bytes=2000 * GB, limit_bytes=445 * GB)
    result = raced(scenario, refusal)
    if result is None:
        return
    assert (result.passed, result.outcome, result.oom_kills, result.survivors) == (8, "oom", 7, 1)
    assert result.ranks[0].saw_bytes * result.scale == pytest.approx(1996 * GB, rel=0.01)
    assert result.peak_bytes <= 449 * MB


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_behind_after_any_exit(refusal, end) -> None:
    if refusal is not None:
        assert os.environ.get("CI") != "true", refusal
        return
    code = "from hicache_lab.race import *;run_physical(scenario_of_release('0.5.8', size_gb=40), pin_seconds=60)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)
    mount = find_controller().mount

    try:
        group, ranks = None, []
        deadline = time.monotonic() + 20
        while len(ranks) < 9 and time.monotonic() < deadline:
            group = group or next(mount.rglob(f"{PREFIX}{process.pid}-*"), None)
            ranks = group.joinpath("cgroup.procs").read_text().split() if group else []
            time.sleep(0.05)
        assert group is not None
        assert len(ranks) == 9, "eight ranks and the host's other memory"
        process.send_signal(end)
        process.wait(timeout=10)
        while (group.exists() or any(psutil.pid_exists(int(pid)) for pid in ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not group.exists()
        assert not any(psutil.pid_exists(int(pid)) for pid in ranks)
    finally:
        process.kill()
        process.wait()


def test_later_checks_see_what_the_model_says_at_any_speed(refusal) -> None:
    # 2 s of skew are 7 ms here: no machine keeps that pace unless the ranks wait for each other
    scenario = replace(INCIDENT, skew_seconds=2)
    result = raced(scenario, refusal)
    if result is None:
        return
    expected = simulate(scenario)
    assert (result.outcome, result.oom_kills, result.refused) == ("oom", 7, 0)
    for real, model in zip(result.ranks, expected.ranks, strict=True):
        assert real.saw_bytes * result.scale == pytest.approx(model.saw_bytes, abs=2 * GB), real.rank
    times = [sample.seconds for sample in result.samples]
    assert times == sorted(times), "the scenario's clock never runs backwards"


def test_hours_between_checks_are_skipped(refusal) -> None:
    began = time.monotonic()
    result = raced(replace(INCIDENT, requested_bytes=48 * GB, ranks=3, skew_seconds=100_000), refusal)
    if result is None:
        return
    assert (result.outcome, result.survivors) == ("fits", 3)
    assert result.samples[-1].seconds > 200_000
    assert time.monotonic() - began < 30, "at this speed the wait alone would take an hour"


def test_a_rank_killed_by_somebody_else_is_no_oom_kill(refusal, monkeypatch) -> None:
    check = physical._Processes._check

    def and_kill(processes, due):
        refused = check(processes, due)
        processes.ranks[0].process.kill()
        return refused

    monkeypatch.setattr(physical._Processes, "_check", and_kill)
    with pytest.raises(
        HostError, match="not by the control group's OOM killer" if refusal is None else "control group"
    ):
        run_physical(replace(INCIDENT, requested_bytes=48 * GB), pin_seconds=0.5)


def test_a_rank_that_cannot_have_its_memory_is_an_error_not_a_fit(refusal, monkeypatch) -> None:
    popen = subprocess.Popen

    def limited(command, **rest):
        if command[3].endswith("_rank.py"):
            command = ["/bin/sh", "-c", 'ulimit -v 200000; exec "$@"', "sh", *command]
        return popen(command, **rest)

    monkeypatch.setattr(physical.subprocess, "Popen", limited)
    with pytest.raises(HostError, match="Cannot allocate memory" if refusal is None else "control group"):
        run_physical(INCIDENT, pin_seconds=0.5)


def test_processes_that_cannot_be_started_are_counted(refusal, monkeypatch) -> None:
    popen, started = subprocess.Popen, []

    def some(command, **rest):
        if command[3].endswith("_rank.py"):
            started.append(command)
            if len(started) > 5:
                raise OSError(24, "Too many open files")
        return popen(command, **rest)

    monkeypatch.setattr(physical.subprocess, "Popen", some)
    expected = "5 of 8 rank processes could be started: Too many open files" if refusal is None else "control group"
    with pytest.raises(HostError, match=expected):
        run_physical(INCIDENT)


def test_never_above_the_cap() -> None:
    with pytest.raises(UsageError, match=r"above the cap of 1\.00 GB; use --scale 449 or more"):
        run_physical(INCIDENT, scale=100)


def test_never_when_the_machine_itself_is_short(monkeypatch) -> None:
    monkeypatch.setattr(physical.psutil, "virtual_memory", type("M", (), {"available": 500 * MB}))
    with pytest.raises(HostError, match="so that only the control group runs out"):
        run_physical(INCIDENT)


def test_a_scale_too_large_for_real_processes() -> None:
    with pytest.raises(UsageError, match="use a smaller scale"):
        run_physical(INCIDENT, scale=10**6)
