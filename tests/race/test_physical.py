"""The replay with real processes and the kernel's OOM killer, in a memory control group of its own.

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
from hicache_lab.race import Guard, Replay, Story, enact, physical, simulate
from hicache_lab.race.cgroup import PREFIX, find_layout, memory_group

pytestmark = pytest.mark.physical

INCIDENT = Story(Guard("0.5.8"))
SHARED = Guard("0.5.19", divides_by_ranks=True)


@pytest.fixture(scope="module")
def refusal() -> str | None:
    """Why this machine offers no memory control group; None when it does."""
    try:
        with memory_group(64 * MB):
            return None
    except HostError as error:
        return str(error)


def enacted(story: Story, refusal: str | None) -> Replay | None:
    """The replay; None when the machine cannot, and then its refusal has been checked."""
    if refusal is None:
        told = enact(story, pin_seconds=0.5)
        assert told.group is not None
        assert not Path(told.group).exists()
        return told
    assert os.environ.get("CI") != "true", f"CI must offer a memory control group: {refusal}"
    with pytest.raises(HostError, match="control group"):
        enact(story)
    return None


def test_the_kernel_kills_seven_of_eight(refusal) -> None:
    told = enacted(INCIDENT, refusal)
    if told is None:
        return
    said = simulate(INCIDENT)
    assert told.passed == 8, "each check alone said yes"
    assert (told.outcome, told.oom_kills, told.survivors, told.refused) == ("oom", 7, 1, 0)
    assert (said.oom_kills, said.survivors) == (told.oom_kills, told.survivors)
    assert 440 * MB < told.peak_bytes <= 449 * MB
    assert len(told.samples) > 10
    assert max(sum(s.rank_bytes) for s in told.samples) > 300 * MB, "the sampler saw the ranks fill up"
    survivor = next(rank for rank in told.ranks if rank.fate == "survived")
    assert survivor.peak_bytes == pytest.approx(300 * MB, rel=0.01)
    assert survivor.end_seconds is None
    for line in told.kernel_lines:
        assert "oom-kill:" in line or "out of memory" in line


def test_48_each_survive_and_match_the_model(refusal) -> None:
    story = replace(INCIDENT, requested_bytes=48 * GB)
    told = enacted(story, refusal)
    if told is None:
        return
    assert (told.outcome, told.oom_kills, told.survivors, told.refused) == ("fits", 0, 8, 0)
    assert told.peak_bytes * told.scale == pytest.approx(simulate(story).peak_bytes, rel=0.03)


def test_a_late_rank_is_refused_with_what_the_model_says(refusal) -> None:
    story = replace(INCIDENT, skew_seconds=200)
    told = enacted(story, refusal)
    if told is None:
        return
    said = simulate(story)
    assert (told.outcome, told.oom_kills, told.refused) == ("refused", 0, 1)
    assert [rank.fate for rank in told.ranks] == [rank.fate for rank in said.ranks]
    assert told.ranks[1].budget_bytes * told.scale == pytest.approx(said.ranks[1].budget_bytes, rel=0.03)


def test_the_later_guard_refuses_eight(refusal) -> None:
    told = enacted(replace(INCIDENT, guard=SHARED), refusal)
    if told is None:
        return
    assert (told.refused, told.oom_kills, told.survivors) == (8, 0, 0)
    assert told.ranks[0].budget_bytes * 1000 == pytest.approx(54.28 * GB, rel=0.01)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_behind_after_any_exit(refusal, end) -> None:
    if refusal is not None:
        assert os.environ.get("CI") != "true", refusal
        return
    code = (
        "from hicache_lab.race import *; from hicache_lab.base.units import GB;"
        "enact(Story(Guard('0.5.8'), requested_bytes=40 * GB), pin_seconds=60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)
    mount = find_layout().mount

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
    story = replace(INCIDENT, skew_seconds=2)
    told = enacted(story, refusal)
    if told is None:
        return
    said = simulate(story)
    assert (told.outcome, told.oom_kills, told.refused) == ("oom", 7, 0)
    for real, model in zip(told.ranks, said.ranks, strict=True):
        assert real.saw_bytes * told.scale == pytest.approx(model.saw_bytes, abs=2 * GB), real.rank
    times = [sample.seconds for sample in told.samples]
    assert times == sorted(times), "the story's clock never runs backwards"


def test_hours_between_checks_are_skipped(refusal) -> None:
    began = time.monotonic()
    told = enacted(replace(INCIDENT, requested_bytes=48 * GB, ranks=3, skew_seconds=100_000), refusal)
    if told is None:
        return
    assert (told.outcome, told.survivors) == ("fits", 3)
    assert told.samples[-1].seconds > 200_000
    assert time.monotonic() - began < 30, "at this speed the wait alone would take an hour"


def test_a_rank_killed_by_somebody_else_is_no_oom_kill(refusal, monkeypatch) -> None:
    check = physical._Cast._check

    def and_kill(cast, due):
        refused = check(cast, due)
        cast.actors[0].process.kill()
        return refused

    monkeypatch.setattr(physical._Cast, "_check", and_kill)
    with pytest.raises(
        HostError, match="not by the control group's OOM killer" if refusal is None else "control group"
    ):
        enact(replace(INCIDENT, requested_bytes=48 * GB), pin_seconds=0.5)


def test_a_rank_that_cannot_have_its_memory_is_an_error_not_a_fit(refusal, monkeypatch) -> None:
    popen = subprocess.Popen

    def limited(command, **rest):
        if command[3].endswith("_rank.py"):
            command = ["/bin/sh", "-c", 'ulimit -v 200000; exec "$@"', "sh", *command]
        return popen(command, **rest)

    monkeypatch.setattr(physical.subprocess, "Popen", limited)
    with pytest.raises(HostError, match="Cannot allocate memory" if refusal is None else "control group"):
        enact(INCIDENT, pin_seconds=0.5)


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
        enact(INCIDENT)


def test_never_above_the_cap() -> None:
    with pytest.raises(UsageError, match=r"above the cap of 1\.00 GB; use --scale 449 or more"):
        enact(INCIDENT, scale=100)


def test_never_when_the_machine_itself_is_short(monkeypatch) -> None:
    monkeypatch.setattr(physical.psutil, "virtual_memory", type("M", (), {"available": 500 * MB}))
    with pytest.raises(HostError, match="so that only the control group runs out"):
        enact(INCIDENT)


def test_a_scale_too_large_for_real_processes() -> None:
    with pytest.raises(UsageError, match="use a smaller scale"):
        enact(INCIDENT, scale=10**6)
