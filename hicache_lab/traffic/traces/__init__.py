"""Workload traces: read from files (``read_trace``), described by numbers (``generate``), all as ``Trace``."""

from hicache_lab.traffic.traces.generate import GENERATORS, generate
from hicache_lab.traffic.traces.hashed import read_hashed
from hicache_lab.traffic.traces.prompts import load_tokenizer, read_prompts
from hicache_lab.traffic.traces.reader import FORMATS, READING, format_of, read_trace, sniff
from hicache_lab.traffic.traces.request_logs import read_request_log
from hicache_lab.traffic.traces.trace import Trace

__all__ = [
    "FORMATS",
    "GENERATORS",
    "READING",
    "Trace",
    "format_of",
    "generate",
    "load_tokenizer",
    "read_hashed",
    "read_prompts",
    "read_request_log",
    "read_trace",
    "sniff",
]
