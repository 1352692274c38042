"""Lines → events: multi-line statements, tracebacks, wrapped and cut lines of one stream."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any

from hicache_lab.base.secrets import redact
from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.batch import BOOLEANS, FIELDS, is_integer, parse_batch
from hicache_lab.forensics.logs.prefix import Head, records
from hicache_lab.forensics.logs.statements import QUOTING, STATEMENTS, exception_of, match_message, unwrap

# what containers, schedulers and the kernel log put before a line that has no prefix of its own
_OUTER = re.compile(
    r"(?:"
    r"[\w.-]{1,80}\s+\| ?"
    r"|\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)? (?:(?:stdout|stderr) [FP] ?)?(?:[\w.-]+ [\w.@/-]+(?:\[\d+\])?: ?)?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ [\w.@/()-]+(?:\[\d+\])?: ?"
    r"|\[ *\d+\.\d{6}\] ?|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] ?"
    r"|\([^()]{0,80}pid=\d+[^()]{0,80}\) ?|\[pod/[^\]]{1,200}\] ?|\[(?:default)?\d+\]: ?|\d{1,4}: "
    r")"
)
_CRI_PART = re.compile(r"^\S+ (?:stdout|stderr) P ")
_DIGITS = str.maketrans("123456789", "0" * 9)
_PINNING = re.compile(r"init_kv_buffer|pin_memory|memory_pool_host|HostKVCache|alloc_with_pin|cudaHost")
# "key: value" or "key=value": a record above could take it up
_ASSIGNMENT = re.compile(r"[A-Za-z#)\]}] ?[:=] ?[-\w]")


@dataclass
class _Pending:
    head: Head
    where: ev.SourceLine
    event: ev.Event | None
    lines: int
    joins: int = 0


@dataclass
class _Trace:
    where: ev.SourceLine
    at: datetime | None
    rank: ev.Rank
    process: str | None
    text: str
    pinning: bool = False
    inside: bool = True


@dataclass
class Assembler:
    """Turns the lines of one stream into events; feed it every line in order, then ``close`` it.

    A record is kept back until the next one begins, because its rest may stand on the following lines. Several
    tracebacks can be open at once, when ranks fail together; lines without a prefix belong to the oldest.
    """

    _pending: _Pending | None = None
    _traces: list[_Trace] = field(default_factory=list)
    _dead: ev.ProcessDeath | None = None
    _partial: dict[str, str] = field(default_factory=dict)
    _outer: str = ""
    _last_batch: dict[str, tuple[ev.SourceLine, frozenset[str]]] = field(default_factory=dict)
    _silent: set[str] = field(default_factory=set)

    def feed(self, line: str, where: ev.SourceLine, *, ended: bool = True) -> Iterator[ev.Event]:
        """One physical line without its newline; ``ended`` is false if the file stopped before a newline."""
        text = self._container(line)
        if text is None:
            return
        heads = records(text)
        if len(heads) > 1 and heads[1].headed and not heads[0].headed:
            self.saw_prefix(heads[0].message)
        for head in heads:
            if head.headed:
                yield from self.interrupt()
                yield from self.close_traces(head.rank)
                yield from self._begin(head, where, ended)
            else:
                yield from self._bare(head.message, where)

    def saw_prefix(self, prefix: str) -> None:
        """What stood before a record: it stands before the record's other lines too."""
        self._outer = prefix.translate(_DIGITS)

    def saw_batch(self, message: str, where: ev.SourceLine) -> None:
        """A batch line that was read elsewhere: a cut one is known by what it lacks of the last whole one."""
        if (batch := parse_batch(message)) is not None:
            known = self._last_batch.get(batch.phase)
            if known is None or known[0].file != where.file or known[0] < where:
                self._last_batch[batch.phase] = where, frozenset(batch.values)

    def interrupt(self) -> Iterator[ev.Event]:
        """Another record came between: nothing that follows continues the one kept back."""
        pending, self._pending = self._pending, None
        event = pending.event if pending is not None else None
        if event is None:
            return
        dead, self._dead = self._dead, None
        if isinstance(event, ev.ProcessDeath) and event.variant == "exit_code" and dead is not None:
            event, dead = replace(dead, exit_code=event.exit_code, text=f"{dead.text} {event.text}"), None
        if dead is not None:
            yield dead
        if isinstance(event, ev.ProcessDeath) and event.variant == "dead" and event.exit_code is None:
            # the exit code follows as a record of its own
            self._dead = event
        else:
            yield event

    def close(self) -> Iterator[ev.Event]:
        """What was still kept back."""
        yield from self.interrupt()
        yield from self.end_death()
        yield from self.close_traces(None)

    def end_death(self) -> Iterator[ev.Event]:
        """Another statement came: the exit code of a death held back is not told any more."""
        dead, self._dead = self._dead, None
        if dead is not None:
            yield dead

    @property
    def traced_ranks(self) -> set[ev.Rank]:
        """Ranks whose tracebacks have not ended."""
        return {trace.rank for trace in self._traces}

    def close_traces(self, rank: ev.Rank | None) -> Iterator[ev.Event]:
        """A record of a rank (None: the end) ends its traceback; another rank's may come between."""
        closing = [trace for trace in self._traces if rank is None or trace.rank == rank]
        self._traces = [trace for trace in self._traces if trace not in closing]
        for trace in closing:
            if trace.inside and trace.process:
                yield ev.Failure(
                    where=trace.where,
                    at=trace.at,
                    rank=trace.rank,
                    text=trace.text,
                    variant="process_exception",
                    process=trace.process,
                )

    def _open(self) -> _Trace | None:
        return next((trace for trace in self._traces if trace.inside), None)

    def _container(self, line: str) -> str | None:
        # docker's json-file and CRI cut records at 16 KiB; the parts are joined. Other loggers name fields otherwise
        if line.startswith('{"'):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                return line
            text = next((entry[key] for key in ("log", "MESSAGE", "message", "msg") if key in entry), None)
            if not isinstance(text, str):
                # a request or a statistic as JSON: what looks like a record in it is part of a prompt
                return None
            stream = "json:" + str(entry.get("stream"))
            if "log" in entry and "stream" in entry and not text.endswith("\n"):
                self._partial[stream] = self._partial.get(stream, "") + text
                return None
            return self._partial.pop(stream, "") + text.rstrip("\n")
        if (part := _CRI_PART.match(line)) is not None:
            stream = "cri:" + part[0].split()[1]
            self._partial[stream] = self._partial.get(stream, "") + line[part.end() :]
            return None
        if self._partial and (final := re.match(r"^\S+ (stdout|stderr) F ", line)):
            return self._partial.pop("cri:" + final[1], "") + line[final.end() :]
        return line

    def _begin(self, head: Head, where: ev.SourceLine, ended: bool) -> Iterator[ev.Event]:
        event = self._event(head, where, cut=not ended)
        if isinstance(event, ev.Failure) and event.variant == "process_exception":
            self._traces.append(_Trace(where, head.at, head.rank, event.process, head.message))
            return
        if "Traceback (most recent call last)" in head.message[-60:]:
            self._traces.append(_Trace(where, head.at, head.rank, None, head.message))
        self._pending = _Pending(head, where, event, _lines_after(event))
        yield from ()

    def _bare(self, line: str, where: ev.SourceLine) -> Iterator[ev.Event]:
        text = self._inner(line)
        stripped = text.strip()
        if stripped.startswith("Traceback (most recent call last)"):
            before = self._pending.head if self._pending else self._traces[-1] if self._traces else None
            yield from self.interrupt()
            if self._open() is None:
                at, rank = (before.at, before.rank) if before else (None, ev.Rank())
                self._traces.append(_Trace(where, at, rank, None, stripped))
            return
        exception = exception_of(stripped) if text[:1].strip() else None
        if exception is not None:
            yield from self.interrupt()
            self._exception(exception, stripped, where)
            return
        trace = self._open()
        if trace is not None and self._pending is None:
            trace.pinning = trace.pinning or bool(_PINNING.search(stripped))
            return
        if self._join(stripped, line):
            return
        for message in (text, text.strip(QUOTING)):
            lines = self._statement(message)
            if lines is not None:
                yield from self.interrupt()
                head = Head(None, ev.Rank(), message, headed=False)
                self._pending = _Pending(head, where, self._event(head, where, cut=False), lines)
                return

    def _inner(self, line: str) -> str:
        text = line
        # a record's other lines have the same prefix, with other numbers in it
        size = len(self._outer)
        if 3 < size < len(line) and line[:size].translate(_DIGITS) == self._outer:
            text = line[size:]
        for _ in range(3):
            match = _OUTER.match(text)
            if match is None or not text[match.end() :].strip():
                break
            text = text[match.end() :]
        return text

    @staticmethod
    def _statement(message: str) -> int | None:
        if parse_batch(message):
            return 0
        match = match_message(message)
        # a line without a prefix counts only if all of a statement is there; prose may begin like one
        return match[0].lines if match is not None and match[0].variant != "host.other" else None

    def _exception(self, exception: tuple[str, str], text: str, where: ev.SourceLine) -> None:
        trace = self._open() or (self._traces[-1] if self._traces else None)
        at, rank = (trace.at, trace.rank) if trace else (None, ev.Rank())
        head = Head(at, rank, text, headed=False)
        event = self._event(head, where, cut=False)
        if "CUDA error: invalid argument" in exception[1] and trace is not None and trace.pinning:
            event = ev.PinFailure(where=where, at=at, rank=rank, text=text, variant="pin")
        elif isinstance(event, ev.Failure):
            event = replace(event, process=event.process or (trace.process if trace else None))
        if trace is not None:
            trace.inside = False
        self._pending = _Pending(head, where, event, max(1, _lines_after(event)))

    def _join(self, stripped: str, line: str) -> bool:
        """Try the line as the rest of the record before it; true if it was taken."""
        pending = self._pending
        if pending is None or not stripped or pending.joins >= 4:
            return False
        message = pending.head.message
        # a statement that SGLang prints on several lines, or one that a terminal wrapped: it then ends in mid-sentence
        is_multiline = pending.lines > 0
        wrapped = line[:1] in " \t" or message.rstrip().endswith(",") or (len(message) > 30 and message[-1:].isalnum())
        if not (is_multiline or wrapped) or any(
            self._statement(one) is not None for one in (stripped, unwrap(stripped))
        ):
            return False
        joined = message.rstrip() + ("\n" if is_multiline else " ") + stripped
        head = replace(pending.head, message=joined)
        event = self._event(head, pending.where, cut=False)
        if (
            event is None
            or isinstance(event, ev.Failure)
            or (pending.event is not None and not _keeps_every_value(event, pending.event))
        ):
            return False
        if pending.event is not None and replace(event, text="") == replace(pending.event, text=""):
            # the line added no value, but a statement of several lines may get one from the next line
            pending.head = head if is_multiline and stripped.startswith(("Try to", "Ava")) else pending.head
            pending.joins += 1
            return is_multiline
        pending.event = replace(event, text=joined)
        pending.head = head
        pending.lines -= 1
        pending.joins += 1
        return True

    def _event(self, head: Head, where: ev.SourceLine, *, cut: bool) -> ev.Event | None:
        whole_message = message = head.message.strip()
        # a busy server repeats the same few messages thousands of times
        if whole_message in self._silent:
            return None
        common: dict[str, Any] = {
            "where": where,
            "at": head.at,
            "rank": head.rank,
            "text": message,
            "prefix": head.prefix,
        }
        if message.startswith("server_args="):
            from hicache_lab.sglang.launch.dump import read_server_args  # while the fast path reads on

            message = common["text"] = redact(message)
            args, launch = read_server_args(message) or ({}, None)
            return ev.ServerArgs(**common, variant="server_args", args=MappingProxyType(args), launch=launch)
        for unwrapped in dict.fromkeys((message, unwrap(message))):
            message = common["text"] = unwrapped
            if (batch := self._batch(message, common, cut)) is not None:
                return batch
            if (match := match_message(message)) is not None:
                return match[0].event(**common, variant=match[0].variant, **match[1])
        if (exception := exception_of(message)) is not None:
            if (match := match_message(exception[1])) is not None:
                return match[0].event(**common, variant=match[0].variant, **match[1])
            return ev.Failure(**common, variant="exception", exception=exception[0], message=exception[1])
        if not cut and len(whole_message) < 200 and len(self._silent) < 4096:
            self._silent.add(whole_message)
        return None

    def _batch(self, message: str, common: Mapping[str, Any], cut: bool) -> ev.Batch | None:
        batch = parse_batch(message)
        if batch is None:
            return None
        keys = frozenset(batch.values)
        # a last line without a newline that lacks fields its predecessors had was cut, perhaps inside a number
        if cut and batch.phase in self._last_batch and keys < self._last_batch[batch.phase][1]:
            batch = parse_batch(message, cut=True)
            if batch is None:
                return None
        else:
            self._last_batch[batch.phase] = common["where"], keys
        own: dict[str, Any] = {}
        other: dict[str, float] = {}
        for column, value in batch.values.items():
            if not is_integer(column) or math.isfinite(value):
                convert = bool if column in BOOLEANS else int if is_integer(column) else float
                if column in FIELDS:
                    own[column] = convert(value)
                else:
                    other[column] = value
        return ev.Batch(
            **common,
            variant=batch.phase,
            phase=batch.phase,
            iteration=batch.iteration,
            **own,
            other=MappingProxyType(other),
        )


def is_only_a_prefix(text: str) -> bool:
    """Whether a text before a record is nothing but what a container or a pipeline puts there.

    It then makes no statement, whatever its numbers, and adds nothing to the record above it.
    """
    if not text.replace("\t", " ").isprintable() or text.startswith('{"') or _CRI_PART.match(text):
        return False
    if "Traceback" in text or _PINNING.search(text):
        return False
    if _ASSIGNMENT.search(text) and _OUTER.fullmatch(text) is None:
        return False
    texts = {text, text.strip(), text.strip(QUOTING)}
    for _ in range(3):
        text = text[match.end() :] if (match := _OUTER.match(text)) else text
        texts |= {text, text.strip(), text.strip(QUOTING)}
    return not any(exception_of(one) or Assembler._statement(one) is not None for one in texts)


def _keeps_every_value(event: ev.Event, before: ev.Event) -> bool:
    """Whether no value is lost: joining an unrelated line damages the record's last value."""
    if type(event) is not type(before):
        return False
    kept = all(getattr(event, f.name) is not None for f in fields(before) if getattr(before, f.name) is not None)
    return kept and (not isinstance(before, ev.Batch) or before.other.keys() <= getattr(event, "other", {}).keys())


def _lines_after(event: ev.Event | None) -> int:
    """How many lines without a prefix may follow a statement."""
    return STATEMENTS[event.variant].lines if event is not None and event.variant in STATEMENTS else 0
