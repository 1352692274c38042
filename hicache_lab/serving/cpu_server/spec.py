"""What to start: a release, a model, ranks and SGLang's own flags, checked before anything runs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hicache_lab.base.errors import UsageError
from hicache_lab.base.resources import data_dir
from hicache_lab.base.units import GIB

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# what an unmodified SGLang needs to run without a GPU
_CPU_FLAGS = (
    ("--device", "cpu"),
    ("--attention-backend", "torch_native"),
    ("--sampling-backend", "pytorch"),
    ("--grammar-backend", "none"),
    ("--disable-overlap-schedule",),
)
# a small server that shows its tiers; each gives way to the same flag from the user
_DEFAULT_FLAGS = (
    ("--context-length", "4096"),
    ("--max-total-tokens", "2048"),
    ("--decode-log-interval", "10"),
    ("--enable-metrics",),
    ("--enable-cache-report",),
)
_HICACHE_FLAGS = (("--enable-hierarchical-cache",), ("--hicache-ratio", "4"))
_SIZE_FLAGS = frozenset({"--hicache-ratio", "--hicache-size"})
_NO_KEY = "the server is reachable from this machine only, and SGLang writes the key into its log"
_NO_TLS = "the server is reachable from this machine only, and readiness is asked over plain HTTP"
# flags that this module decides, with what to use instead
_RESERVED = {
    "--host": "the server listens on loopback only",
    "--port": "use --port before the double dash",
    "--model": "use --model before the double dash",
    "--model-path": "use --model before the double dash",
    "--tp": "use --tp-size before the double dash",
    "--tp-size": "use --tp-size before the double dash",
    "--tensor-parallel-size": "use --tp-size before the double dash",
    "--nnodes": "this is one machine",
    "--dist-init-addr": "this is one machine",
    "--api-key": _NO_KEY,
    "--admin-api-key": _NO_KEY,
    "--ssl-keyfile": _NO_TLS,
    "--ssl-certfile": _NO_TLS,
    "--config": "give the flags themselves, so that the run records them",
} | {flag[0]: "a machine without a GPU needs this setting" for flag in _CPU_FLAGS}


@dataclass(frozen=True)
class Launch:
    """What to start.

    Attributes:
        release: one of ``RELEASES``.
        model: a tiny model's name, or the path of a model folder.
        tp_size: tensor-parallel ranks, one core each.
        flags: SGLang's own flags, passed through as typed.
        hicache: with ``--enable-hierarchical-cache --hicache-ratio 4`` unless ``flags`` say otherwise.
        port: None picks a free one.
        name: the server's name in the state folder.
        resident: make host pages resident as pinning would (fills real memory).
        floor_bytes: ``resident`` stops before less than this stays available.
        copies: False is the negative control: host↔device copies do nothing.
    """

    release: str
    model: str = "tiny-llama"
    tp_size: int = 1
    flags: tuple[str, ...] = ()
    hicache: bool = True
    port: int | None = None
    name: str = "default"
    resident: bool = False
    floor_bytes: int = 4 * GIB
    copies: bool = True

    def __post_init__(self) -> None:
        checked_name(self.name)
        cores = os.cpu_count() or 1
        if not 1 <= self.tp_size <= cores:
            raise UsageError(f"--tp-size: expected 1 to {cores} (one core a rank), got {self.tp_size}")
        if self.port is not None and not 1024 <= self.port <= 65535:
            raise UsageError(f"--port: expected 1024 to 65535, got {self.port}")
        for word in self.flags:
            flag = word.partition("=")[0]
            # argparse, which reads them in the server, takes any beginning of a flag for the flag
            meant = next((name for name in sorted(_RESERVED) if len(flag) > 2 and name.startswith(flag)), None)
            if meant is not None:
                named = "" if flag == meant else f" (a beginning of {meant})"
                raise UsageError(f"{flag}: not passed through{named}: {_RESERVED[meant]}")

    @property
    def sglang_flags(self) -> tuple[str, ...]:
        """The flags without model, ranks and port; one of the user replaces our default of that name."""
        given = {word.partition("=")[0] for word in self.flags if word.startswith("--")}
        if given & _SIZE_FLAGS:
            given |= _SIZE_FLAGS
        defaults = _DEFAULT_FLAGS + (_HICACHE_FLAGS if self.hicache else ())
        words = [word for flag in _CPU_FLAGS for word in flag]
        words += [word for flag in defaults if flag[0] not in given for word in flag]
        return (*words, *self.flags)

    def environ(self) -> dict[str, str]:
        """The server's environment variables."""
        drop = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_CPU_OMP_THREADS_BIND"}
        environ = {name: value for name, value in os.environ.items() if name not in drop}
        environ |= {
            "PYTHONPATH": str(data_dir() / "cpu_server" / "stubs"),
            "PYTHONUNBUFFERED": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HICACHE_LAB_RESIDENT": "1" if self.resident else "0",
            "HICACHE_LAB_FLOOR_BYTES": str(self.floor_bytes),
            "HICACHE_LAB_NO_COPY": "0" if self.copies else "1",
        }
        if self.tp_size > 1:  # one core a rank; SGLang refuses the variable for a single rank
            environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(self.tp_size)))
        return environ


def checked_name(name: str) -> str:
    """A server's name, fit to be a folder's name.

    Raises:
        UsageError: it is not.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name: expected letters, digits, '.', '_' or '-', got {name!r}")
    return name
