"""The allocation race for real, scaled down: processes, a memory control group, the kernel's OOM killer."""

from __future__ import annotations

import json
import os
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
from types import TracebackType

import psutil

from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.base.units import GB, MB, format_gb
from hicache_lab.race import _rank
from hicache_lab.race.cgroup import Group, memory_group
from hicache_lab.race.scenario import NS, Fate, RankStory, Replay, Sample, Story

DEFAULT_CAP_BYTES = 1 * GB
DEFAULT_PIN_SECONDS = 1.0  # how long one rank really takes for its pool
SAMPLE_SECONDS = 0.02
SPARE_BYTES = 256 * MB  # what the machine keeps beside the group
DEADLINE_SECONDS = 120.0


def scaled_limit_bytes(story: Story, scale: int, cap_bytes: int) -> int:
    """The group's limit: the host's RAM divided by ``scale``.

    Raises:
        UsageError: the limit is above the cap, or too small to hold the processes themselves.
    """
    if scale < 1:
        raise UsageError(f"--scale: expected 1 or more, got {scale}")
    limit = story.host_bytes // scale
    if limit > cap_bytes:
        raise UsageError(
            f"--scale: {format_gb(story.host_bytes)} / {scale} is {format_gb(limit)}, above the cap of "
            f"{format_gb(cap_bytes)}; use --scale {-(-story.host_bytes // cap_bytes)} or more"
        )
    least = 2 * MB * (story.ranks + 1)
    if limit < least:
        raise UsageError(
            f"--scale: {format_gb(story.host_bytes)} / {scale} leaves {limit:,} bytes for {story.ranks} real "
            f"processes, at least {least:,} are needed; use a smaller scale"
        )
    return limit


def enact(
    story: Story,
    *,
    scale: int = 1000,
    cap_bytes: int = DEFAULT_CAP_BYTES,
    pin_seconds: float = DEFAULT_PIN_SECONDS,
    parent: Path | None = None,
) -> Replay:
    """Tell the story with real processes, a memory control group and the kernel's own OOM killer.

    Ranks that are to check at the same moment do so before any of them takes a page, as SGLang's ranks do,
    which run in lock step; each reads the group's memory itself and decides itself. At each later check the earlier
    ranks hold what the story says, no more and no less, however busy the machine; while nobody makes pages
    resident, the story's clock skips to the next check.

    Args:
        story: the launch at full size.
        scale: bytes are divided by this.
        cap_bytes: the most memory the group may have.
        pin_seconds: real time in which one rank makes its pool resident; the clock runs
            ``story.pin_seconds / pin_seconds`` times faster than the story's.
        parent: the control group to work below (see `memory_group`).

    Returns:
        A `Replay` with provenance ``replayed``.

    Raises:
        UsageError: the scale does not fit the cap.
        HostError: no control group of its own, too little memory, or processes that do not answer.
    """
    limit = scaled_limit_bytes(story, scale, cap_bytes)
    free = psutil.virtual_memory().available
    if free < limit + SPARE_BYTES:
        raise HostError(
            f"this machine has {format_gb(free)} available, {format_gb(limit + SPARE_BYTES)} are needed "
            f"so that only the control group runs out; use a larger --scale"
        )
    with memory_group(limit, parent=parent) as group:
        kernel_log = _KernelLog()
        with _Cast(story, group, scale, story.pin_seconds / pin_seconds) as cast:
            with _sampled(cast):
                cast.play()
            peak, kills = group.peak_bytes(), group.oom_kills()
            ranks = tuple(cast.told(actor) for actor in cast.actors)
            if (others := sum(rank.fate == "oom_killed" for rank in ranks) - kills) > 0:
                raise HostError(
                    f"{others} replayed ranks were killed, but not by the control group's OOM killer (it counts "
                    f"{kills}): somebody else killed them; start the replay again"
                )
            return Replay(
                story=story,
                provenance="replayed",
                ranks=ranks,
                samples=tuple(cast.samples),
                oom_kills=kills,
                peak_bytes=peak if peak is not None else max(s.used_bytes for s in cast.samples),
                scale=scale,
                speed=cast.speed,
                kernel_lines=kernel_log.lines(group.path.name),
                group=str(group.path),
            )


@dataclass
class _Actor:
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

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(word.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # the kernel was faster
            pass

    @property
    def pinning(self) -> bool:
        """Whether it is making pages resident."""
        return self.passed is True and not self.full and self.process.poll() is None

    @property
    def fate(self) -> Fate:
        if self.passed is False:
            return "refused"
        if self.stopped:
            return "stopped"
        return "survived" if self.full and self.process.returncode is None else "oom_killed"


@dataclass
class _Cast:
    """All processes of one replay; leaves none behind."""

    story: Story
    group: Group
    scale: int
    speed: float
    actors: list[_Actor] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    began: float = 0.0
    latest: float = 0.0
    other: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Cast:
        try:
            for number, arrival in enumerate(self.story.arrivals_ns()):
                self.actors.append(_Actor(number, arrival, self._start(other=False)))
            self.other = self._start(other=True)
            for process in [*(actor.process for actor in self.actors), self.other]:
                self._expect(process, "ready")
            for actor in self.actors:
                actor.idle = psutil.Process(actor.process.pid).memory_info().rss
            # the processes' own memory is part of what the host holds already
            rest = self.story.other_bytes // self.scale - self.group.usage_bytes()
            assert self.other.stdin is not None
            if rest > 0:
                self.other.stdin.write(f"take {rest}\n".encode())
                self.other.stdin.flush()
                self._expect(self.other, "full")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        processes = [actor.process for actor in self.actors] + ([self.other] if self.other else [])
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # unread commands of a dead process
                    pipe.close()

    def _start(self, *, other: bool) -> subprocess.Popen[bytes]:
        story = self.story
        plan = {
            "group": str(self.group.path),
            "usage_file": self.group.usage_file,
            "limit_bytes": self.group.limit_bytes,
            "other": other,
            "requested_bytes": story.requested_bytes // self.scale,
            "pool_bytes": story.pool_bytes // self.scale,
            "reserve_bytes": story.guard.reserve_bytes // self.scale,
            "divisor": story.ranks if story.guard.divides_by_ranks else 1,
            "bytes_per_second": story.pin_bytes_per_second * self.speed / self.scale,
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
                f"{len(self.actors)} of {story.ranks} rank processes could be started: {error.strerror}; "
                f"use fewer --ranks or raise the limit (ulimit -n, ulimit -u)"
            ) from None

    @staticmethod
    def _expect(process: subprocess.Popen[bytes], *known: str) -> list[str]:
        """The next reply, which must begin with a ``known`` word; empty when the process has been killed."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], DEADLINE_SECONDS)[0]:
            raise HostError(f"a replayed rank did not answer for {DEADLINE_SECONDS:.0f} s; the machine is too busy")
        words = process.stdout.readline().decode().split()
        if not words and process.wait() == -signal.SIGKILL:
            return []
        if not words or words[0] not in known:
            reason = " ".join(words[1:]) or f"it ended with exit code {process.wait()}"
            hint = "use --cgroup with a group delegated to you, or " if "ready" in known else "use "
            raise HostError(f"a replayed rank failed in its control group: {reason}; {hint}the virtual replay")
        return words

    def now(self) -> float:
        """Seconds in the story's time; never less than before."""
        self.latest = max(self.latest, (time.monotonic() - self.began) * self.speed)
        return self.latest

    def play(self) -> None:
        """From the first check until everybody is full, refused, stopped or killed."""
        self.began = time.monotonic()
        stop_at: float | None = None
        deadline = self.began + DEADLINE_SECONDS + self.story.ranks * self.story.pin_seconds / self.speed
        waiting = sorted(self.actors, key=lambda actor: (actor.arrival, actor.number))
        while True:
            if time.monotonic() > deadline:
                took = time.monotonic() - deadline + DEADLINE_SECONDS
                raise HostError(f"the replay did not end within {took:.0f} s; the machine is too busy")
            # by the story's order, however late this loop comes round
            at = waiting[0].arrival / NS if waiting else None
            if at is not None and self.now() >= at and (stop_at is None or at < stop_at):
                if self._caught_up(waiting[0].arrival):
                    due = [actor for actor in waiting if actor.arrival == waiting[0].arrival]
                    waiting = waiting[len(due) :]
                    if self._check(due) and self.story.launcher and stop_at is None:
                        stop_at = at + self.story.teardown_seconds
                else:
                    self.began = time.monotonic() - at / self.speed  # the story's clock stands still
            self._look()
            if stop_at is not None and self.now() >= stop_at:
                self._stop()
                waiting = []
            pinning = any(actor.pinning for actor in self.actors)
            if not pinning and not waiting and (stop_at is None or not self._alive()):
                return
            if not pinning:
                self._skip([actor.arrival / NS for actor in waiting[:1]] + ([] if stop_at is None else [stop_at]))
            time.sleep(0.002)

    def _skip(self, moments: list[float]) -> None:
        """Nothing happens before the first of these moments: go there."""
        self.began -= max(min(moments) - self.now(), 0.0) / self.speed

    def _caught_up(self, arrival: int) -> bool:
        """Whether the ranks hold what the story says they hold by then (a busy machine must not change that)."""
        self._look()
        # one that should be full by then has no stop there
        return all(actor.waits and actor.stops[0] == arrival for actor in self.actors if actor.pinning)

    def _pin_words(self, actor: _Actor) -> str:
        """The command to pin, with what the rank holds when later ones check."""
        story = self.story
        sizes = {}
        for arrival in sorted({other.arrival for other in self.actors if other.arrival > actor.arrival}):
            planned = story.pin_bytes_per_second * (arrival - actor.arrival) // NS
            if planned < story.pool_bytes:
                sizes[arrival] = planned // self.scale
        actor.stops = list(sizes)
        return " ".join(["pin", *map(str, sizes.values())])

    def _held(self, actor: _Actor) -> int:
        """What a rank has made resident; 0 when it is gone."""
        try:
            return max(psutil.Process(actor.process.pid).memory_info().rss - actor.idle, 0)
        except psutil.NoSuchProcess:
            return 0

    def _check(self, due: list[_Actor]) -> bool:
        """Let these ranks check at the same moment; True when one was refused."""
        for actor in due:
            actor.tell("check")
        for actor in due:
            words = self._expect(actor.process, "saw")
            if words:
                actor.saw, actor.budget, actor.passed = int(words[1]), int(words[2]), words[3] == "yes"
        for actor in self.actors:
            if actor.waits:
                actor.waits = False
                actor.stops.pop(0)
                actor.tell("go")
        for actor in due:
            if actor.passed:
                actor.tell(self._pin_words(actor))
            elif actor.passed is False:
                actor.ended = self.now()
                actor.process.kill()
        return any(actor.passed is False for actor in due)

    def _look(self) -> None:
        """Notice who waits for others, who has become full and who has been killed."""
        for actor in self.actors:
            if actor.ended is None and (code := actor.process.poll()) is not None:
                if code != -signal.SIGKILL:
                    self._expect(actor.process)  # says why
                actor.ended = self.now()
            elif actor.pinning and not actor.waits:
                assert actor.process.stdout is not None
                if select.select([actor.process.stdout], [], [], 0)[0]:
                    reply = self._expect(actor.process, "at", "full")
                    actor.waits = reply[:1] == ["at"]
                    actor.full = reply == ["full"] and actor.process.poll() is None

    def _alive(self) -> list[_Actor]:
        return [actor for actor in self.actors if actor.process.poll() is None]

    def _stop(self) -> None:
        for actor in self._alive():
            actor.stopped, actor.ended = True, self.now()
            actor.process.kill()
        for actor in self.actors:
            actor.process.wait()

    def sample(self) -> None:
        """Record the group's and each rank's memory."""
        held = []
        for actor in self.actors:
            held.append(self._held(actor) if actor.ended is None else 0)
            actor.peak = max(actor.peak, held[-1])
        self.samples.append(Sample(self.now(), self.group.usage_bytes(), tuple(held)))

    def told(self, actor: _Actor) -> RankStory:
        """The record of one rank."""
        return RankStory(
            rank=actor.number,
            arrival_seconds=actor.arrival / NS,
            saw_bytes=actor.saw,
            budget_bytes=actor.budget,
            passed=actor.passed,
            peak_bytes=actor.peak,
            end_seconds=actor.ended if actor.fate != "survived" else None,
            fate=actor.fate,
        )


@contextmanager
def _sampled(cast: _Cast) -> Iterator[None]:
    """Sample in a thread of its own for the length of the block."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            cast.sample()

    cast.began = time.monotonic()
    cast.sample()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        cast.sample()


class _KernelLog:
    """The kernel's messages from now on, where they may be read."""

    def __init__(self, device: Path = Path("/dev/kmsg")) -> None:
        self._fd: int | None = None
        try:
            self._fd = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:  # not allowed, or no such device: the story does without
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def lines(self, group_name: str) -> tuple[str, ...]:
        """What was said of this group since, oldest first; closes the log."""
        if self._fd is None:
            return ()
        found: list[str] = []
        try:
            while record := os.read(self._fd, 8192):
                text = record.decode(errors="replace").split(";", 1)[-1].splitlines()[0]
                if (text.startswith("oom-kill:") and group_name in text) or (
                    text.startswith("Memory cgroup out of memory") and found and f" {_pid(found[-1])} " in text
                ):
                    found.append(text)
        except BlockingIOError:  # the end
            pass
        except OSError:  # overrun: older messages were lost
            pass
        finally:
            os.close(self._fd)
            self._fd = None
        return tuple(found)


def _pid(line: str) -> str:
    """The killed process's id in the kernel's ``oom-kill:`` line."""
    return next((word[4:] for word in line.split(",") if word.startswith("pid=")), "")
