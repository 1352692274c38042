"""A launch command line or a ``server_args=`` dump ⇄ ``LaunchConfig``, in SGLang's own flag names."""

from hicache_lab.sglang.launch.command import launch_from_flags, parse_launch, parse_launches
from hicache_lab.sglang.launch.config import Container, LaunchConfig, Rejection, flag_of
from hicache_lab.sglang.launch.dump import parse_server_args
from hicache_lab.sglang.launch.flags import refusals
from hicache_lab.sglang.launch.render import changed, render_launch

__all__ = [
    "Container",
    "LaunchConfig",
    "Rejection",
    "changed",
    "flag_of",
    "launch_from_flags",
    "parse_launch",
    "parse_launches",
    "parse_server_args",
    "refusals",
    "render_launch",
]
