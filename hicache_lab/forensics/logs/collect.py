"""A whole log in bounded memory: the fast path over chunks, the line parser for what it hands back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicache_lab.base.display import Displayed, one_line
from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.assemble import Assembler
from hicache_lab.forensics.logs.pipeline import beginning, parts_of, whole_chunk
from hicache_lab.forensics.logs.reader import Source, arrays, begins_with_record, follow, sources
from hicache_lab.forensics.logs.rows import EPOCH, NO_TIME, BatchRows, ChunkPart, HandedBack, Idleness
from hicache_lab.forensics.logs.run import Run

if TYPE_CHECKING:
    from hicache_lab.forensics.logs.columns import ColumnStore
    from hicache_lab.forensics.logs.fast_path import FastPath


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
        names = one_line(names)
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


_NO_ROWS = ChunkPart([], last_line=0)


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
        # the part of a chunk whose other lines are being read before its rows, and the batches among those lines
        self.part = _NO_ROWS
        self.deferred: list[tuple[Run, ev.Batch]] = []
        self.first_lines: dict[tuple[int, str], int] = {}
        self.cut: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def read(self, on_read: Callable[[int], object] | None, fast: bool | None) -> None:
        try:
            self._read(on_read, fast)
        finally:
            # the last statement too, where the reading was interrupted
            self._take(self.assembler.close())
            self._sum_up(self._rows())

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
            if not small and self.fast is None:
                from hicache_lab.forensics.logs.fast_path import FastPath

                self.fast = FastPath()
            if not small and self.fast is not None:
                self.fast.lines = 0
            # closed at once: a kept traceback would keep its thread waiting
            with closing(_by_line(coming) if small or self.fast is None else parts_of(self.fast, coming)) as parts:
                for part in parts:
                    with whole_chunk():
                        self._add(part)

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

    def _add(self, part: ChunkPart) -> None:
        self.log.lines += part.last_line - self.previous_line
        if len(part.accesses):
            self.log.access["2xx"] += len(part.accesses)
            self.log.recognised_lines += len(part.accesses)
        self.part, self.first_lines = part, {}
        for line in part.others:
            if line.outer.strip():
                self.log.mentions_sglang |= b"sglang" in line.outer
                self.assembler.saw_prefix(line.outer.decode("utf-8", "replace"))
            if not line.ended:
                self._saw_batches()
            self._line(line.raw, line.number, ended=line.ended)
        self._saw_batches()
        self._sum_up(self._rows())
        self.starts = self.starts[-1:]

    def _rows(self) -> Iterator[tuple[Run, BatchRows]]:
        """The part's rows, and the batches among its other lines, each with their run."""
        part, self.part, batches, self.deferred = self.part, _NO_ROWS, self.deferred, []
        if part.rows and self.run is None:
            self._begin(min(rows.line(0) for rows in part.rows))
        for rows in part.rows:
            self.log.recognised_lines += len(rows)
            self.log.own_lines += len(rows)
            cuts = rows.index(*(start for start, _ in self.starts))
            # rows before the first known start belong to it too: its first line came later in the same chunk
            for (_, run), begin, end in zip(self.starts, [0, *cuts[1:]], [*cuts[1:], len(rows)], strict=True):
                if end > begin:
                    yield run, rows.part(begin, end)
        for run in {run.index: run for run, _ in batches}.values():
            for phase in ("decode", "prefill"):
                if mine := [batch for owner, batch in batches if owner is run and batch.phase == phase]:
                    yield run, BatchRows.of(mine)

    def _sum_up(self, several: Iterable[tuple[Run, BatchRows]], path: str | None = None) -> None:
        several, path = list(several), path or self.path
        self.idle.mark([rows for _, rows in several])
        for run, rows in several:
            # rows come after the lines handed back, and may stand before them
            key = run.index, rows.phase
            if f"{rows.phase}:" not in run.lines or rows.line(0) < self.first_lines.get(key, 0):
                run.lines[f"{rows.phase}:"] = rows.message(0)
                self.first_lines[key] = rows.line(0)
            run.batches.add_rows(rows, path)
            timed = rows.at_us if rows.at_us.min() != NO_TIME else rows.at_us[rows.at_us != NO_TIME]
            for at_us in (timed.min(), timed.max()) if len(timed) else ():
                run.saw(EPOCH + timedelta(microseconds=int(at_us)))
            if self.log.columns is not None:
                self.log.columns.add_rows(rows, path, run.index)

    def _saw_batches(self) -> None:
        for rows in self.part.rows:
            self.assembler.saw_batch(rows.message(-1), ev.SourceLine(self.path, rows.line(-1)))

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
        ranks = self._ranks_between(before, number) if self.assembler.traced_ranks else []
        for rank in ranks[:1]:
            self._take(self.assembler.close_traces(rank))
        self._take(self.assembler.end_death())
        for rank in ranks[1:]:
            self._take(self.assembler.close_traces(rank))

    def _ranks_between(self, before: int, number: int) -> list[ev.Rank]:
        """The ranks of the records taken between two lines, in the order of their first."""
        first: list[tuple[int, ev.Rank]] = []
        for rows in self.part.rows:
            begin, end = rows.index(before + 1, number)
            tags, places = np.unique(rows.tag[begin:end], return_index=True)
            first += [(rows.line(begin + at), rows.ranks[tag]) for tag, at in zip(tags, places, strict=True)]
        begin, end = np.searchsorted(self.part.accesses, [before + 1, number])
        first += [(int(line), ev.Rank()) for line in self.part.accesses[begin:end][:1]]
        return list(dict.fromkeys(rank for _, rank in sorted(first)))

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
            elif event.where.file == self.path:
                # whether its rank was idle, the rows before it tell
                self.deferred.append((run, event))
            else:
                # the last record of the file before
                self._sum_up([(run, BatchRows.of([event]))], event.where.file)

    def _run_for(self, event: ev.Event) -> Run:
        if self.run is None:
            self._begin(min([event.where.line, *(rows.line(0) for rows in self.part.rows)]))
        assert self.run is not None
        if self._restarts(event, self.run):
            self._begin(event.where.line)
        elif self.run is self.first_run and event.where.file == self.run.start.file:
            # a traceback is known when it ends, and may have begun before everything else
            self.run.start = min(self.run.start, event.where)
        return self.run

    def _begin(self, line: int) -> None:
        self.run = Run(len(self.log.runs) + 1, self.source.name, ev.SourceLine(self.path, line))
        self.log.runs.append(self.run)
        self.first_run = self.first_run or self.run
        self.starts.append((line, self.run))

    def _decoded(self, run: Run, before: int) -> bool:
        if run.batches.decode or any(batch.phase == "decode" and owner is run for owner, batch in self.deferred):
            return True
        cuts = [rows.index(self.starts[-1][0], before) for rows in self.part.rows if rows.phase == "decode"]
        return any(begin < end for begin, end in cuts)

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


def _by_line(coming: Iterable[npt.NDArray[np.uint8]]) -> Generator[ChunkPart]:
    """Chunks of which every line is for the line parser."""
    number = 0
    for chunk in coming:
        text = chunk.tobytes()
        lines = text.split(b"\n")
        ended = text.endswith(b"\n") and lines.pop() == b""
        begun, number = number, number + len(lines)
        yield ChunkPart(
            [HandedBack(at, raw, ended or at < number) for at, raw in enumerate(lines, begun + 1)], last_line=number
        )
