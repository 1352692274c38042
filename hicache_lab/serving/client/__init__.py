"""An SGLang server over HTTP, any release from 0.4.4 on: what it runs, what it counts, what it answers.

``client`` talks (aiohttp); ``info`` and ``metrics`` read the shapes the releases answer in; ``stream``
builds requests and reads token streams with their arrival times. Everything a server says is untrusted text.
"""

from __future__ import annotations

from hicache_lab.serving.client.http import SglangClient
from hicache_lab.serving.client.info import Description, Probe, ServerInfo
from hicache_lab.serving.client.metrics import CachedTokens, parse_metrics
from hicache_lab.serving.client.stream import GenerateRequest, RawStream, Reply, read_stream

__all__ = [
    "CachedTokens",
    "Description",
    "GenerateRequest",
    "Probe",
    "RawStream",
    "Reply",
    "ServerInfo",
    "SglangClient",
    "parse_metrics",
    "read_stream",
]
