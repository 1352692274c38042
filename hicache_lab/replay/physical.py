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

from hicache_lab.errors import HostError, UsageError
from hicache_lab.replay import _rank
from hicache_lab.replay.cgroup import Group, memory_group
from hicache_lab.replay.story import NS, Fate, RankStory, Replay, Sample, Story
from hicache_lab.units import GB, MB, format_gb

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
    which run in lock step; each reads the group's memory itself and decides itself. On a machine too busy to
    keep the pace, later checks wait until the earlier ranks hold what the story says.

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
            peak = group.peak_bytes()
            return Replay(
                story=story,
                provenance="replayed",
                ranks=tuple(cast.told(actor) for actor in cast.actors),
                samples=tuple(cast.samples),
                oom_kills=group.oom_kills(),
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
        return subprocess.Popen(
            [sys.executable, "-I", "-S", _rank.__file__, json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @staticmethod
    def _expect(process: subprocess.Popen[bytes], word: str) -> list[str]:
        """The next reply, which must begin with ``word``; empty when the process has been killed."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], DEADLINE_SECONDS)[0]:
            raise HostError(f"a replayed rank did not answer for {DEADLINE_SECONDS:.0f} s; the machine is too busy")
        words = process.stdout.readline().decode().split()
        if not words and process.wait() == -signal.SIGKILL:
            return []
        if not words or words[0] != word:
            raise HostError(
                f"a replayed rank could not start in its control group: {' '.join(words[1:]) or 'it ended'}; "
                f"use --cgroup with a group delegated to you, or the virtual replay"
            )
        return words[1:]

    def now(self) -> float:
        """Seconds in the story's time."""
        return (time.monotonic() - self.began) * self.speed

    def play(self) -> None:
        """From the first check until everybody is full, refused, stopped or killed."""
        self.began = time.monotonic()
        stop_at: float | None = None
        deadline = self.began + DEADLINE_SECONDS
        waiting = sorted(self.actors, key=lambda actor: (actor.arrival, actor.number))
        while True:
            if time.monotonic() > deadline:
                raise HostError(f"the replay did not end within {DEADLINE_SECONDS:.0f} s; the machine is too busy")
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
            pinning = [a for a in self.actors if a.passed and not a.full and a.process.returncode is None]
            if not pinning and not waiting and (stop_at is None or not self._alive()):
                return
            time.sleep(0.002)

    def _caught_up(self, arrival: int) -> bool:
        """Whether the ranks hold what the story says they hold by then (a busy machine must not change that)."""
        story = self.story
        for actor in self.actors:
            if not actor.passed or actor.full or actor.process.poll() is not None:
                continue
            planned = min(story.pool_bytes, story.pin_bytes_per_second * (arrival - actor.arrival) // NS)
            # one that should be full says so itself; the kernel's counter of the others may lag by some pages
            if planned == story.pool_bytes or self._held(actor) < planned // self.scale - MB:
                return False
        return True

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
                actor.saw, actor.budget, actor.passed = int(words[0]), int(words[1]), words[2] == "yes"
        for actor in due:
            if actor.passed:
                actor.tell("pin")
            elif actor.passed is False:
                actor.ended = self.now()
                actor.process.kill()
        return any(actor.passed is False for actor in due)

    def _look(self) -> None:
        """Notice who has become full and who has been killed."""
        for actor in self.actors:
            if actor.process.poll() is not None:
                actor.ended = self.now() if actor.ended is None else actor.ended
            elif actor.passed and not actor.full:
                assert actor.process.stdout is not None
                if select.select([actor.process.stdout], [], [], 0)[0]:
                    self._expect(actor.process, "full")
                    actor.full = actor.process.poll() is None

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
