"""Which decode lines come first after idling: SGLang averages since the line before, so theirs includes the pause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hicache_lab.forensics.logs.events import Batch, Rank

if TYPE_CHECKING:
    from hicache_lab.forensics.logs.fast_path import ChunkPart

_Ints = npt.NDArray[np.int64]
# records that one line can hold, and more
_RECORDS = 1 << 12


@dataclass
class Idleness:
    """Who was idle: a rank before its first decode line, and after a prefill line that shows no running request."""

    _idle: dict[str, bool] = field(default_factory=dict)

    def is_fresh(self, batch: Batch) -> bool:
        """Whether a line is its rank's first decode line after idling; lines come in their order."""
        label = batch.rank.label
        if batch.phase == "decode":
            fresh, self._idle[label] = self._idle.get(label, True), False
            return fresh
        if batch.running_req == 0:
            self._idle[label] = True
        return False

    def mark(self, part: ChunkPart, ranks: Sequence[Rank], batches: Sequence[Batch]) -> list[bool]:
        """The same for all lines of a part at once: ``fresh`` of its decode rows is set.

        Args:
            part: rows of the fast path.
            ranks: what the rows' tags stand for.
            batches: the line parser's among and between the rows, in their order.

        Returns:
            For each of ``batches`` whether it is fresh.
        """
        labels = list(dict.fromkeys([*(rank.label for rank in ranks), *(batch.rank.label for batch in batches)]))
        number = {label: index for index, label in enumerate(labels)}
        of_tag = np.array([number[rank.label] for rank in ranks] or [0])
        # several records may stand in one line
        places: list[int] = []
        for batch in batches:
            first = batch.where.line * _RECORDS
            places.append(max(first, places[-1] + 1) if places else first)
        decoded = [index for index, batch in enumerate(batches) if batch.phase == "decode"]
        idled = [index for index, batch in enumerate(batches) if batch.phase == "prefill" and batch.running_req == 0]
        running = part.prefill.values.get("running_req")
        idle_rows = np.flatnonzero(running == 0.0) if running is not None else np.empty(0, np.int64)

        def joined(rows: npt.NDArray[Any], tags: npt.NDArray[Any], others: list[int]) -> tuple[_Ints, _Ints]:
            place = np.concatenate((rows.astype(np.int64) * _RECORDS, [places[index] for index in others]))
            rank = np.concatenate((of_tag[tags], [number[batches[index].rank.label] for index in others]))
            return place.astype(np.int64), rank.astype(np.int64)

        place, rank = joined(part.decode.line, part.decode.tag, decoded)
        idle_place, idle_rank = joined(part.prefill.line[idle_rows], part.prefill.tag[idle_rows], idled)
        fresh = np.zeros(len(place), np.bool_)
        for index in np.union1d(rank, idle_rank):
            mine = np.flatnonzero(rank == index)
            mine = mine[np.argsort(place[mine], kind="stable")]
            idling = np.sort(idle_place[idle_rank == index])
            following = np.searchsorted(place[mine], idling)
            fresh[mine[following[following < len(mine)]]] = True
            if len(mine) and self._idle.get(labels[index], True):
                fresh[mine[0]] = True
            self._idle[labels[index]] = bool(len(idling)) and bool(following[-1] == len(mine))
        count = len(part.decode)
        part.decode.fresh[:] = fresh[:count]
        of_batches = dict(zip(decoded, fresh[count:].tolist(), strict=True))
        return [of_batches.get(index, False) for index in range(len(batches))]
