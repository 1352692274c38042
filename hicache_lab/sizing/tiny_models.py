"""The test models that the CPU server serves, as ``data/tiny_models/`` holds them.

They are shaped like real ones (``tiny-llama``: grouped-query attention, ``tiny-mla``: the DeepSeek-V3 architecture) and
small enough for one core. They are not in the catalogue: nobody else has them.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.base.resources import data_dir

TINY_MODELS = ("tiny-llama", "tiny-mla")


def tiny_config(name: str) -> dict[str, Any]:
    """The Hugging Face ``config.json`` of a tiny model.

    Raises:
        UsageError: no tiny model has this name.
    """
    if name not in TINY_MODELS:
        raise UsageError(f"--model: expected one of {', '.join(TINY_MODELS)}, got {name!r}")
    return dict(_read(name))


@cache
def _read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((data_dir() / "tiny_models" / f"{name}.json").read_text(encoding="utf-8"))
    return config
