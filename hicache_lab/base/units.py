"""Bytes, and the two units that a HiCache post-mortem confuses.

SGLang's ``--hicache-size`` and its host-pool messages count GB = 1e9 bytes; its device-pool messages print GiB under
the name "GB". Nothing else in this package multiplies by either number by hand.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from hicache_lab.base.errors import UsageError

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

# units by their whole names, in capitals; "G" alone is ambiguous and none of them
UNITS = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
BINARY_SUFFIXES = {"Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": TIB, "Pi": 2**50, "Ei": 2**60}
# Kubernetes, and SGLang's own human-readable integers: K, M, G are powers of 1000, Ki, Mi, Gi powers of 1024
KUBERNETES_SUFFIXES = {"k": KB, "M": MB, "G": GB, "T": TB, "P": 10**15, "E": 10**18} | BINARY_SUFFIXES
# free -h, free --si and their like
HUMAN_SUFFIXES = {"B": 1, "K": KB} | KUBERNETES_SUFFIXES
# docker, systemd and Slurm: powers of 1024 whatever follows the letter
DOCKER_SUFFIXES = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
# the most that Kubernetes keeps, and more than any size
_MOST_BYTES = 2**63 - 1
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
    # Python refuses to read a number of thousands of digits
    if match and len(match[1]) < 40:
        unit = match[2].upper()
        factor = UNITS.get(unit) or (UNITS.get(unit + "B") if len(unit) > 1 else None)
    if match is None or factor is None:
        raise UsageError(
            f"{what}: expected a number with a unit, got {text!r}; "
            f"write for example 449GB (449e9 bytes) or 418GiB (418 × 2**30 bytes)"
        )
    return int(Fraction(re.sub("[_,]", "", match[1])) * factor)


def docker_bytes(text: str, what: str) -> int:
    """A docker or compose size (``400g``, ``32gb``, plain bytes) in bytes.

    Raises:
        UsageError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise UsageError(f"{what}: expected a docker size such as 400g (400 × 2**30 bytes), got {text!r}")
    return _product(match[1], DOCKER_SUFFIXES[match[2]])


def binary_bytes(text: str, what: str, unit: str = "") -> int:
    """A size of systemd or Slurm (``400G``) in bytes; ``unit`` is meant where none is written.

    Raises:
        UsageError: not a size.
    """
    match = re.fullmatch(r"(\d+)([kmgt]?)", text.lower())
    if match is None:
        raise UsageError(f"{what}: expected a size such as 400G (400 × 2**30 bytes), got {text!r}")
    return _product(match[1], DOCKER_SUFFIXES[match[2] or unit])


def kubernetes_bytes(text: str, what: str) -> int:
    """A Kubernetes quantity (``417Gi``, ``449G``, ``2e11``, ``500m``: thousandths) in bytes.

    Raises:
        UsageError: not a quantity.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*(m|[kMGTPE]|[KMGTPE]i)?\s*", text)
    if match is None:
        raise UsageError(f"{what}: expected a Kubernetes quantity such as 417Gi, got {text!r}")
    if match[2] == "m":
        return _product(match[1], 1) // 1000
    return _product(match[1], KUBERNETES_SUFFIXES[match[2]] if match[2] else 1)


def _product(number: str, factor: int) -> int:
    """A decimal number times a factor, rounded down; at most what a 64-bit size holds, however many its digits."""
    try:
        product = Decimal(number) * factor
    except ArithmeticError:
        return _MOST_BYTES
    return int(product) if product < _MOST_BYTES else _MOST_BYTES


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
