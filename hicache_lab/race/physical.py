"""The allocation race for real, scaled down: processes, a memory control group, the kernel's OOM killer."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.base.units import GB, MB, format_gb
from hicache_lab.host.cgroups import USAGE_FILE
from hicache_lab.race import _rank
from hicache_lab.race.cgroup import Group, KernelLog, memory_group
from hicache_lab.race.scenario import NS, RaceResult, RaceSample, RankOutcome, RankResult, Scenario

DEFAULT_CAP_BYTES = 1 * GB
DEFAULT_PIN_SECONDS = 1.0  # how long one rank really takes for its pool
SAMPLE_SECONDS = 0.02
SPARE_BYTES = 256 * MB  # what the machine keeps beside the group
DEADLINE_SECONDS = 120.0


def scaled_limit_bytes(scenario: Scenario, scale: int, cap_bytes: int) -> int:
    """The group's limit: the bytes in use at which the kernel kills, divided by ``scale``.

    Raises:
        UsageError: the limit is above the cap, or too small to hold the processes themselves.
    """
    if scale < 1:
        raise UsageError(f"--scale: expected 1 or more, got {scale}")
    limit = scenario.full_bytes // scale
    if limit > cap_bytes:
        raise UsageError(
            f"--scale: {format_gb(scenario.full_bytes)} / {scale} is {format_gb(limit)}, above the cap of "
            f"{format_gb(cap_bytes)}; use --scale {-(-scenario.full_bytes // cap_bytes)} or more"
        )
    least = 2 * MB * (scenario.ranks + 1)
    if limit < least:
        raise UsageError(
            f"--scale: {format_gb(scenario.full_bytes)} / {scale} leaves {limit:,} bytes for {scenario.ranks} real "
            f"processes, at least {least:,} are needed; use a smaller scale"
        )
    return limit


def run_physical(
    scenario: Scenario,
    *,
    scale: int = 1000,
    cap_bytes: int = DEFAULT_CAP_BYTES,
    pin_seconds: float = DEFAULT_PIN_SECONDS,
    parent: Path | None = None,
) -> RaceResult:
    """Race with real processes, a memory control group and the kernel's own OOM killer.

    Ranks that are to check at the same moment do so before any of them takes a page, as SGLang's ranks do,
    which run in lock step; each reads the group's memory itself and decides itself. At each later check the earlier
    ranks hold what the scenario says, no more and no less, however busy the machine; while nobody makes pages
    resident, the scenario's clock skips to the next check.

    Args:
        scenario: the launch at full size.
        scale: bytes are divided by this.
        cap_bytes: the most memory the group may have.
        pin_seconds: real time in which one rank makes its pool resident; the clock runs
            ``scenario.pin_seconds / pin_seconds`` times faster than the scenario's.
        parent: the control group to work below (see `memory_group`).

    Returns:
        A `RaceResult` with provenance ``replayed``.

    Raises:
        UsageError: the scale does not fit the cap.
        HostError: no control group of its own, too little memory, or processes that do not answer.
    """
    limit = scaled_limit_bytes(scenario, scale, cap_bytes)
    free = psutil.virtual_memory().available
    if free < limit + SPARE_BYTES:
        raise HostError(
            f"this machine has {format_gb(free)} available, {format_gb(limit + SPARE_BYTES)} are needed "
            f"so that only the control group runs out; use a larger --scale"
        )
    with memory_group(limit, parent=parent) as group:
        kernel_log = KernelLog()
        processes = _Processes(scenario, group, scale, scenario.pin_seconds / pin_seconds)
        try:
            processes.start()
            with _sampled(processes):
                processes.race()
            peak, kills = group.peak_bytes(), group.oom_kills()
            ranks = tuple(rank.result() for rank in processes.ranks)
        finally:
            processes.end()
        if (others := sum(rank.outcome == "oom_killed" for rank in ranks) - kills) > 0:
            raise HostError(
                f"{others} ranks were killed, but not by the control group's OOM killer (it counts "
                f"{kills}): somebody else killed them; start it again"
            )
        return RaceResult(
            scenario=scenario,
            provenance="replayed",
            ranks=ranks,
            samples=tuple(processes.samples),
            oom_kills=kills,
            peak_bytes=peak if peak is not None else max(s.used_bytes for s in processes.samples),
            scale=scale,
            speed=processes.speed,
            kernel_lines=kernel_log.lines(group.path.name),
            group=str(group.path),
        )


def _send(process: subprocess.Popen[bytes], command: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the kernel was faster
        process.stdin.write(command.encode() + b"\n")
        process.stdin.flush()


@dataclass
class _RankProcess:
    """One rank's process and what is known of it."""

    number: int
    arrival: int
    process: subprocess.Popen[bytes]
    saw: int | None = None
    budget: int | None = None
    passed: bool | None = None
    stops: list[int] = field(default_factory=list)  # arrivals of later ranks at which this one waits
    waits: bool = False  # at the first of its stops
    full: bool = False
    stopped: bool = False
    idle: int = 0  # what the process itself held before it took a page
    peak: int = 0
    ended: float | None = None

    @property
    def pinning(self) -> bool:
        """Whether it is making pages resident."""
        return self.passed is True and not self.full and self.process.poll() is None

    @property
    def outcome(self) -> RankOutcome:
        if self.passed is False:
            return "refused"
        if self.stopped:
            return "stopped"
        return "survived" if self.full and self.process.returncode is None else "oom_killed"

    def result(self) -> RankResult:
        """What happened to it."""
        return RankResult(
            rank=self.number,
            arrival_seconds=self.arrival / NS,
            saw_bytes=self.saw,
            budget_bytes=self.budget,
            passed=self.passed,
            peak_bytes=self.peak,
            end_seconds=self.ended if self.outcome != "survived" else None,
            outcome=self.outcome,
        )


@dataclass
class _Processes:
    """All processes of one race; leaves none behind."""

    scenario: Scenario
    group: Group
    scale: int
    speed: float
    ranks: list[_RankProcess] = field(default_factory=list)
    samples: list[RaceSample] = field(default_factory=list)
    began: float = 0.0
    latest: float = 0.0
    other: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start everybody, and fill the host to what is in use before the first check."""
        for number, arrival in enumerate(self.scenario.arrivals_ns()):
            self.ranks.append(_RankProcess(number, arrival, self._start(other=False)))
        self.other = self._start(other=True)
        for process in [*(rank.process for rank in self.ranks), self.other]:
            self._expect(process, "ready")
        for rank in self.ranks:
            rank.idle = psutil.Process(rank.process.pid).memory_info().rss
        # the processes' own memory is part of what the host holds already
        rest = self.scenario.other_bytes // self.scale - self.group.usage_bytes()
        if rest > 0:
            _send(self.other, f"take {rest}")
            self._expect(self.other, "full")

    def end(self) -> None:
        """Kill and reap whoever is left."""
        processes = [rank.process for rank in self.ranks] + ([self.other] if self.other else [])
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # unread commands of a dead process
                    pipe.close()

    def _start(self, *, other: bool) -> subprocess.Popen[bytes]:
        scenario, budget = self.scenario, self.scenario.budget()
        plan = {
            "group": str(self.group.path),
            "usage_file": USAGE_FILE[self.group.version],
            "sees_bytes": (scenario.other_bytes + budget.available_bytes) // self.scale,
            "other": other,
            "requested_bytes": scenario.requested_bytes // self.scale,
            "pool_bytes": scenario.pool_bytes // self.scale,
            "reserve_bytes": budget.reserve_bytes // self.scale,
            "divisor": budget.divisor,
            "bytes_per_second": scenario.pin_bytes_per_second * self.speed / self.scale,
        }
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", _rank.__file__, json.dumps(plan)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(
                f"{len(self.ranks)} of {scenario.ranks} rank processes could be started: {error.strerror}; "
                f"use fewer --ranks or raise the limit (ulimit -n, ulimit -u)"
            ) from None

    @staticmethod
    def _expect(process: subprocess.Popen[bytes], *known: str) -> list[str]:
        """The next reply, which must begin with a ``known`` word; empty when the process has been killed."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], DEADLINE_SECONDS)[0]:
            raise HostError(f"a rank did not answer for {DEADLINE_SECONDS:.0f} s; the machine is too busy")
        words = process.stdout.readline().decode().split()
        if not words and process.wait() == -signal.SIGKILL:
            return []
        if not words or words[0] not in known:
            reason = " ".join(words[1:]) or f"it ended with exit code {process.wait()}"
            hint = "use --cgroup with a group delegated to you, or " if "ready" in known else "use "
            raise HostError(f"a rank failed in its control group: {reason}; {hint}the virtual race")
        return words

    def now(self) -> float:
        """Seconds in the scenario's time; never less than before."""
        self.latest = max(self.latest, (time.monotonic() - self.began) * self.speed)
        return self.latest

    def race(self) -> None:
        """From the first check until everybody is full, refused, stopped or killed."""
        self.began = time.monotonic()
        stop_at: float | None = None
        deadline = self.began + DEADLINE_SECONDS + self.scenario.ranks * self.scenario.pin_seconds / self.speed
        waiting = sorted(self.ranks, key=lambda rank: (rank.arrival, rank.number))
        while True:
            if time.monotonic() > deadline:
                took = time.monotonic() - deadline + DEADLINE_SECONDS
                raise HostError(f"the race did not end within {took:.0f} s; the machine is too busy")
            # by the scenario's order, however late this loop comes round
            at = waiting[0].arrival / NS if waiting else None
            if at is not None and self.now() >= at and (stop_at is None or at < stop_at):
                if self._caught_up(waiting[0].arrival):
                    due = [rank for rank in waiting if rank.arrival == waiting[0].arrival]
                    waiting = waiting[len(due) :]
                    if self._check(due) and self.scenario.launcher and stop_at is None:
                        stop_at = at + self.scenario.teardown_seconds
                else:
                    self.began = time.monotonic() - at / self.speed  # the scenario's clock stands still
            self._look()
            if stop_at is not None and self.now() >= stop_at:
                self._stop()
                waiting = []
            pinning = any(rank.pinning for rank in self.ranks)
            if not pinning and not waiting and (stop_at is None or not self._alive()):
                return
            if not pinning:
                # nothing happens before the first of these moments: go there
                moments = [rank.arrival / NS for rank in waiting[:1]] + ([] if stop_at is None else [stop_at])
                self.began -= max(min(moments) - self.now(), 0.0) / self.speed
            time.sleep(0.002)

    def _caught_up(self, arrival: int) -> bool:
        """Whether the ranks hold what the scenario says they hold by then (a busy machine must not change that)."""
        self._look()
        # one that should be full by then has no stop there
        return all(rank.waits and rank.stops[0] == arrival for rank in self.ranks if rank.pinning)

    def _pin_command(self, rank: _RankProcess) -> str:
        """The command to pin, with what the rank holds when later ones check."""
        scenario = self.scenario
        sizes = {}
        for arrival in sorted({other.arrival for other in self.ranks if other.arrival > rank.arrival}):
            planned = scenario.pin_bytes_per_second * (arrival - rank.arrival) // NS
            if planned < scenario.pool_bytes:
                sizes[arrival] = planned // self.scale
        rank.stops = list(sizes)
        return " ".join(["pin", *map(str, sizes.values())])

    def _check(self, due: list[_RankProcess]) -> bool:
        """Let these ranks check at the same moment; True when one was refused."""
        for rank in due:
            _send(rank.process, "check")
        for rank in due:
            words = self._expect(rank.process, "saw")
            if words:
                rank.saw, rank.budget, rank.passed = int(words[1]), int(words[2]), words[3] == "yes"
        for rank in self.ranks:
            if rank.waits:
                rank.waits = False
                rank.stops.pop(0)
                _send(rank.process, "go")
        for rank in due:
            if rank.passed:
                _send(rank.process, self._pin_command(rank))
            elif rank.passed is False:
                rank.ended = self.now()
                rank.process.kill()
        return any(rank.passed is False for rank in due)

    def _look(self) -> None:
        """Notice who waits for others, who has become full and who has been killed."""
        for rank in self.ranks:
            if rank.ended is None and (code := rank.process.poll()) is not None:
                if code != -signal.SIGKILL:
                    self._expect(rank.process)  # says why
                rank.ended = self.now()
            elif rank.pinning and not rank.waits:
                assert rank.process.stdout is not None
                if select.select([rank.process.stdout], [], [], 0)[0]:
                    reply = self._expect(rank.process, "at", "full")
                    rank.waits = reply[:1] == ["at"]
                    rank.full = reply == ["full"] and rank.process.poll() is None

    def _alive(self) -> list[_RankProcess]:
        return [rank for rank in self.ranks if rank.process.poll() is None]

    def _stop(self) -> None:
        for rank in self._alive():
            rank.stopped, rank.ended = True, self.now()
            rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()

    def sample(self) -> None:
        """Record the group's and each rank's memory."""
        held = [0] * len(self.ranks)
        for rank in self.ranks:
            with suppress(psutil.NoSuchProcess):
                if rank.ended is None:
                    held[rank.number] = max(psutil.Process(rank.process.pid).memory_info().rss - rank.idle, 0)
            rank.peak = max(rank.peak, held[rank.number])
        self.samples.append(RaceSample(self.now(), self.group.usage_bytes(), tuple(held)))


@contextmanager
def _sampled(processes: _Processes) -> Iterator[None]:
    """Sample in a thread of its own for the length of the block."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            processes.sample()

    processes.began = time.monotonic()
    processes.sample()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        processes.sample()
