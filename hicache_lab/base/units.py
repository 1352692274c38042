"""Bytes, and the two units that a HiCache post-mortem confuses.

SGLang's ``--hicache-size`` and its host-pool messages count GB = 1e9 bytes; its device-pool messages print GiB under
the name "GB". Nothing else in this package multiplies by either number by hand.
"""

from __future__ import annotations

import re
from fractions import Fraction

from hicache_lab.base.errors import UsageError

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_FACTORS = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
# Kubernetes and systemd quantities; "G" alone stays ambiguous and is refused.
_KUBERNETES = {"KI": KIB, "MI": MIB, "GI": GIB, "TI": TIB}
_QUANTITY = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str, *, what: str = "size") -> int:
    """Turn ``"449GB"``, ``"2235 GiB"`` or ``"417Gi"`` into whole bytes.

    Args:
        text: a number followed by its unit (B, KB … TB are powers of 1000; KiB … TiB and Ki … Ti powers of 1024).
        what: the flag or field the text came from, named in the error.

    Returns:
        Bytes, rounded down.

    Raises:
        UsageError: no unit, an ambiguous unit such as ``G``, or not a number.
    """
    match = _QUANTITY.fullmatch(text)
    factor = None
    if match:
        unit = match[2].upper()
        factor = _FACTORS.get(unit) or _KUBERNETES.get(unit)
    if match is None or factor is None:
        raise UsageError(
            f"{what}: expected a number with a unit, got {text!r}; "
            f"write for example 449GB (449e9 bytes) or 418GiB (418 × 2**30 bytes)"
        )
    return int(Fraction(re.sub("[_,]", "", match[1])) * factor)


def gb(n_bytes: float) -> float:
    """Bytes as GB (1e9), the unit of ``--hicache-size``."""
    return n_bytes / GB


def gib(n_bytes: float) -> float:
    """Bytes as GiB (2**30), the unit that SGLang's device-pool lines print as "GB"."""
    return n_bytes / GIB


def format_gb(n_bytes: float, decimals: int = 2) -> str:
    """Bytes as ``"2,400.00 GB"`` (1e9)."""
    return f"{n_bytes / GB:,.{decimals}f} GB"


def format_gib(n_bytes: float, decimals: int = 2) -> str:
    """Bytes as ``"2,235.17 GiB"`` (2**30)."""
    return f"{n_bytes / GIB:,.{decimals}f} GiB"


def format_both(n_bytes: float, decimals: int = 2) -> str:
    """Bytes in both units: ``"300.00 GB (279.40 GiB)"``."""
    return f"{format_gb(n_bytes, decimals)} ({format_gib(n_bytes, decimals)})"
