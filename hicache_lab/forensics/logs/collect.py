"""A whole log in bounded memory: the fast path over chunks, the line parser for what it hands back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicache_lab.base.display import Displayed
from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.assemble import Assembler
from hicache_lab.forensics.logs.idle import Idleness
from hicache_lab.forensics.logs.pipeline import beginning, parts_of, whole_chunk
from hicache_lab.forensics.logs.reader import Source, arrays, begins_with_record, follow, sources
from hicache_lab.forensics.logs.run import Run

if TYPE_CHECKING:
    from hicache_lab.forensics.logs.columns import ColumnStore
    from hicache_lab.forensics.logs.fast_path import BatchRows, ChunkPart, FastPath


@dataclass
class Log(Displayed):
    """What one or more logs say.

    Attributes:
        sources: the streams read.
        runs: the launches, in the order of the streams and their lines.
        lines: physical lines read.
        recognised_lines: statements recognised (a statement of several lines counts once).
        own_lines: those among them that only SGLang makes.
        columns: the batch lines as columns, if they were asked for.
        interrupted: somebody stopped the reading; what came before is here.
    """

    sources: list[Source] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    lines: int = 0
    recognised_lines: int = 0
    own_lines: int = 0
    access: Counter[str] = field(default_factory=Counter)
    mentions_sglang: bool = False
    interrupted: bool = False
    columns: ColumnStore | None = None

    def __repr__(self) -> str:
        names = ", ".join(source.name for source in self.sources[:3]) + (", …" if len(self.sources) > 3 else "")
        return f"Log({names}: {self.lines:,} lines, {self.recognised_lines:,} recognised, {len(self.runs)} launches)"

    @property
    def is_sglang(self) -> bool:
        """Whether a line is SGLang's own."""
        return self.own_lines > 0

    def events(self) -> Iterator[ev.Event]:
        """The kept events of all runs."""
        return (event for run in self.runs for event in run.events)


def read_log(
    paths: str | Path | Iterable[str | Path],
    *,
    columns: bool = False,
    fast: bool | None = None,
    keep_partial: bool = False,
    on_read: Callable[[int], object] | None = None,
) -> Log:
    """Read logs whole, in memory bounded whatever their size.

    Args:
        paths: one or more files, directories, or ``-``; rotated files of one log become one stream.
        columns: keep every batch line's fields as columns (``frames`` makes DataFrames of them).
        fast: take the fast path (true) or the line parser alone (false); by default the size decides, because loading
            the fast path pays off only for large logs. Both give the same.
        keep_partial: on an interrupt (Ctrl-C) give what was read so far instead of raising.
        on_read: called with the bytes of each read, for a progress bar.

    Returns:
        Runs with their events and sums. A log without anything of SGLang has no runs' worth of facts
        (``is_sglang`` is false); nothing is raised for it.

    Raises:
        InputError: a file cannot be read.
    """
    several = [paths] if isinstance(paths, str | Path) else list(paths)
    log = Log(sources=sources(str(path) for path in several))
    if columns:
        from hicache_lab.forensics.logs.columns import ColumnStore

        log.columns = ColumnStore()
    for source in log.sources:
        try:
            _Stream(log, source).read(on_read, fast)
        except KeyboardInterrupt:
            if not keep_partial:
                raise
            log.interrupted = True
            break
    return log


def follow_events(path: str, *, stop: Callable[[], bool] = lambda: False, poll_s: float = 0.5) -> Iterator[ev.Event]:
    """The events of a growing file, for ever; a statement is held until the next line or a look that finds nothing new.

    Two such looks in a row end it: its rest, if there is one, then has had ``poll_s`` to arrive.
    """
    assembler = Assembler()
    number = quiet = 0
    try:
        for raw in follow(path, stop=stop, poll_s=poll_s):
            if raw is None:
                quiet += 1
                if quiet == 2:
                    yield from assembler.close()
                continue
            number, quiet = number + 1, 0
            yield from assembler.feed(raw.decode("utf-8", "replace").rstrip("\r\n"), ev.SourceLine(path, number))
    except KeyboardInterrupt:
        # reading a pipe waits, so its last statement is still held back
        yield from assembler.close()
        raise
    yield from assembler.close()


class _Stream:
    """One stream being read: its assembler, its current run, and who was idle."""

    def __init__(self, log: Log, source: Source) -> None:
        self.log = log
        self.source = source
        self.assembler = Assembler()
        self.run: Run | None = None
        self.first_run: Run | None = None
        self.starts: list[tuple[int, Run]] = []
        self.idle = Idleness()
        self.path = source.paths[0]
        self.previous_line = 0
        self.fast: FastPath | None = None
        # the part of a chunk whose other lines are read before its rows, and the batches among those lines
        self.part: ChunkPart | None = None
        self.deferred: list[tuple[ev.Batch, Run]] = []
        self.first_lines: dict[tuple[int, str], int] = {}
        self.cut: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def read(self, on_read: Callable[[int], object] | None, fast: bool | None) -> None:
        try:
            self._read(on_read, fast)
        finally:
            # the last statement too, where the reading was interrupted
            self._take(self.assembler.close())

    def _read(self, on_read: Callable[[int], object] | None, fast: bool | None) -> None:
        paths = self.source.paths
        for path, following in zip(paths, (*paths[1:], None), strict=True):
            self.path, self.previous_line, self.first_lines = path, 0, {}
            self.starts = [(0, self.run)] if self.run else []
            continues = following is not None and not begins_with_record(following)
            coming = self._joined(arrays(path, on_read=on_read), continues)
            # loading the fast path, and compiling it once, is worth its time only for a large log, and a pipe or a
            # compressed file does not tell its size: look at the beginning first
            if fast is None and self.fast is None:
                coming, small = beginning(coming)
            else:
                small = fast is False
            if small:
                self._by_line(coming)
                continue
            if self.fast is None:
                from hicache_lab.forensics.logs.fast_path import FastPath

                self.fast = FastPath()
            self.fast.lines = 0
            # closed at once: a kept traceback would keep its thread waiting
            with closing(parts_of(self.fast, coming)) as parts:
                for part in parts:
                    with whole_chunk():
                        self._add(part, self.fast)

    def _joined(self, coming: Iterable[npt.NDArray[np.uint8]], continues: bool) -> Iterator[npt.NDArray[np.uint8]]:
        # a rotation may cut a record: its first part is read as the beginning of the next file's first line
        for chunk in coming:
            whole = np.concatenate((self.cut, chunk)) if len(self.cut) else chunk
            self.cut = whole[:0]
            if continues and whole[-1] != ord("\n"):
                newlines = np.flatnonzero(whole == ord("\n"))
                end = int(newlines[-1]) + 1 if len(newlines) else 0
                self.cut, whole = whole[end:].copy(), whole[:end]
            if len(whole):
                yield whole

    def _by_line(self, coming: Iterable[npt.NDArray[np.uint8]]) -> None:
        for chunk in coming:
            begun = self.previous_line
            text = chunk.tobytes()
            lines = text.split(b"\n")
            ended = lines.pop() == b"" if text.endswith(b"\n") else False
            with whole_chunk():
                for index, raw in enumerate(lines):
                    self._line(raw, self.previous_line + 1, ended=ended or index < len(lines) - 1)
                self.log.lines += self.previous_line - begun

    def _add(self, part: ChunkPart, fast: FastPath) -> None:
        self.log.lines += part.last_line - self.previous_line
        if len(part.accesses):
            self.log.access["2xx"] += len(part.accesses)
            self.log.recognised_lines += len(part.accesses)
        self.part, self.deferred, self.first_lines = part, [], {}
        for line in part.others:
            if line.outer.strip():
                self.log.mentions_sglang |= b"sglang" in line.outer
                self.assembler.saw_prefix(line.outer.decode("utf-8", "replace"))
            if not line.ended:
                self._saw_batches(part)
            self._line(line.raw, line.number, ended=line.ended)
        self._saw_batches(part)
        self.part = None
        fresh = self.idle.mark(part, fast.ranks, [batch for batch, _ in self.deferred])
        for (batch, run), is_fresh in zip(self.deferred, fresh, strict=True):
            self._batch(batch, run, is_fresh)
        for rows, phase in ((part.decode, "decode"), (part.prefill, "prefill")):
            if len(rows):
                self._rows(part, rows, phase, fast)
        self.starts = self.starts[-1:]

    def _saw_batches(self, part: ChunkPart) -> None:
        for rows in (part.decode, part.prefill):
            if len(rows):
                self.assembler.saw_batch(part.text(rows, -1), ev.SourceLine(self.path, int(rows.line[-1])))

    def _line(self, raw: bytes, number: int, *, ended: bool) -> None:
        if number != self.previous_line + 1:
            self._between(self.previous_line, number)
        self.previous_line = number
        if not raw.strip():
            return
        if not self.log.mentions_sglang and b"sglang" in raw:
            self.log.mentions_sglang = True
        line = raw.decode("utf-8", "replace").rstrip("\r")
        self._take(self.assembler.feed(line, ev.SourceLine(self.path, number), ended=ended))

    def _between(self, before: int, number: int) -> None:
        """Records that the fast path took came between two lines: they end a statement, and their ranks' tracebacks."""
        self._take(self.assembler.interrupt())
        ranks = iter(self._ranks_between(before, number) if self.assembler.traced_ranks else ())
        for rank in ranks:
            self._take(self.assembler.close_traces(rank))
            break
        self._take(self.assembler.end_death())
        for rank in ranks:
            self._take(self.assembler.close_traces(rank))

    def _ranks_between(self, before: int, number: int) -> list[ev.Rank]:
        """The ranks of the records taken between two lines, in the order of their first."""
        first: dict[ev.Rank, int] = {}
        if self.part is None or self.fast is None:
            return []
        for rows in (self.part.decode, self.part.prefill):
            begin, end = np.searchsorted(rows.line, [before + 1, number])
            tags, places = np.unique(rows.tag[begin:end], return_index=True)
            for tag, place in zip(tags, places, strict=True):
                rank, line = self.fast.ranks[tag], int(rows.line[begin + place])
                first[rank] = min(line, first.get(rank, line))
        accesses = np.searchsorted(self.part.accesses, [before + 1, number])
        if accesses[1] > accesses[0]:
            line = int(self.part.accesses[accesses[0]])
            first[ev.Rank()] = min(line, first.get(ev.Rank(), line))
        return sorted(first, key=lambda rank: first[rank])

    def _take(self, events: Iterable[ev.Event]) -> None:
        for event in events:
            self.log.recognised_lines += 1
            self.log.own_lines += event.is_servers_own
            if isinstance(event, ev.Access):
                self.log.access[f"{(event.status or 0) // 100}xx"] += 1
                continue
            run = self._run_for(event)
            if not isinstance(event, ev.Batch):
                run.add(event)
            elif self.part is not None and event.where.file == self.path:
                # whether its rank was idle, the rows before it tell
                self.deferred.append((event, run))
            else:
                self._batch(event, run, self.idle.is_fresh(event))

    def _run_for(self, event: ev.Event) -> Run:
        if self.run is None:
            self._begin(min([event.where.line, *self._first_batches()]))
        assert self.run is not None
        if self._restarts(event, self.run):
            self._begin(event.where.line)
        elif self.run is self.first_run and event.where.file == self.run.start.file:
            # a traceback is known when it ends, and may have begun before everything else
            self.run.start = min(self.run.start, event.where)
        return self.run

    def _first_batches(self) -> list[int]:
        rows_of_part = (self.part.decode, self.part.prefill) if self.part is not None else ()
        return [int(rows.line[0]) for rows in rows_of_part if len(rows)]

    def _begin(self, line: int) -> None:
        self.run = Run(len(self.log.runs) + 1, self.source.name, ev.SourceLine(self.path, line))
        self.log.runs.append(self.run)
        self.first_run = self.first_run or self.run
        self.starts.append((line, self.run))

    def _decoded(self, run: Run, before: int) -> bool:
        if run.batches.decode or any(batch.phase == "decode" and owner is run for batch, owner in self.deferred):
            return True
        lines = self.part.decode.line if self.part is not None else ()
        begin, end = np.searchsorted(lines, [self.starts[-1][0], before])
        return bool(end > begin)

    def _restarts(self, event: ev.Event, run: Run) -> bool:
        if isinstance(event, ev.ServerArgs):
            begun = run.counts["server_args"] > 0 or run.counts["milestone"] > 0
            return begun or self._decoded(run, event.where.line)
        if not isinstance(event, ev.Milestone) or event.name not in ("dist_begin", "weights_begin"):
            return False
        mine = [m for m in run.of(ev.Milestone) if m.rank == event.rank]
        # a draft model loads its weights in the same launch; a launch that was ready or had failed does not
        again = any(m.name == event.name for m in mine)
        over = (
            run.milestone("ready") or run.counts["process_death"] or run.counts["host_refusal"] or run.counts["failure"]
        )
        return again and (event.name == "dist_begin" or bool(over))

    def _batch(self, batch: ev.Batch, run: Run, fresh: bool) -> None:
        run.batches.add(batch, fresh)
        self._first_batch(run, batch.phase, batch.where.line, batch.text)
        if batch.rank.label:
            run.labels.setdefault(batch.rank.label)
        run.saw(batch.at)
        if self.log.columns is not None:
            self.log.columns.add_event(batch, fresh, run.index)

    def _first_batch(self, run: Run, phase: str, line: int, text: str) -> None:
        # rows come after the lines handed back, and may stand before them
        known = self.first_lines.get((run.index, phase))
        if f"{phase}:" not in run.lines or (known is not None and line < known):
            run.lines[f"{phase}:"] = text
            self.first_lines[run.index, phase] = line

    def _rows(self, part: ChunkPart, rows: BatchRows, phase: str, fast: FastPath) -> None:
        self.log.recognised_lines += len(rows)
        self.log.own_lines += len(rows)
        if self.run is None:
            self._begin(min(int(each.line[0]) for each in (part.decode, part.prefill) if len(each)))
        cuts = [int(c) for c in np.searchsorted(rows.line, [start for start, _ in self.starts])]
        # rows before the first known start belong to it too: its first line came later in the same chunk
        cuts[0] = 0
        for (_, run), begin, end in zip(self.starts, cuts, [*cuts[1:], len(rows)], strict=True):
            if end > begin:
                mine = rows.part(begin, end)
                self._first_batch(run, phase, int(mine.line[0]), part.text(mine, 0))
                run.batches.add_rows(mine, phase, fast.ranks, self.path)
                for tag in np.unique(mine.tag):
                    if label := fast.ranks[tag].label:
                        run.labels.setdefault(label)
                run.saw(_time(int(mine.at_ms.min())))
                run.saw(_time(int(mine.at_ms.max())))
                if self.log.columns is not None:
                    self.log.columns.add_rows(mine, phase, [rank.label for rank in fast.ranks], self.path, run.index)


def _time(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC).replace(tzinfo=None)
