"""A workload by name: a trace file, or a generator with its parameters. Small enough to send to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.traffic.traces.generate import GENERATORS, generate
from hicache_lab.traffic.traces.reader import read_trace
from hicache_lab.traffic.traces.trace import Trace


@dataclass(frozen=True)
class Workload:
    """Where a trace comes from.

    Attributes:
        path: a trace file, or None.
        generator: a generator's name, or None; exactly one of both is given.
        parameters: the generator's parameters, as (name, value) pairs.
        reading: how the file is read, as (name, value) pairs for ``read_trace``.
    """

    path: str | None = None
    generator: str | None = None
    parameters: tuple[tuple[str, Any], ...] = ()
    reading: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if (self.path is None) == (self.generator is None):
            raise UsageError("a workload: expected a trace file or --generate NAME, one of both")

    @classmethod
    def named(cls, text: str, **parameters: Any) -> Workload:
        """A generator's name or a trace file's path, whichever ``text`` is; parameters go to the generator."""
        if text in GENERATORS and not Path(text).exists():
            return cls(generator=text, parameters=tuple(parameters.items()))
        if parameters:
            raise UsageError(f"{text}: a trace file takes no generator parameters ({', '.join(parameters)})")
        return cls(path=text)

    def load(self) -> Trace:
        """Read or generate the trace."""
        if self.path is not None:
            return read_trace(self.path, **dict(self.reading))
        assert self.generator is not None
        return generate(self.generator, **dict(self.parameters))
