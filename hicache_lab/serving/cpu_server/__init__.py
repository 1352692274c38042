"""A real SGLang server, with HiCache, on a machine without a GPU.

``environment`` installs a pinned release into a virtual environment of its own and makes two small models with
seeded weights, ``spec`` says what to start, ``process`` starts, watches and stops it; ``data/cpu_server`` is what its
interpreter loads in place of GPU-only packages. SGLang itself runs unmodified: its host pools, guards, logs and
counters are the real ones. Its throughput and latency say nothing about a GPU.
"""

from __future__ import annotations

from hicache_lab.serving.cpu_server.environment import RELEASES, Environment, install, installed, make_models
from hicache_lab.serving.cpu_server.process import Server, logs, start, status, stop
from hicache_lab.serving.cpu_server.spec import Launch

__all__ = [
    "RELEASES",
    "Environment",
    "Launch",
    "Server",
    "install",
    "installed",
    "logs",
    "make_models",
    "start",
    "status",
    "stop",
]
