"""Memory facts of the machine or the container: read, stated, or sampled over time; nothing is guessed."""

from hicache_lab.host.cgroups import CgroupLevel, CgroupMemory, memory_cgroup_headroom, read_cgroup
from hicache_lab.host.memory import HostMemory, ProcessMemory, read_host, read_meminfo, top_processes
from hicache_lab.host.sampler import MemorySample, MemorySampler

__all__ = [
    "CgroupLevel",
    "CgroupMemory",
    "HostMemory",
    "MemorySample",
    "MemorySampler",
    "ProcessMemory",
    "memory_cgroup_headroom",
    "read_cgroup",
    "read_host",
    "read_meminfo",
    "top_processes",
]
