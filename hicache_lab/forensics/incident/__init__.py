"""From logs, kernel lines and memory samples to one timeline and a ranked diagnosis with its evidence."""

from hicache_lab.forensics.incident.diagnosis import RULES, Diagnosis, diagnose
from hicache_lab.forensics.incident.facts import Evidence, Facts, gather
from hicache_lab.forensics.incident.findings import Finding
from hicache_lab.forensics.incident.launches import run_facts
from hicache_lab.forensics.incident.memory import MemoryReading, read_memory

__all__ = [
    "RULES",
    "Diagnosis",
    "Evidence",
    "Facts",
    "Finding",
    "MemoryReading",
    "diagnose",
    "gather",
    "read_memory",
    "run_facts",
]
