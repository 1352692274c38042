"""Replay recorded sizing vectors: the inputs of a real SGLang run go in, every output must come out equal.

    python conformance/vectors.py FILE [--json]

FILE holds one JSON object a line, plain or compressed. Exit code 0: all equal; 1: one differs, or cannot be answered.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from records import read_records, run_as_command

from hicache_lab.base.errors import HicacheLabError, HostError, InputError, UnknownFact
from hicache_lab.host import memory_cgroup_headroom
from hicache_lab.sglang.arguments import HicacheArguments, resolve_arguments
from hicache_lab.sglang.releases import ReleaseRules, rules_for
from hicache_lab.sizing.dsv4 import dsv4_host_pages
from hicache_lab.sizing.guard import HostView, LaunchFailure, auto_size, rank_budget
from hicache_lab.sizing.pools import Construction, HostPool, PoolSpec, check_pool, size_pool
from hicache_lab.sizing.rank import split_size
from hicache_lab.sizing.rows import (
    indexer_bytes_per_layer,
    mha_bytes_per_token,
    mla_bytes_per_token,
    state_bytes_per_slot,
    store_bytes,
)

Record = Mapping[str, Any]
Outputs = dict[str, Any]

_RESOLVED = (
    "hicache_mem_layout",
    "hicache_io_backend",
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_host_memory_fraction",
    "hicache_host_memory_mode",
    "decode_attention_backend",
)


@dataclass
class Tally:
    """How many records were checked, how many differed, how many this package cannot answer."""

    checked: int = 0
    mismatched: int = 0
    unsupported: int = 0

    def as_dict(self) -> dict[str, int]:
        """The JSON form."""
        return {"checked": self.checked, "mismatched": self.mismatched, "unsupported": self.unsupported}


@dataclass(frozen=True)
class Mismatch:
    """One field of one record that came out different."""

    line: int
    case_id: str
    release: str
    kind: str
    name: str
    recorded: Any
    computed: Any

    def __str__(self) -> str:
        return (
            f"line {self.line} ({self.case_id}, {self.kind}, {self.release}): {self.name} recorded "
            f"{self.recorded!r}, computed {self.computed!r}"
        )


@dataclass
class Report:
    """The outcome of a replay, in total, by kind and by release."""

    total: Tally = field(default_factory=Tally)
    by_kind: dict[str, Tally] = field(default_factory=dict)
    by_release: dict[str, Tally] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: ``total``, ``by_kind``, ``by_release``."""
        return {
            "total": self.total.as_dict(),
            "by_kind": {name: tally.as_dict() for name, tally in sorted(self.by_kind.items())},
            "by_release": {name: tally.as_dict() for name, tally in self.by_release.items()},
            "unsupported_reasons": dict(self.reasons),
            "mismatches": [str(mismatch) for mismatch in self.mismatches[:50]],
        }


@contextmanager
def cgroup_tree(record: Mapping[str, Any]) -> Iterator[Path]:
    """A /proc and a control-group mount with the recorded files, root level first."""
    with tempfile.TemporaryDirectory() as folder:
        mount, path, level = Path(folder) / "mount", "", Path(folder) / "mount"
        for depth, files in enumerate(record["levels"]):
            if depth:
                path, level = f"{path}/l{depth}", level / f"l{depth}"
            level.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                target = level / name
                if not target.resolve().is_relative_to(Path(folder).resolve()):
                    raise InputError(f"a recorded control-group file lies outside its tree: {name!r}")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
        own = Path(folder) / "proc" / "self"
        own.mkdir(parents=True)
        second = record["version"] == 2
        own.joinpath("cgroup").write_text(f"0::{path or '/'}\n" if second else f"4:memory:{path or '/'}\n3:cpu:/\n")
        kind = "cgroup2 cgroup2 rw" if second else "cgroup cgroup rw,memory"
        own.joinpath("mountinfo").write_text(f"30 23 0:26 / {mount} rw,nosuid - {kind}\n")
        yield Path(folder) / "proc"


CANNOT_LOCATE = "Cannot locate the process memory cgroup in mounted cgroup filesystems"


def _headroom(cgroup: Any, rules: ReleaseRules) -> tuple[int | None, str | None]:
    """Headroom and error of a recorded control group: a number, null, ``error`` or a tree."""
    if cgroup == "error":
        return None, CANNOT_LOCATE
    if not isinstance(cgroup, Mapping):
        return cgroup, None
    with cgroup_tree(cgroup) as proc_root:
        try:
            return memory_cgroup_headroom(proc_root, credit_page_cache=rules.cgroup_credits_page_cache), None
        except HostError as error:
            return None, str(error)


def _view(record: Record, rules: ReleaseRules) -> HostView:
    headroom, error = _headroom(record.get("cgroup"), rules)
    world = record.get("ranks", 1) * record.get("nnodes", 1)
    return HostView(record["available"], headroom, error, max(world // record.get("nnodes", 1), 1))


def _layer_count(record: Record, rules: ReleaseRules) -> int:
    """Layers that the host pool keeps: this shard's, and for an index pool only those that own an indexer."""
    owned = -(-int(record["layers"]) // (record.get("layer_shard_size") or 1))
    skipped = record.get("skip_topk_layers")
    if record["kind"] == "dsa_indexer" and rules.indexer_owners_only and skipped:
        return sum(not skip for skip in skipped[:owned])
    return owned


def _pool_spec(record: Record, rules: ReleaseRules) -> PoolSpec:
    """The spec of a recorded constructor call."""
    kind = record["kind"]
    common: dict[str, Any] = {
        "ratio": record.get("ratio", 0),
        "size_gb": record.get("size_gb", 0),
        "layout": record["layout"],
        "draft_layers": record.get("draft_layers", 0),
        "pp_peer_tokens": tuple(record.get("pp_peer_tokens", ())),
        "label": record.get("pool_label", "kv"),
    }
    if kind == "dsv4_paged":
        return PoolSpec(
            kind="dsv4",
            bytes_per_token=record["item_bytes"],
            device_tokens=0,
            page_size=record["slot_page_size"],
            pages=record["num_host_pages"],
            target_layers=record["layers"],
            **{**common, "label": record["pool_name"]},
        )
    if kind == "mamba":
        slot = state_bytes_per_slot(
            layers=record["layers"],
            conv_shapes=record["conv_shapes"],
            conv_itemsize=store_bytes(record["conv_dtype"]),
            temporal_shape=record["temporal_shape"],
            temporal_itemsize=store_bytes(record["temporal_dtype"]),
        )
        return PoolSpec(
            kind="mamba",
            bytes_per_token=slot,
            device_tokens=record["device_slots"],
            target_layers=record["layers"],
            **common,
        )
    layers, drafts = _layer_count(record, rules), record.get("draft_layers", 0)
    itemsize = store_bytes(record["dtype"])
    common |= {
        "device_tokens": record.get("host_capacity_tokens") or record["device_tokens"],
        "page_size": record["page_size"],
        "target_layers": layers,
        "dcp_size": record.get("dcp_size", 1),
        "host_token_capacity": record.get("host_token_capacity"),
    }
    if kind in ("mha", "mha_asym"):
        row = mha_bytes_per_token(
            rules,
            layers=layers + drafts,
            kv_heads=record["kv_heads"],
            head_dim=record["head_dim"],
            v_head_dim=record.get("v_head_dim", record["head_dim"]),
            itemsize=itemsize,
            asymmetric=kind == "mha_asym",
        )
        # the plain class lays values out as wide as keys, whatever it counts
        taken = 2 * record["kv_heads"] * record["head_dim"] * (layers + drafts) * itemsize if kind == "mha" else row
        return PoolSpec(kind="mha", bytes_per_token=row, allocated_bytes_per_token=taken, **common)
    index_row = (
        indexer_bytes_per_layer(record["index_head_dim"], record["quant_block_size"])
        if (kind in ("nsa", "dsa_indexer"))
        else 0
    )
    if kind == "dsa_indexer":
        return PoolSpec(
            kind="indexer",
            bytes_per_token=index_row * (layers + drafts),
            anchor_tokens=record["anchor_size"],
            **common,
        )
    elements = record["kv_lora_rank"] + record["qk_rope_head_dim"]
    if rules.row_width_override and record.get("override_kv_cache_dim"):
        elements = record["override_kv_cache_dim"]
    if kind == "nsa":
        elements = record["kv_cache_dim"]
    row = mla_bytes_per_token(rules, layers=layers + drafts, row_elements=elements, itemsize=itemsize)
    taken = elements * itemsize * (layers + drafts) + index_row * layers
    return PoolSpec(
        kind=kind,
        bytes_per_token=row + index_row * layers,
        allocated_bytes_per_token=taken,
        index_stride_bytes=index_row * record["page_size"] if kind == "nsa" else None,
        **common,
    )


def _pool(record: Record, rules: ReleaseRules) -> Outputs:
    spec = _pool_spec(record, rules)
    pool: HostPool | None = None
    try:
        pool = size_pool(spec, rules)
        done = check_pool(pool, rules, _view(record, rules))
    except LaunchFailure as failure:
        done = Construction(failure.kind, failure.message)
    outputs: Outputs = {
        "outcome": done.outcome,
        "message": done.message,
        "logs": [list(line) for line in done.logs],
    }
    outputs["size_per_token"] = spec.bytes_per_token
    outputs["physical_page_size"] = 1 if spec.kind == "mamba" else spec.page_size // spec.dcp_size
    outputs["layer_num"] = spec.layers
    if pool is not None:
        outputs |= {
            "size": pool.tokens,
            "page_num": pool.pages,
            "requested_bytes": pool.requested_bytes,
            "alloc_bytes": pool.allocated_bytes,
        }
    if done.budget is not None:
        outputs["available_bytes"] = done.budget.budget_bytes
    return outputs


def _failing(compute: Callable[[], Outputs]) -> Outputs:
    """Run a calculation whose failure is an outcome."""
    try:
        return {"outcome": "ok", "message": None} | compute()
    except LaunchFailure as failure:
        logs = [list(line) for line in failure.logs]
        return {"outcome": failure.kind, "message": failure.message, "logs": logs}


def _lines(logs: Iterable[tuple[str, str]]) -> list[list[str]]:
    return [list(line) for line in logs]


def _budget(record: Record, rules: ReleaseRules) -> Outputs:
    view = _view(record, rules)

    def compute() -> Outputs:
        budget = rank_budget(rules, view)
        return {
            "result": budget.budget_bytes,
            "ranks_per_host": view.ranks_per_host,
            "logs": _lines(budget.logs),
        }

    return _failing(compute)


def _available(record: Record, rules: ReleaseRules) -> Outputs:
    def compute() -> Outputs:
        fall_back = record.get("allow_cgroup_fallback", False)
        budget = rank_budget(rules, _view(record, rules), may_fall_back=fall_back)
        return {"result": budget.available_bytes, "logs": _lines(budget.logs)}

    return _failing(compute)


def _auto_size(record: Record, rules: ReleaseRules) -> Outputs:
    def compute() -> Outputs:
        if record["fraction"] is None:
            return {"resolved_ratio": None, "budget": None, "logs": []}
        sized = auto_size(
            rules,
            _view(record, rules),
            ratio=record["ratio"],
            fraction=record["fraction"],
            device_bytes=record["device_kv_bytes"],
        )
        return {"resolved_ratio": sized.ratio, "budget": sized.budget_bytes, "logs": _lines(sized.logs)}

    return _failing(compute)


def _cgroup(record: Record, rules: ReleaseRules) -> Outputs:
    headroom, error = _headroom(record["cgroup"], rules)
    if error is not None:
        return {"outcome": "RuntimeError", "message": error, "logs": []}
    return {"outcome": "ok", "message": None, "headroom": headroom, "logs": []}


def _split(record: Record, _: ReleaseRules) -> Outputs:
    sizes = [sum(size) if isinstance(size, list) else size for size in record["device_pool_bytes"]]
    return {
        "outcome": "ok",
        "message": None,
        "shares": list(split_size(record["size_gb"], sizes)),
        "logs": [],
    }


def _dsv4_pages(record: Record, rules: ReleaseRules) -> Outputs:
    names = ("device_full_tokens", "device_swa_tokens", "page_size", "swa_page_size", "ratio", "size_gb")
    inputs = {name: record[name] for name in names}
    return _failing(lambda: {"pages": list(dsv4_host_pages(rules, **inputs)), "logs": []})


def _resolve(record: Record, rules: ReleaseRules) -> Outputs:
    known = HicacheArguments.__dataclass_fields__
    given = {name: value for name, value in record["input"].items() if name in known}
    done = resolve_arguments(HicacheArguments(attention_backend="triton", **given), rules)
    return {
        "outcome": done.outcome,
        "message": done.message,
        "resolved": {name: getattr(done.arguments, name) for name in _RESOLVED},
        "logs": _lines(done.logs),
    }


_POOL_OUTPUTS = (
    "size_per_token",
    "page_num",
    "size",
    "requested_bytes",
    "alloc_bytes",
    "physical_page_size",
    "layer_num",
    "available_bytes",
)
_POOLS = ("mha", "mha_asym", "mla", "nsa", "mamba", "dsa_indexer", "dsv4_paged")
_KINDS: dict[str, tuple[Callable[[Record, ReleaseRules], Outputs], tuple[str, ...]]] = {
    **dict.fromkeys(_POOLS, (_pool, _POOL_OUTPUTS)),
    "host_memory_budget": (_budget, ("result", "ranks_per_host")),
    "available_host_memory": (_available, ("result",)),
    "auto_size": (_auto_size, ("resolved_ratio", "budget")),
    "cgroup_headroom": (_cgroup, ("headroom",)),
    "split_size": (_split, ("shares",)),
    "dsv4_pages": (_dsv4_pages, ("pages",)),
    "resolve_args": (_resolve, ("resolved",)),
}
_ALWAYS = ("outcome", "message", "logs")
# a null in these means that the recorder did not see the value, not that it is null
_MAYBE_UNSEEN = frozenset(_POOL_OUTPUTS)


def compute(record: Record) -> Outputs:
    """What this package says about the inputs of one record.

    Raises:
        UnknownFact: a kind or a release that is not known.
    """
    kind = record.get("kind")
    if kind not in _KINDS:
        raise UnknownFact(f"kind {kind!r} is not known; known are {', '.join(_KINDS)}")
    return _KINDS[kind][0](record, rules_for(record["release"]))


def differences(record: Record, computed: Outputs) -> Iterator[tuple[str, Any, Any]]:
    """Fields whose recorded and computed values differ: (name, recorded, computed)."""
    for name in (*_ALWAYS, *_KINDS[record["kind"]][1]):
        if name not in record or (name in _MAYBE_UNSEEN and record[name] is None):
            continue
        if record[name] != computed.get(name):
            yield name, record[name], computed.get(name)


def replay(records: Iterable[tuple[int, dict[str, Any]]]) -> Report:
    """Compare every record with what this package computes.

    Args:
        records: (line number, record) pairs, see :func:`read_records`.

    Returns:
        The tallies; a record that cannot be answered counts as unsupported, never as equal.
    """
    report = Report()
    for line, record in records:
        kind, release = str(record.get("kind")), str(record.get("release"))
        tallies = (
            report.total,
            report.by_kind.setdefault(kind, Tally()),
            report.by_release.setdefault(release, Tally()),
        )
        try:
            found = list(differences(record, compute(record)))
        except (HicacheLabError, KeyError, TypeError, ValueError) as error:
            reason = f"missing field {error}" if isinstance(error, KeyError) else str(error)
            report.reasons[reason] += 1
            for tally in tallies:
                tally.unsupported += 1
            continue
        for tally in tallies:
            tally.checked += 1
            tally.mismatched += bool(found)
        case = str(record.get("case_id", "-"))
        report.mismatches += [Mismatch(line, case, release, kind, *difference) for difference in found]
    return report


def text_of(report: Report) -> str:
    """The outcome in words."""
    total = report.total
    lines = [
        f"{total.checked:,} vectors checked, {total.mismatched} mismatched, {total.unsupported} unsupported",
        *(f"  {kind}: {tally.checked:,} checked" for kind, tally in sorted(report.by_kind.items())),
        *(f"  mismatch: {mismatch}" for mismatch in report.mismatches[:20]),
        *(f"  unsupported ({count}): {reason}" for reason, count in report.reasons.most_common(20)),
    ]
    return "\n".join(lines)


def command(args: argparse.Namespace) -> int:
    """Replay the file and print the outcome."""
    report = replay(read_records(args.file))
    if not report.total.checked and not report.total.unsupported:
        raise InputError(f"{args.file}: no record in it")
    print(json.dumps(report.as_dict(), indent=2) if args.json else text_of(report))
    return 1 if report.total.mismatched or report.total.unsupported else 0


if __name__ == "__main__":
    sys.exit(run_as_command("vectors", "recorded sizing vectors", command))
