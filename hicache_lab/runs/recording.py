"""How a notebook leaves its figures: ``record(name, value, unit=…, source=…)``.

During a headless run an environment variable names the run's folder; in an interactive session nothing is
written.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.files import atomic_write

if TYPE_CHECKING:
    from hicache_lab.preflight import Answer

RUN_FOLDER_VARIABLE = "HICACHE_LAB_RUN_FOLDER"
RECORD_FILE = "record.json"
# the hidden folder that ``execution`` works in: .NAME.PROCESS-START.partial
_WORKING = re.compile(r"^\.(.+)\.\d+-\d+\.partial$")
# where a number may come from; every figure names one
SOURCES = ("measured", "replayed", "simulated", "reconstructed", "computed")


def run_folder(interactive: str | None = None) -> Path | None:
    """The folder of the headless run this kernel belongs to; in an interactive session the one named here, or None."""
    name = os.environ.get(RUN_FOLDER_VARIABLE) or interactive
    return Path(name) if name else None


def final_path(path: Path) -> Path:
    """Where a path will be found later: a headless run works in a hidden folder that is renamed when it is done."""
    return Path(*(_WORKING.sub(r"\1", part) for part in path.parts))


def record(name: str, value: object, *, unit: str = "", source: str) -> None:
    """Leave one figure in the run's result record; a later value of the same name replaces it.

    Args:
        name: what the value is, unit and scope included where it has them (``host_gb``, ``per_rank_tokens``).
        value: a number, a text, a bool, None, or lists and mappings of those (a table as a list of rows).
        unit: the unit in words (``GB``, ``tokens``); empty for a text or a pure number.
        source: where it comes from: measured, replayed, simulated, reconstructed or computed.

    Raises:
        UsageError: an unknown source, an empty name, or a value that JSON cannot hold (NaN and infinities
            too).
    """
    if not name:
        raise UsageError("record: a figure needs a name")
    if source not in SOURCES:
        raise UsageError(f"record({name!r}): source is one of {', '.join(SOURCES)}; got {source!r}")
    entry = {"value": _plain(name, value), "unit": unit, "source": source}
    folder = run_folder()
    if folder is not None:
        write_json(folder / RECORD_FILE, read_records(folder) | {name: entry})


def record_answer(answer: Answer, prefix: str = "") -> None:
    """Record a verdict and its main numbers, each with its unit, names led by ``prefix``."""
    from hicache_lab.preflight.record import answer_record

    units = {"verdict": "", "sglang_version": "", "ranks_on_host": "ranks", "per_rank_tokens": "tokens"}
    units |= {"per_rank_gb": "GB", "host_gb": "GB", "message": ""}
    numbers = answer_record(answer)
    for name, unit in units.items():
        record(prefix + name, numbers[name], unit=unit, source=answer.provenance)


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """What a notebook has recorded so far in ``folder``; nothing recorded is an empty mapping."""
    path = folder / RECORD_FILE
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise InputError(f"{path}: not the JSON that record() writes ({error})") from error


def write_json(path: Path, content: object) -> None:
    """Write JSON whole or not at all: a temporary file in the same folder, then a rename."""
    atomic_write(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _plain(name: str, value: object) -> object:
    """``value`` as JSON holds it; numpy and pandas scalars become Python's."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"record({name!r}): {value} is not a finite number; record None, or what is known instead")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    raise UsageError(
        f"record({name!r}): expected a number, a text, lists or mappings of those; got {type(value).__name__}"
    )
