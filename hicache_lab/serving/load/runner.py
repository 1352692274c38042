"""Send a plan to a server and measure every answer at the client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from hicache_lab.base.errors import ServerError, UsageError
from hicache_lab.serving.client import RawStream, Reply, ServerInfo, SglangClient, read_stream
from hicache_lab.serving.load.conversation import Conversation, Target
from hicache_lab.serving.load.pace import LagMeter, Limits, Pace
from hicache_lab.serving.load.plans import Phase, Plan, Session, warmup_plan
from hicache_lab.serving.load.results import LoadResult, RequestRecord
from hicache_lab.serving.load.thread_loop import run_in_thread
from hicache_lab.serving.load.watch import PERIOD_SECONDS, Watcher, went_backwards

# answers that nobody waits for are read after the run, up to so many bytes
_UNREAD_BYTES = 64 * 2**20
_LATE_SECONDS = 0.1


def run_load(
    base_url: str,
    plan: Plan,
    *,
    pace: Pace | None = None,
    limits: Limits | None = None,
    target: Target | None = None,
    warmup: int = 0,
    watch_period_s: float = PERIOD_SECONDS,
    api_key_env: str = "",
    progress: bool = True,
    client_options: Mapping[str, Any] | None = None,
) -> LoadResult:
    """Measure a plan; blocks until it has ended, works inside a notebook too.

    Args:
        base_url: the server.
        plan: what to send.
        pace: closed or open loop; default eight sessions at once, or the trace's own times.
        limits: hard caps.
        target: endpoint and sampling.
        warmup: prompts sent and answered before measuring, not in any summary.
        watch_period_s: seconds between scrapes of /metrics.
        api_key_env: name of the variable that holds the key.
        progress: a bar on stderr.
        client_options: further arguments for ``SglangClient``.

    Returns:
        The result. Ctrl-C ends the load and returns what was measured, with ``ended="interrupted"``.

    Raises:
        UsageError: a plan that breaks a hard cap at once, or arguments that do not fit together.
        ServerError: the server cannot be reached or is not ready before anything was sent.
    """

    async def go() -> LoadResult:
        async with SglangClient(base_url, api_key_env=api_key_env, **(client_options or {})) as client:
            return await load(
                client,
                plan,
                pace=pace,
                limits=limits,
                target=target,
                warmup=warmup,
                watch_period_s=watch_period_s,
                progress=progress,
            )

    return run_in_thread(go())


async def load(
    client: SglangClient,
    plan: Plan,
    *,
    pace: Pace | None = None,
    limits: Limits | None = None,
    target: Target | None = None,
    warmup: int = 0,
    watch_period_s: float = PERIOD_SECONDS,
    progress: bool = False,
) -> LoadResult:
    """The same on a running event loop, with an open client; cancelling it returns what was measured."""
    timed = any(session.at_s is not None for phase in plan.phases for session in phase.sessions)
    pace = pace or (Pace(by_trace=True) if timed else Pace(concurrency=8))
    target = target or Target()
    if pace.by_trace and not timed:
        raise UsageError("pace: by_trace needs a plan with arrival times (trace_replay)")
    several = any(len(session.turns) > 1 for phase in plan.phases for session in phase.sessions)
    if plan.form == "ids" and (target.api == "chat" or (several and target.api != "generate")):
        raise UsageError(
            f"api {target.api}: cannot send this plan as token ids"
            f"{' (answers come back as text)' if several else ''}; make the plan with form='text'"
        )
    await client.require_loaded()  # an error before anything is sent
    before = None  # a server that streams but does not describe itself
    with contextlib.suppress(ServerError):
        before = await client.server_info()
    run = _Run(client, plan, pace, limits or Limits(), target, progress)
    processes = before.processes_per_replica if before else 1
    watcher = Watcher(client, processes_per_replica=processes, period_s=watch_period_s)
    return await run.measure(warmup, watcher, before)


class _Run:
    """One load under way."""

    def __init__(
        self, client: SglangClient, plan: Plan, pace: Pace, limits: Limits, target: Target, progress: bool
    ) -> None:
        self._client, self._plan, self._pace, self._limits, self._target = client, plan, pace, limits, target
        self._progress = progress
        self._records: list[RequestRecord] = []
        self._unread: list[tuple[RequestRecord, RawStream]] = []
        self._unread_bytes = 0
        self._sent = self._measured = self._tokens = self._failures_in_a_row = 0
        self._start = time.perf_counter()
        self._deadline: float | None = None
        self._stop_reason: str | None = None
        self._gave_up = False
        self._bar: Any = None

    async def measure(self, warmup: int, watcher: Watcher, before: ServerInfo | None) -> LoadResult:
        """Warm up, run all phases, look at the server again."""
        meter = LagMeter()
        started_unix_s = time.time()
        try:
            with self._showing():
                if warmup:
                    sessions = enumerate(warmup_plan(self._plan, warmup).phases[0].sessions)
                    await asyncio.gather(*(self._session("warm-up", n, s, warmup=True) for n, s in sessions))
                self._start, started_unix_s = time.perf_counter(), time.time()
                if self._limits.duration_s is not None:
                    self._deadline = self._start + self._limits.duration_s
                watcher.start = self._start
                async with _in_background(meter.run(), watcher.run()):
                    for phase in self._plan.phases:
                        await self._phase(phase)
            ended = self._stop_reason or "complete"
        except asyncio.CancelledError:
            ended = "interrupted"
        duration_s = time.perf_counter() - self._start
        self._read_all()
        notes = await self._notes(watcher, before, interrupted=ended == "interrupted")
        lag = meter.lag
        notes += [lag.too_busy] if lag.too_busy else []
        return LoadResult(
            plan=self._plan.name,
            seed=self._plan.seed,
            parameters={
                **self._plan.parameters,
                "form": self._plan.form,
                "pace": asdict(self._pace),
                "limits": asdict(self._limits),
                "target": asdict(self._target),
                "warmup": warmup,
            },
            base_url=self._client.base_url,
            records=tuple(sorted(self._records, key=lambda record: record.index)),
            samples=watcher.samples(),
            started_unix_s=started_unix_s,
            duration_s=duration_s,
            ended=ended,
            lag=lag,
            notes=tuple(notes),
        )

    async def _phase(self, phase: Phase) -> None:
        """All sessions of a phase. A limit stops new prompts and waits for those under way."""
        began = time.perf_counter()
        arrive = self._pace.arrivals()
        room = asyncio.Semaphore(self._pace.concurrency) if self._pace.concurrency else None
        running: set[asyncio.Task[None]] = set()
        try:
            for number, session in enumerate(phase.sessions):
                after = arrive(session.at_s)
                due = None if after is None else began + after
                if await self._stopped_before(due):
                    break
                if room is not None:
                    await room.acquire()
                task = asyncio.create_task(self._session(phase.name, number, session, due, room))
                running.add(task)
                done_now = {task for task in running if task.done()}
                running -= done_now
                for done in done_now:
                    done.result()
            while running and not self._gave_up:
                done_now, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for done in done_now:
                    done.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _stopped_before(self, due: float | None) -> bool:
        """Sleep until a start time; True as soon as a limit forbids further prompts."""
        while not self._must_stop(0):
            left = 0.0 if due is None else due - time.perf_counter()
            if left <= 0:
                return False
            await asyncio.sleep(min(left, 0.25))
        return True

    async def _session(
        self,
        phase: str,
        number: int,
        session: Session,
        due: float | None = None,
        room: asyncio.Semaphore | None = None,
        *,
        warmup: bool = False,
    ) -> None:
        """The turns of one session; a failed turn ends it, as it would for a user."""
        talk = Conversation(self._target, self._plan.form)
        try:
            for place, turn in enumerate(session.turns):
                request = talk.request(turn.tokens, turn.max_new_tokens)
                if self._must_stop(talk.tokens):
                    return
                self._sent += 1
                self._measured += not warmup
                index = -self._sent if warmup else self._measured
                raw = await self._client.collect(request)
                self._failures_in_a_row = self._failures_in_a_row + 1 if raw.error else 0
                if self._failures_in_a_row >= self._limits.lost_after and not self._gave_up:
                    self._gave_up = True
                    failures = f"{self._failures_in_a_row} failures in a row"
                    self._stop_reason = f"gave up: {failures}, the last: {raw.error}"
                self._bar.update(1)
                due_s = None if due is None or place else due - self._start
                sent_s = raw.sent_s - self._start
                record = RequestRecord(index, phase, number, place, warmup, due_s, sent_s)
                if place == len(session.turns) - 1:
                    self._unread.append((record, raw))
                    self._unread_bytes += sum(len(chunk) for _, chunk in raw.chunks)
                    if self._unread_bytes > _UNREAD_BYTES:
                        self._read_all()
                    return
                reply = read_stream(raw, self._target.api)
                self._records.append(_filled(record, reply))
                if reply.error:
                    return
                talk.answered(request, reply)
        finally:
            if room is not None:
                room.release()

    def _read_all(self) -> None:
        """Read the answers kept back, so that reading does not disturb the measuring."""
        for record, raw in self._unread:
            self._records.append(_filled(record, read_stream(raw, self._target.api)))
        self._unread, self._unread_bytes = [], 0

    def _must_stop(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens, answer included, may not be sent; if it may, it is counted."""
        if self._stop_reason is None:
            if self._deadline is not None and time.perf_counter() >= self._deadline:
                self._stop_reason = "duration"
            elif tokens and self._sent >= self._limits.max_requests:
                self._stop_reason = f"cap: max_requests {self._limits.max_requests:,} reached"
            elif self._tokens + tokens > self._limits.max_tokens:
                self._stop_reason = f"cap: max_tokens {self._limits.max_tokens:,} would be exceeded"
            else:
                self._tokens += tokens
        return self._stop_reason is not None

    @contextlib.contextmanager
    def _showing(self) -> Iterator[None]:
        from tqdm import tqdm

        with tqdm(
            total=self._plan.requests,
            desc=f"load {self._plan.name}",
            unit="req",
            disable=not self._progress,
            leave=False,
        ) as self._bar:
            yield

    async def _notes(self, watcher: Watcher, before: ServerInfo | None, *, interrupted: bool) -> list[str]:
        """What a reader of the figures would not see."""
        measured = [record for record in self._records if not record.warmup]
        failed = [record for record in measured if record.error]
        notes = [f"{len(failed)} of {len(measured)} prompts failed; the first: {failed[0].error}"] if failed else []
        if under_way := self._sent - len(self._records):
            notes.append(f"prompts under way when the load ended, in no figure: {under_way}")
        if before is not None and not interrupted:
            await watcher.once()
            try:
                changed = (await self._client.server_info()).changed_since(before)
            except ServerError as error:
                notes.append(f"the server could not be asked after the load: {error}")
            else:
                if changed:
                    shown = ", ".join(f"{name}: {then} → {now}" for name, (then, now) in list(changed.items())[:6])
                    notes.append(f"the server was restarted during the load; what differs: {shown}")
        late = sorted(r.sent_s - r.due_s for r in self._records if r.due_s is not None)
        if late and (half := late[len(late) // 2]) > _LATE_SECONDS:
            notes.append(f"half of the prompts were sent {half:.2f} s late or more: the arrivals were not kept")
        samples = watcher.samples()
        if went_backwards(samples):
            notes.append("the server's counters fell during the load: it was restarted")
        gaps = [sample.missing for sample in samples if sample.missing]
        if gaps:
            notes.append(f"{len(gaps)} of {len(samples)} scrapes of /metrics failed: {gaps[-1]}")
        return notes


def _filled(record: RequestRecord, reply: Reply) -> RequestRecord:
    cached = reply.cached
    return replace(
        record,
        ttft_s=reply.ttft_s,
        itl_s=reply.itl_s,
        e2e_s=reply.e2e_s,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        cached_tokens=cached.total if cached else None,
        cached_device=cached.device if cached else None,
        cached_host=cached.host if cached else None,
        cached_storage=cached.storage if cached else None,
        output_ids=reply.output_ids,
        error=reply.error,
    )


@contextlib.asynccontextmanager
async def _in_background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Background work that ends with the block."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
