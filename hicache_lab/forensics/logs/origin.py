"""Whether a statement is SGLang's own: a traceback or an access log alone makes no SGLang log."""

from __future__ import annotations

from hicache_lab.forensics.logs import events as ev

# what only SGLang says; a Python traceback, an access log or a kernel line alone does not make an SGLang log
_OWN = frozenset(
    {
        "server_args",
        "device_pool",
        "capacity",
        "host_pool",
        "host_refusal",
        "host_smaller",
        "host_sizing",
        "host_pressure",
        "pin_failure",
        "rewrite",
        "storage",
        "batch",
        "retraction",
        "token_shortage",
        "turned_away",
        "process_death",
        "request_stats",
    }
)
_OWN_MILESTONES = frozenset(
    {
        "ready",
        "weights_begin",
        "weights_end",
        "dist_begin",
        "dist_end",
        "memory_baseline",
        "pool_end",
        "tree_init",
        "graph_begin",
        "graph_end",
        "timings",
    }
)


def said_by_sglang(event: ev.Event) -> bool:
    """Whether only an SGLang server says this: by the statement, or by a rank in the record's prefix."""
    if event.kind in _OWN or event.rank.tags:
        return True
    if isinstance(event, ev.Failure):
        return event.process is not None
    if isinstance(event, ev.Stall):
        return event.name in ("sigquit", "watchdog", "health_check")
    return isinstance(event, ev.Milestone) and event.name in _OWN_MILESTONES
