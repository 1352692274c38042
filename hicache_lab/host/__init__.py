"""Memory facts of the machine or the container: read or stated; nothing is guessed."""

from hicache_lab.host.cgroups import CgroupLevel, CgroupMemory, memory_cgroup_headroom, read_cgroup
from hicache_lab.host.memory import HostMemory, read_host, read_meminfo

__all__ = [
    "CgroupLevel",
    "CgroupMemory",
    "HostMemory",
    "memory_cgroup_headroom",
    "read_cgroup",
    "read_host",
    "read_meminfo",
]
