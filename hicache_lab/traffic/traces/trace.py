"""One trace: for each request the blocks of its prompt, as prefix identities, and its lengths.

A block id names a whole prefix (the block and everything before it), as Mooncake's ``hash_ids`` and SGLang's page
hashes do. Ids are dense (0 … unique - 1) and chained: an id always has the same parent. The exact simulators rest on
that, so every reader passes through ``Trace.build``, which checks it and re-chains ids that are plain content hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hicache_lab.base.display import Displayed, one_line
from hicache_lab.base.errors import InputError, UsageError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.uint32]

MOST_EXACT = 2**53  # what a float holds exactly; no length or time is larger


@dataclass(frozen=True)
class Trace(Displayed):
    """A workload ready for simulation.

    Attributes:
        ids: dense prefix-block ids of all requests, one after the other: prompt blocks, then (where the outputs are
            known) the blocks that the output adds.
        offsets: request ``r`` owns ``ids[offsets[r]:offsets[r + 1]]``; one entry more than requests.
        prompt_blocks: how many of a request's blocks are looked up, shape (requests,).
        input_tokens: prompt lengths in tokens, shape (requests,).
        output_tokens: generated tokens, shape (requests,); 0 where unknown.
        unique_blocks: the size of the id space.
        block_tokens: tokens a block.
        arrival_s: arrival times in seconds, shape (requests,), or None.
        prefix_known: False for traces of lengths only: nothing can be said about hits.
        outputs_known: the ids go on past the prompt.
        origin: where the requests come from, for captions ("measured: FILE", "generated: multi_turn seed 7").
        skipped: reason → number of records left out by the reader.
        notes: what a reader had to assume.
    """

    ids: Ids
    offsets: Ints
    prompt_blocks: Ints
    input_tokens: Ints
    output_tokens: Ints
    unique_blocks: int
    block_tokens: int
    arrival_s: Floats | None = None
    prefix_known: bool = True
    outputs_known: bool = False
    origin: str = "trace"
    skipped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Trace({one_line(self.origin)}: {self.requests:,} requests, {self.total_input_tokens:,} prompt tokens)"

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.input_tokens)

    @property
    def references(self) -> int:
        """Prompt blocks looked up: what a block hit rate is a share of."""
        return int(self.prompt_blocks.sum())

    @property
    def total_input_tokens(self) -> int:
        """Prompt tokens of all requests: what a token hit rate is a share of."""
        return int(self.input_tokens.sum())

    @property
    def duration_s(self) -> float | None:
        """Seconds from the first to the last arrival, or None."""
        if self.arrival_s is None or self.requests < 2:
            return None
        return float(self.arrival_s.max() - self.arrival_s.min()) or None

    @property
    def tail_deficit(self) -> Ints:
        """Tokens by which a request's last prompt block falls short of a whole block, shape (requests,)."""
        short: Ints = np.maximum(self.prompt_blocks * self.block_tokens - self.input_tokens, 0)
        return short

    def require_prefixes(self, purpose: str) -> None:
        """Refuse work that needs to know which prompts share a prefix."""
        if not self.prefix_known:
            why = next((f": {note}" for note in self.notes if "lengths only" not in note), "")
            raise InputError(
                f"{self.origin}: the trace holds lengths only, no prefix information{why}, so {purpose} cannot be "
                f"computed ({self.requests:,} requests, on average {self.input_tokens.mean():,.0f} prompt tokens and "
                f"{self.output_tokens.mean():,.0f} generated ones); "
                "give a trace with hash_ids or prompts, or describe the workload (--generate multi_turn …)"
            )
        if not self.requests:
            raise InputError(f"{self.origin}: the trace holds no request")

    def head(self, requests: int) -> Trace:
        """The first ``requests`` requests."""
        count = min(max(requests, 0), self.requests)
        return replace(
            self,
            ids=self.ids[: int(self.offsets[count])],
            offsets=self.offsets[: count + 1],
            prompt_blocks=self.prompt_blocks[:count],
            input_tokens=self.input_tokens[:count],
            output_tokens=self.output_tokens[:count],
            arrival_s=None if self.arrival_s is None else self.arrival_s[:count],
        )

    def coarse(self, block_tokens: int) -> Trace:
        """The same trace in larger blocks: every n-th prefix id names the larger block that ends there.

        Raises:
            UsageError: not a multiple of this trace's block.
        """
        step, rest = divmod(block_tokens, self.block_tokens)
        if rest or step < 1:
            raise UsageError(
                f"--page-size {block_tokens}: neither a divisor nor a multiple of the trace's block of "
                f"{self.block_tokens} tokens"
            )
        if step == 1:
            return self
        lengths = np.diff(self.offsets)
        depth = np.arange(self.ids.size) - np.repeat(self.offsets[:-1], lengths)
        whole = self.input_tokens // block_tokens
        return replace(
            self,
            ids=self.ids[(depth + 1) % step == 0],
            offsets=np.concatenate(([0], np.cumsum(lengths // step))).astype(np.int64),
            prompt_blocks=np.minimum(self.prompt_blocks // step, whole),
            block_tokens=block_tokens,
        )

    @classmethod
    def build(
        cls,
        raw_ids: npt.NDArray[np.integer],
        offsets: Ints,
        *,
        block_tokens: int,
        input_tokens: Ints,
        output_tokens: Ints | None = None,
        prompt_blocks: Ints | None = None,
        arrival_s: Floats | None = None,
        outputs_known: bool = False,
        origin: str = "trace",
        skipped: dict[str, int] | None = None,
        notes: Sequence[str] = (),
    ) -> Trace:
        """Make a trace from raw block ids: densify them, check that they are chained, re-chain them if not.

        Args:
            raw_ids: block ids as recorded (any integers), shape (references,).
            offsets: request bounds in ``raw_ids``, shape (requests + 1,).
            block_tokens: tokens a block.
            input_tokens: prompt lengths, shape (requests,).
            output_tokens: generated lengths; zeros where None.
            prompt_blocks: blocks looked up; all of them where None.
            arrival_s: arrival times in seconds.
            outputs_known: the ids go on past the prompt.
            origin: for captions.
            skipped: reason → count of records left out.
            notes: assumptions made so far.
        """
        from hicache_lab.traffic.traces import _loops

        if block_tokens < 1:
            raise UsageError(f"block tokens: expected a whole number of at least 1, got {block_tokens}")
        ids, space = _dense(raw_ids)
        remarks = list(notes)
        if not _loops.is_chained(ids, offsets, np.full(space, -2, np.int32)):
            remarks.append("block ids are content hashes, not prefix hashes: re-chained into prefix identities")
            ids, space = _loops.chain(ids, offsets)
        requests = len(offsets) - 1
        return cls(
            ids=ids,
            offsets=offsets.astype(np.int64, copy=False),
            prompt_blocks=np.diff(offsets) if prompt_blocks is None else prompt_blocks,
            input_tokens=input_tokens,
            output_tokens=np.zeros(requests, np.int64) if output_tokens is None else output_tokens,
            unique_blocks=int(space),
            block_tokens=block_tokens,
            arrival_s=arrival_s,
            outputs_known=outputs_known,
            origin=origin,
            skipped=dict(skipped or {}),
            notes=tuple(remarks),
        )

    @classmethod
    def from_tokens(
        cls,
        requests: Iterable[tuple[Sequence[int], Sequence[int]]],
        *,
        block_tokens: int = 1,
        arrival_s: Floats | None = None,
        origin: str = "token sequences",
        skipped: dict[str, int] | None = None,
        notes: Sequence[str] = (),
    ) -> Trace:
        """Make a trace from (prompt token ids, output token ids) pairs; only whole blocks get an id.

        The last output token never gets a KV entry (nothing is computed from it), so it counts for no block.
        """
        blocks: dict[tuple[int, ...], int] = {}
        flat: list[int] = []
        offsets = [0]
        prompt_blocks: list[int] = []
        inputs: list[int] = []
        outputs: list[int] = []
        for prompt, output in requests:
            if not len(prompt):
                raise InputError(f"{origin}: request {len(inputs) + 1} has an empty prompt")
            stored = [*prompt, *output[:-1]]
            whole = len(stored) // block_tokens
            flat += [
                blocks.setdefault(tuple(stored[i * block_tokens : (i + 1) * block_tokens]), len(blocks))
                for i in range(whole)
            ]
            offsets.append(len(flat))
            prompt_blocks.append(len(prompt) // block_tokens)
            inputs.append(len(prompt))
            outputs.append(len(output))
        return cls.build(
            np.array(flat, np.int64),
            np.array(offsets, np.int64),
            block_tokens=block_tokens,
            input_tokens=np.array(inputs, np.int64),
            output_tokens=np.array(outputs, np.int64),
            prompt_blocks=np.array(prompt_blocks, np.int64),
            arrival_s=arrival_s,
            outputs_known=any(outputs),
            origin=origin,
            skipped=skipped,
            # contents are expected here, so the re-chaining needs no remark
            notes=(),
        )._with_notes(notes)

    @classmethod
    def lengths_only(
        cls,
        input_tokens: Sequence[int],
        output_tokens: Sequence[int],
        *,
        arrival_s: Floats | None = None,
        origin: str,
        skipped: dict[str, int] | None = None,
        notes: Sequence[str] = (),
    ) -> Trace:
        """A trace without prefix information: good for lengths and concurrency, useless for hit rates."""
        return cls(
            ids=np.zeros(0, np.uint32),
            offsets=np.zeros(len(input_tokens) + 1, np.int64),
            prompt_blocks=np.zeros(len(input_tokens), np.int64),
            input_tokens=np.array(input_tokens, np.int64),
            output_tokens=np.array(output_tokens, np.int64),
            unique_blocks=0,
            block_tokens=1,
            arrival_s=arrival_s,
            prefix_known=False,
            origin=origin,
            skipped=dict(skipped or {}),
            notes=tuple(notes),
        )

    def _with_notes(self, notes: Sequence[str]) -> Trace:
        return replace(self, notes=tuple(notes))


def _dense(raw_ids: npt.NDArray[np.integer]) -> tuple[Ids, int]:
    """Ids as they are when they are small numbers already, renumbered by first value otherwise."""
    if not raw_ids.size:
        return np.zeros(0, np.uint32), 0
    low, high = int(raw_ids.min()), int(raw_ids.max())
    if low >= 0 and high < 2 * raw_ids.size + 1024:
        return raw_ids.astype(np.uint32, copy=False), high + 1
    values, inverse = np.unique(raw_ids, return_inverse=True)
    return inverse.astype(np.uint32), int(values.size)
