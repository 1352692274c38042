"""What a line's wording says about the release that printed it.

Each fingerprint is a wording and the first and last release known to print it (releases 0.4.4 … 0.5.23 were read). The
releases of a run are those that all its fingerprints allow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hicache_lab.sglang.releases import VERIFIED, parse_version

_FIRST, _LAST = VERIFIED[0], VERIFIED[-1]


@dataclass(frozen=True, slots=True)
class ReleaseRange:
    """Releases from ``first`` to ``last``, both included."""

    first: str = _FIRST
    last: str = _LAST

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} … {self.last}"


# (variant of the event, wording inside it, first release, last release)
_FINGERPRINTS: tuple[tuple[str, str, str, str], ...] = (
    ("server_args", r"server_args=ServerArgs\(", "0.4.4", "0.5.18"),
    ("server_args", r"server_args=\{", "0.5.19", _LAST),
    ("dist_end", r"torch distributed ends\. mem usage", "0.4.4", "0.5.8"),
    ("dist_end", r"torch distributed ends\. elapsed", "0.5.9", "0.5.20"),
    ("memory_baseline", r"Memory baseline taken", "0.5.21", _LAST),
    ("weights_end", r"Load weight end\. type=", "0.4.4", "0.5.8"),
    ("weights_end", r"Load weight end\. elapsed=[^,]+, type=[^,]+, dtype=", "0.5.9", "0.5.9"),
    ("weights_end", r"Load weight end\. elapsed=[^,]+, type=[^,]+, (?:quant=.*, )?avail mem", "0.5.10", _LAST),
    ("weights_deferred", r"Committed real weights", "0.5.18", _LAST),
    ("kv", r"is allocated\. #tokens", "0.4.4", "0.5.12"),
    ("kv", r"is allocated\. dtype", "0.5.13", _LAST),
    ("kv.post_capture", r"max_total_num_tokens=", "0.5.16", "0.5.16"),
    ("kv.post_capture", r"#tokens", "0.5.17", _LAST),
    ("kv.va_upper", r"VA upper bound", "0.5.16", _LAST),
    ("mamba", r"allocated\. conv_state", "0.5.2", "0.5.3"),
    ("mamba", r"max_mamba_cache_size", "0.5.4", _LAST),
    ("graph_begin", r"Capture (?:draft |draft extend )?(?:cuda|cpu|npu) graph begin", "0.4.4", "0.5.13"),
    ("graph_begin", r"(?:CUDA|CPU|NPU|XPU) graph begin", "0.5.14", _LAST),
    ("graph_end", r"Time elapsed: [^,]*? avail mem=.* mem usage=", "0.4.4", "0.4.6"),
    ("graph_end", r"Time elapsed: [^,]*? mem usage=.* avail mem=", "0.4.7", "0.5.13"),
    ("graph_end", r"graph end\. elapsed=", "0.5.14", _LAST),
    ("capacity", r"context_len=\d+$", "0.4.4", "0.4.6"),
    ("capacity", r"available_[gc]pu_mem", "0.4.7", _LAST),
    ("timings", r"Engine startup timings", "0.5.17", _LAST),
    ("tree_init", r"Tree cache initialized", "0.5.18", _LAST),
    ("host.kv", r"for hierarchical KV cache", "0.4.4", "0.5.16"),
    ("host.pool", r"hierarchical KV host pool", "0.5.17", _LAST),
    ("host.pool", r"packed MTP", "0.5.18", _LAST),
    ("host.indexer", r"for NSA indexer", "0.5.11", "0.5.12"),
    ("host.indexer", r"for DSA indexer", "0.5.13", _LAST),
    ("host.minimax", r"index-K", "0.5.15", _LAST),
    ("host.mamba", r"cache \(layout", "0.5.10", "0.5.22"),
    ("host.mamba", r"state slots", "0.5.23", _LAST),
    ("host.v4", r"V4 ", "0.5.12", _LAST),
    ("host.assert", r"should be larger than the device memory", "0.4.4", "0.5.14"),
    ("host.small", r"smaller than the device pool", "0.5.15", _LAST),
    ("host.small.label", r"smaller than the device pool", "0.5.17", _LAST),
    ("host.refused.side", r"NSA indexer", "0.5.11", "0.5.12"),
    ("host.refused.side", r"DSA indexer", "0.5.13", _LAST),
    ("host.auto", r"auto-sizing", "0.5.21", _LAST),
    ("host.none_left", r"No host memory is left", "0.5.21", _LAST),
    ("host.headroom", r"memory headroom", "0.5.21", _LAST),
    ("host.sync", r"Sync fixed-size", "0.5.15", _LAST),
    ("host.register", r"for ptr=", "0.5.13", "0.5.18"),
    ("host.register", r"at offset=", "0.5.19", _LAST),
    ("host.drop", r"dropped without backup", "0.5.15", _LAST),
    ("retract.old", r"Decode out of memory happened", "0.4.4", "0.4.6"),
    ("retract", r"#retracted_reqs: \d+, #new_token_ratio", "0.4.7", "0.5.6"),
    ("retract", r"#new_tokens_gained", "0.5.7", _LAST),
    ("dead", r"scheduler is dead", "0.4.4", "0.5.9"),
    ("died_at_start", r"died during initialization", "0.5.10", _LAST),
    ("crashed", r"crashed with exit code", "0.5.10", _LAST),
    ("watchdog", r"^Watchdog timeout", "0.4.4", "0.5.6"),
    ("watchdog", r"self\.soft", "0.5.7", _LAST),
    ("request_stats", r"Req Time Stats", "0.4.7", "0.5.11"),
    ("request_stats", r"ReqTimeStats", "0.5.12", _LAST),
    ("prefill", r"Prefill batch\.", "0.4.4", "0.5.3"),
    ("prefill", r"Prefill batch \[", "0.5.4", _LAST),
    ("prefill", r"Prefill batch,", "0.5.5", _LAST),
    ("prefill", r"#pending-token", "0.5.11", _LAST),
    ("prefill", r"graph: \w+, input throughput", "0.5.10", _LAST),
    ("prefill", r"#queue-req: \d+, $", "0.4.4", "0.5.8"),
    ("decode", r"largest-len", "0.4.4", "0.4.4"),
    ("decode", r"Decode batch\.", "0.4.4", "0.5.3"),
    ("decode", r"Decode batch,", "0.5.5", _LAST),
    ("decode", r"cpu graph", "0.5.2", _LAST),
    ("decode", r"#gpu token", "0.5.11", _LAST),
)
_BY_VARIANT: dict[str, list[tuple[str, str, str]]] = {}
for _variant, _wording, _first, _last in _FINGERPRINTS:
    _BY_VARIANT.setdefault(_variant, []).append((_wording, _first, _last))


def release_range(lines: Iterable[tuple[str, str]]) -> ReleaseRange | None:
    """The releases that could have printed all these lines.

    Args:
        lines: (variant of the event, its text) of one run.

    Returns:
        None if no release of the range read prints them all: a fork, a mixture of runs, or a newer release.
    """
    found = ReleaseRange()
    for variant, text in lines:
        for wording, first, last in _BY_VARIANT.get(variant, ()):
            if re.search(wording, text):
                found = ReleaseRange(
                    max(found.first, first, key=parse_version), min(found.last, last, key=parse_version)
                )
    return found if parse_version(found.first) <= parse_version(found.last) else None
