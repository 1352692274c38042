"""Where the files that ship with the package lie: ``data/`` and ``notebooks/``."""

from __future__ import annotations

from pathlib import Path

from hicache_lab.base.errors import HostError

_PACKAGE = Path(__file__).resolve().parents[1]


def _folder(name: str) -> Path:
    for candidate in (_PACKAGE / f"_{name}", _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise HostError(
        f"the folder {name}/ that ships with hicache_lab is missing beside {_PACKAGE}; reinstall the package"
    )


def data_dir() -> Path:
    """The shipped ``data/`` folder (models, incidents), in a checkout or in an installed wheel."""
    return _folder("data")


def notebooks_dir() -> Path:
    """The shipped ``notebooks/`` folder."""
    return _folder("notebooks")
