"""Where the CPU server keeps its environments, models, state and logs: outside the package."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from hicache_lab.base.errors import HostError

HOME_VARIABLE = "HICACHE_LAB_HOME"


def home(override: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the CPU server.

    Args:
        override: a folder given by the user (``--home``).
        environ: where ``HICACHE_LAB_HOME`` and ``XDG_CACHE_HOME`` are looked up.

    Returns:
        ``override``, else ``$HICACHE_LAB_HOME``, else ``$XDG_CACHE_HOME/hicache_lab``, else
        ``~/.cache/hicache_lab``; absolute, not necessarily existing.
    """
    if override is not None:
        return Path(override).expanduser().absolute()
    if environ.get(HOME_VARIABLE):
        return Path(environ[HOME_VARIABLE]).expanduser().absolute()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(cache).expanduser() / "hicache_lab").absolute()


def made(folder: Path) -> Path:
    """The folder, made if need be.

    Raises:
        HostError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(
            f"{folder}: cannot be made ({error.strerror}); choose another folder with --home or ${HOME_VARIABLE}"
        ) from error
    return folder


@contextmanager
def built_aside(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``target`` in one rename, or disappears if the filling fails.

    Folders that a killed process left behind are removed first. If another process finished ``target``
    meanwhile, its result is kept and ours is dropped.
    """
    made(target.parent)
    for leftover in target.parent.glob(f".{target.name}.partial-*"):
        owner = leftover.name.rsplit("-", 1)[1]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(leftover, ignore_errors=True)
    aside = target.parent / f".{target.name}.partial-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        if not target.exists():
            aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
