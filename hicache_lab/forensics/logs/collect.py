"""A whole log in bounded memory: the fast path over chunks, the patient parser for what it hands back."""

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

from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.assemble import Assembler
from hicache_lab.forensics.logs.reader import Source, arrays, begins_with_record, chunks, follow, sources
from hicache_lab.forensics.logs.run import Run
from hicache_lab.forensics.logs.scanning import beginning, scans, whole_chunk

if TYPE_CHECKING:
    from hicache_lab.forensics.logs.columns import ColumnStore
    from hicache_lab.forensics.logs.scanner import Rows, Scan, Scanner

_USAGES = ("token_usage", "full_token_usage", "swa_token_usage", "gpu_token_usage", "mamba_usage")


@dataclass
class Log:
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

    @property
    def is_sglang(self) -> bool:
        """Whether anything here was said by SGLang."""
        return self.own_lines > 0

    def events(self) -> Iterator[ev.Event]:
        """The kept events of all runs."""
        return (event for run in self.runs for event in run.events)


def read_log(
    paths: str | Path | Iterable[str | Path],
    *,
    columns: bool = False,
    patient: bool | None = None,
    keep_partial: bool = False,
    on_read: Callable[[int], object] | None = None,
) -> Log:
    """Read logs whole, in memory bounded whatever their size.

    Args:
        paths: one or more files, directories, or ``-``; rotated files of one log become one stream.
        columns: keep every batch line's fields as columns (``frames`` makes DataFrames of them).
        patient: use only the line-by-line parser (true) or the byte scanner (false); by default the size decides,
            because loading the scanner pays off only for large logs. Both give the same.
        keep_partial: on an interrupt (Ctrl-C) give what was read so far instead of raising.
        on_read: called with the bytes of each read, for a progress bar.

    Returns:
        Runs with their events and sums. A log without anything of SGLang has no runs' worth of facts
        (``is_sglang`` is false); nothing is raised for it.

    Raises:
        InputError: a file cannot be read.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    log = Log(sources=sources(str(path) for path in given))
    if columns:
        from hicache_lab.forensics.logs.columns import ColumnStore

        log.columns = ColumnStore()
    for source in log.sources:
        try:
            _Stream(log, source).read(on_read, patient)
        except KeyboardInterrupt:
            if not keep_partial:
                raise
            log.interrupted = True
            break
    return log


def read_events(paths: str | Path | Iterable[str | Path]) -> Iterator[ev.Event]:
    """Every event of the logs, batch lines included, one at a time through the patient parser."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    for source in sources(str(path) for path in given):
        assembler = Assembler()
        cut = ""
        for path, following in zip(source.paths, (*source.paths[1:], None), strict=True):
            continues = following is not None and not begins_with_record(following)
            for number, line, ended in _lines(path):
                whole, cut = cut + line, ""
                if continues and not ended:
                    cut = whole
                else:
                    yield from assembler.feed(whole, ev.SourceLine(path, number), ended=ended)
        yield from assembler.close()


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
        # a pipe cannot be looked at without waiting: what it said last is still held
        yield from assembler.close()
        raise
    yield from assembler.close()


def _lines(path: str) -> Iterator[tuple[int, str, bool]]:
    number = 0
    for chunk in chunks(path):
        lines = chunk.split(b"\n")
        ended = lines[-1] == b""
        for index, raw in enumerate(lines[:-1] if ended else lines):
            number += 1
            last = not ended and index == len(lines) - 1
            yield number, raw.decode("utf-8", "replace").rstrip("\r"), not last


class _Stream:
    """One stream being read: its assembler, its current run, and who was idle."""

    def __init__(self, log: Log, source: Source) -> None:
        self.log = log
        self.source = source
        self.assembler = Assembler()
        self.run: Run | None = None
        self.starts: list[tuple[int, Run]] = []
        self.idle: dict[str, bool] = {}
        self.path = source.paths[0]
        self.previous_line = 0
        # lines of the batches of a chunk whose other lines are read before them: decode, prefill
        self.coming: tuple[npt.NDArray[np.int32], ...] = ()
        self.cut: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def read(self, on_read: Callable[[int], object] | None, patient: bool | None) -> None:
        try:
            self._read(on_read, patient)
        finally:
            # the last statement too, where the reading was interrupted
            self._take(self.assembler.close())

    def _read(self, on_read: Callable[[int], object] | None, patient: bool | None) -> None:
        scanner: Scanner | None = None
        paths = self.source.paths
        for path, following in zip(paths, (*paths[1:], None), strict=True):
            self.path, self.previous_line = path, 0
            self.starts = [(0, self.run)] if self.run else []
            continues = following is not None and not begins_with_record(following)
            coming = self._joined(arrays(path, on_read=on_read), continues)
            # loading the scanner, and compiling it once, is worth its time only for a large log, and a pipe or a
            # compressed file does not tell its size: look at the beginning first
            if patient is None and scanner is None:
                coming, small = beginning(coming)
            else:
                small = patient is True
            if small:
                self._patiently(coming)
                continue
            if scanner is None:
                from hicache_lab.forensics.logs.scanner import Scanner

                scanner = Scanner()
            scanner.lines = 0
            # closed at once: a kept traceback would keep its thread waiting
            with closing(scans(scanner, coming)) as parts:
                for found in parts:
                    with whole_chunk():
                        self._found(found, scanner)

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

    def _patiently(self, coming: Iterable[npt.NDArray[np.uint8]]) -> None:
        for chunk in coming:
            begun = self.previous_line
            text = chunk.tobytes()
            lines = text.split(b"\n")
            ended = lines.pop() == b"" if text.endswith(b"\n") else False
            with whole_chunk():
                for index, raw in enumerate(lines):
                    self._line(raw, self.previous_line + 1, ended=ended or index < len(lines) - 1)
                self.log.lines += self.previous_line - begun

    def _found(self, scan: Scan, scanner: Scanner) -> None:
        self.log.lines += scan.last_line - self.previous_line
        self.coming = (scan.decode.line, scan.prefill.line)
        if scan.accesses:
            self.log.access["2xx"] += scan.accesses
            self.log.recognised_lines += scan.accesses
        for number, raw, ended in scan.others:
            self._line(raw, number, ended=ended)
        for rows, phase in ((scan.decode, "decode"), (scan.prefill, "prefill")):
            if len(rows):
                self._rows(rows, phase, scanner)
                if phase in scan.samples:
                    self._owner(int(rows.line[0])).lines.setdefault(f"{phase}:", scan.samples[phase])
        self.coming, self.starts = (), self.starts[-1:]
        if scan.last_line > self.previous_line:
            self._take(self.assembler.interrupt())
        self.previous_line = scan.last_line

    def _line(self, raw: bytes, number: int, *, ended: bool) -> None:
        if number != self.previous_line + 1:
            self._take(self.assembler.interrupt())
        self.previous_line = number
        if not raw.strip():
            return
        if not self.log.mentions_sglang and b"sglang" in raw:
            self.log.mentions_sglang = True
        line = raw.decode("utf-8", "replace").rstrip("\r")
        self._take(self.assembler.feed(line, ev.SourceLine(self.path, number), ended=ended))

    def _take(self, events: Iterable[ev.Event]) -> None:
        for event in events:
            self.log.recognised_lines += 1
            self.log.own_lines += event.is_servers_own
            if isinstance(event, ev.Access):
                self.log.access[f"{(event.status or 0) // 100}xx"] += 1
                continue
            run = self._run_for(event)
            if isinstance(event, ev.Batch):
                self._batch(event, run)
            else:
                run.add(event)

    def _run_for(self, event: ev.Event) -> Run:
        if self.run is None:
            self._begin(min([event.where.line, *self._first_batches()]))
        assert self.run is not None
        if self._restarts(event, self.run):
            self._begin(event.where.line)
        return self.run

    def _first_batches(self) -> list[int]:
        return [int(lines[0]) for lines in self.coming if len(lines)]

    def _begin(self, line: int) -> None:
        self.run = Run(len(self.log.runs) + 1, self.source.name, ev.SourceLine(self.path, line))
        self.log.runs.append(self.run)
        self.starts.append((line, self.run))

    def _decoded(self, run: Run, before: int) -> bool:
        lines = self.coming[0] if self.coming else ()
        begin, end = np.searchsorted(lines, [self.starts[-1][0], before])
        return run.batches.decode > 0 or bool(end > begin)

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

    def _batch(self, batch: ev.Batch, run: Run) -> None:
        label = batch.rank.label
        fresh = False
        if batch.phase == "decode":
            fresh = self.idle.get(label, True)
            self.idle[label] = False
        elif batch.running_req == 0:
            self.idle[label] = True
        run.batches.add(batch, fresh)
        run.lines.setdefault(f"{batch.phase}:", batch.text)
        if label:
            run.labels.setdefault(label)
        run.saw(batch.at)
        if self.log.columns is not None:
            self.log.columns.add_event(batch, fresh, run.index)

    def _rows(self, rows: Rows, phase: str, scanner: Scanner) -> None:
        self.log.recognised_lines += len(rows)
        self.log.own_lines += len(rows)
        if self.run is None:
            self._begin(min(self._first_batches()))
        if len(self.starts) == 1:
            self._sum(rows, phase, self.starts[0][1], scanner)
            return
        cuts = [int(c) for c in np.searchsorted(rows.line, [start for start, _ in self.starts])]
        # rows before the first known start belong to it too: its first line came later in the same chunk
        cuts[0] = 0
        for (_, run), begin, end in zip(self.starts, cuts, [*cuts[1:], len(rows)], strict=True):
            if end > begin:
                self._sum(rows.part(begin, end), phase, run, scanner)

    def _owner(self, line: int) -> Run:
        return next((run for start, run in reversed(self.starts) if start <= line), self.starts[0][1])

    def _sum(self, rows: Rows, phase: str, run: Run, scanner: Scanner) -> None:
        stats, values = run.batches, rows.values
        counted = np.bincount(rows.tag, minlength=1)
        for tag in np.flatnonzero(counted):
            label = scanner.tags[tag]
            stats.by_rank[label] += int(counted[tag])
            if label:
                run.labels.setdefault(label)
        for name in ("running_req", "queue_req", *_USAGES):
            column = values.get(name)
            if column is None:
                continue
            # argmax stops at the first NaN, so it serves only columns without one
            best = int(column.argmax())
            if name not in rows.full or not np.isfinite(column[best]):
                best = int(np.where(np.isfinite(column), column, -np.inf).argmax())
            shown = "token_usage" if name in _USAGES else name
            stats.peak(shown, float(column[best]), ev.SourceLine(self.path, int(rows.line[best])))
        run.saw(_time(int(rows.at_ms.min())))
        run.saw(_time(int(rows.at_ms.max())))
        if phase == "prefill":
            stats.prefill += len(rows)
            for name, by_rank in (("cached_token", stats.cached_by_rank), ("new_token", stats.new_by_rank)):
                if name in values:
                    known = np.where(np.isfinite(values[name]), values[name], 0.0)
                    sums = np.bincount(rows.tag, weights=known, minlength=1)
                    for tag in np.flatnonzero(counted):
                        by_rank[scanner.tags[tag]] += int(sums[tag])
        else:
            stats.decode += len(rows)
            stats.fresh += int(rows.fresh.sum())
            if "gen_throughput" in values:
                steady = values["gen_throughput"][~rows.fresh]
                steady = steady[np.isfinite(steady)]
                stats.throughput_lines += len(steady)
                stats.throughput_sum += float(steady.sum())
                stats.throughput_max = max(stats.throughput_max, float(steady.max(initial=0.0)))
        if self.log.columns is not None:
            self.log.columns.add_rows(rows, phase, scanner.tags, self.path, run.index)


def _time(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC).replace(tzinfo=None)
