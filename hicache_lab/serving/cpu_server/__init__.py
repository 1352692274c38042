"""A real SGLang server, with HiCache, on a machine without a GPU.

``environment`` installs a pinned release into a virtual environment of its own, ``tiny_checkpoints`` makes two
small models with seeded weights, ``spec`` says what to start, ``process`` starts, watches and stops it;
``stubs`` is what its interpreter loads in place of GPU-only packages. SGLang itself runs unmodified: its
host pools, guards, logs and counters are the real ones. Its throughput and latency say nothing about a GPU.
"""

from __future__ import annotations

from hicache_lab.serving.cpu_server.environment import RELEASES, Environment, install, installed
from hicache_lab.serving.cpu_server.process import Server, Stopped, logs, start, status, stop
from hicache_lab.serving.cpu_server.spec import Launch
from hicache_lab.serving.cpu_server.tiny_checkpoints import make_models

__all__ = [
    "RELEASES",
    "Environment",
    "Launch",
    "Server",
    "Stopped",
    "install",
    "installed",
    "logs",
    "make_models",
    "start",
    "status",
    "stop",
]
