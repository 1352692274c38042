"""Run one notebook headless into one folder, whole or not at all.

Everything is written into a hidden folder beside the target; the last step is a rename. A run that fails,
hangs or is interrupted still closes its folder: what ran, the traceback and a ``status`` that is not
``complete``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import hicache_lab
from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.host.processes import start_ticks
from hicache_lab.runs.html import notebook_html
from hicache_lab.runs.parameters import check_parameters, read_notebook
from hicache_lab.runs.recording import RECORD_FILE, RUN_FOLDER_VARIABLE, read_records
from hicache_lab.runs.results import RESULT_FILE, Failure, Figure, RunResult

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_KERNEL_START_SECONDS = 120
_STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """How long one cell and the whole notebook may take, in seconds."""

    cell_seconds: float = 600
    run_seconds: float = 3600

    def __post_init__(self) -> None:
        # not-a-number is not above 0 either, and asyncio cannot wait for infinity
        if not (0 < self.cell_seconds < inf and 0 < self.run_seconds < inf):
            raise UsageError(
                f"time limits are positive seconds, got {self.cell_seconds} a cell, {self.run_seconds} a run"
            )


def execute(
    notebook: Path,
    folder: Path,
    parameters: Mapping[str, object] | None = None,
    *,
    limits: Limits | None = None,
    html: bool = True,
    progress: bool = True,
) -> RunResult:
    """Run ``notebook`` with ``parameters`` and leave ``folder`` with its record.

    The folder gets ``<notebook>.ipynb`` (executed), ``<notebook>.html`` (one file, opens offline),
    ``result.json`` and whatever the notebook wrote into ``run_folder()``. An earlier run in the same folder
    is replaced by the rename. The notebook's working directory is the caller's, so relative paths in
    parameters mean what the caller sees.

    Args:
        notebook: the .ipynb to run; it is not changed.
        folder: the run's folder; its parent is made if need be.
        parameters: values for the cell tagged ``parameters``; names and types are compared with it first.
        limits: how long a cell and the run may take.
        html: also render the one-file HTML.
        progress: show a bar over the cells on standard error.

    Returns:
        The record; look at ``status``: a notebook that fails is a result here, not an exception.

    Raises:
        UsageError: an unknown or ill-typed parameter, or a folder that is not a run's and not empty.
        InputError: not a notebook.
        HostError: the folder cannot be written, or the disk is full.
    """
    given = dict(parameters or {})
    values = check_parameters(notebook, given)
    work = _work_folder(folder)
    executed = work / f"{notebook.stem}.ipynb"
    try:
        result = _run(notebook, executed, given, values, limits or Limits(), progress)
        if html and executed.exists():
            page = notebook_html(read_notebook(executed), title=notebook.stem)
            executed.with_suffix(".html").write_text(page, encoding="utf-8")
        figures = {name: Figure(**entry) for name, entry in read_records(work).items()}
        (work / RECORD_FILE).unlink(missing_ok=True)
        files = sorted(str(path.relative_to(work)) for path in work.rglob("*") if path.is_file())
        result = replace(result, figures=figures, files=(*files, RESULT_FILE))
        result.write(work)
        # at no moment is there a half-written run
        earlier = work.with_suffix(".replaced")
        if folder.exists():
            folder.rename(earlier)
        work.rename(folder)
        shutil.rmtree(earlier, ignore_errors=True)
    except OSError as error:
        raise HostError(f"run folder {folder}: {error.strerror or error}; free space or choose another") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return result


def _work_folder(folder: Path) -> Path:
    """The hidden folder to work in; leftovers of runs whose process is gone are removed."""
    if not RUN_NAME.fullmatch(folder.name):
        raise UsageError(f"run folder {folder.name!r}: expected letters, digits, dot, dash and underscore")
    if folder.exists() and not (folder / RESULT_FILE).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not a run folder (no {RESULT_FILE}); choose another name")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for stale in folder.parent.glob(f".{folder.name}.*.partial"):
            # its number alone may be another process's by now
            pid, _, started = stale.name.split(".")[-2].partition("-")
            if not pid.isdigit() or str(start_ticks(int(pid))) != started:
                _clear(stale, folder)
        work = folder.parent.resolve() / f".{folder.name}.{os.getpid()}-{start_ticks(os.getpid())}.partial"
        work.mkdir()
    except FileExistsError as error:
        raise UsageError(f"{folder}: this process is already running a notebook there") from error
    except OSError as error:
        raise HostError(f"run folder {folder}: cannot be made ({error.strerror})") from error
    return work


def _clear(stale: Path, folder: Path) -> None:
    """Remove what a killed run left; one that was finished and only not yet in its place is put there."""
    earlier = stale.with_suffix(".replaced")
    if earlier.exists() and not folder.exists():
        stale.rename(folder)
    shutil.rmtree(stale, ignore_errors=True)
    shutil.rmtree(earlier, ignore_errors=True)


@contextmanager
def _kernel_environment(work: Path) -> Iterator[None]:
    """What the kernel inherits: the run's folder, and plotly figures as data instead of HTML."""
    variables = {
        RUN_FOLDER_VARIABLE: str(work),
        "PLOTLY_RENDERER": "plotly_mimetype",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """TERM (a cancelled job) closes the run as Ctrl-C does; only the main thread can arrange it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    notebook: Path,
    executed: Path,
    given: dict[str, object],
    values: dict[str, Any],
    limits: Limits,
    progress: bool,
) -> RunResult:
    """Execute with papermill and say how it ended."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    started, clock = datetime.now(UTC), time.monotonic()
    deadline = clock + limits.run_seconds

    def seconds_for(_cell: object) -> float:
        # nbclient takes 0 for "no limit"
        return max(0.001, min(limits.cell_seconds, deadline - time.monotonic()))

    status, error = "complete", None
    with (
        _kernel_environment(executed.parent),
        terminated_as_interrupted(),
        tempfile.TemporaryDirectory(prefix="hicache-lab-") as sockets,
    ):
        try:
            papermill.execute_notebook(
                str(notebook),
                str(executed),
                parameters=given,
                progress_bar={"desc": notebook.stem, "file": sys.stderr} if progress else False,
                start_timeout=_KERNEL_START_SECONDS,
                timeout_func=seconds_for,
                # sockets of this user instead of open TCP ports, in a folder of this run: by default they lie in the
                # working directory under names that two runs at the same time would share
                config=Config(
                    KernelManager={
                        "transport": "ipc",
                        "ip": f"{sockets}/kernel",
                        # a cell that is stopped is interrupted first: time to write what it has
                        "shutdown_wait_time": _STOP_SECONDS,
                    }
                ),
            )
        except papermill.PapermillExecutionError as failed:
            traceback = _clean("\n".join(failed.traceback))
            message = _clean(str(failed.evalue))
            status, error = "failed", Failure(failed.ename, message, failed.exec_count, failed.source, traceback)
        except CellTimeoutError as late:
            status = "timed_out"
            whole_run = time.monotonic() >= deadline
            limit = f"the run's limit of {limits.run_seconds:g} s" if whole_run else f"{limits.cell_seconds:g} s a cell"
            error = Failure("CellTimeoutError", f"stopped at {limit}", traceback=_clean(str(late)))
        except DeadKernelError as dead:
            status = "failed"
            error = Failure("DeadKernelError", f"the notebook's kernel died: {_clean(str(dead))}")
        except KeyboardInterrupt:
            status = "interrupted"
            error = Failure("KeyboardInterrupt", "interrupted; the cells that ran are kept")
    return RunResult(
        notebook=notebook.stem,
        notebook_sha256=hashlib.sha256(notebook.read_bytes()).hexdigest(),
        status=status,
        parameters=values,
        given=tuple(given),
        started_at=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - clock, 3),
        hicache_lab=hicache_lab.__version__,
        python=platform.python_version(),
        error=error,
    )


def _clean(text: str) -> str:
    return _ANSI.sub("", text)
