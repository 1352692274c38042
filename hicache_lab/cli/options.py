"""Options that several commands have: numbers, and what is known of the host, the device and the draft."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from hicache_lab.base.errors import UsageError
from hicache_lab.sizing.guard import RESERVE_TEXT

T = TypeVar("T")


def whole(text: str, least: int | None = None) -> int:
    """A whole number, thousands marked or not."""
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if least is not None and value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text}")
    return value


positive = partial(whole, least=1)


def positive_float(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def several(number: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Numbers with commas between, at least one."""

    def parse(text: str) -> tuple[T, ...]:
        parts = [part for part in text.split(",") if part.strip()]
        if not parts:
            raise argparse.ArgumentTypeError(f"expected a number, or several with commas between, got {text!r}")
        return tuple(map(number, parts))

    return parse


def pairs(flag: str, texts: Iterable[str]) -> dict[str, str]:
    """The ``KEY=VALUE`` of an option that may be repeated.

    Raises:
        UsageError: one that is not of that form.
    """
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{flag}: expected KEY=VALUE, got {text!r}")
        values[key] = value
    return values


_FACTS: dict[str, tuple[Callable[[str], object], str]] = {
    "host_ram": (str, "RAM of one host with its unit, e.g. 449GB or 418GiB"),
    "available": (str, "MemAvailable before the launch; without it RAM minus huge pages is taken"),
    "hugepages": (str, "reserved huge pages, e.g. 1582GiB"),
    "cgroup_limit": (str, "memory limit of the container"),
    "cgroup_usage": (str, "what the container already uses before the launch"),
    "overhead": (str, "host memory of the server's processes besides the pools, e.g. 40GB"),
    "headroom": (str, f"what a comfortable plan leaves beyond the {RESERVE_TEXT} reserve (10 %% of RAM)"),
    "draft_model": (str, "a separate draft model"),
    "device_tokens": (whole, "max_total_num_tokens of one rank, as the server logs it"),
    "device_kv_gb": (float, "instead of tokens: GB (1e9) of KV on one rank's device"),
    "swa_device_tokens": (whole, "device tokens of the sliding-window pool"),
    "mamba_slots": (whole, "state slots of the device (max_mamba_cache_size)"),
}


def add_facts(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add options for facts, by their names in ``preflight.ask``."""
    for name in names:
        kind, text = _FACTS[name]
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
