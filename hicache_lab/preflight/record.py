"""An answer as plain data: the JSON that the command line prints and the notebooks keep."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hicache_lab.base.units import gb, gib
from hicache_lab.preflight.answer import Advice, Answer
from hicache_lab.preflight.text import explain
from hicache_lab.sizing.pools import resident_bytes


def advice_record(advice: Advice) -> dict[str, Any]:
    """The largest settings, and what all ranks of the host take."""
    return {
        "hicache_size_gb": advice.size_gb,
        "hicache_size_host_bytes": advice.size_bytes,
        "hicache_ratio": advice.ratio,
        "hicache_ratio_host_bytes": advice.ratio_bytes,
    }


def answer_record(answer: Answer, advice: Advice | None = None) -> dict[str, Any]:
    """Every number of an answer, with its unit in its name.

    Args:
        answer: the verdict.
        advice: what to set instead, if it was worked out.
    """
    question, rank = answer.question, answer.rank
    known = rank is not None and bool(rank.pools)
    # without any host pool the host gives nothing, which is known too
    counted = known or answer.verdict == "FITS"
    limit, refusal = question.limit_bytes, answer.refusal
    return {
        "verdict": answer.verdict,
        "provenance": answer.provenance,
        "sglang_version": question.rules.version,
        "rules": {"era": question.rules.era, "verified": question.rules.verified},
        "model": {
            "name": question.geometry.name,
            "confidence": question.geometry.confidence,
            "source": list(question.geometry.source),
        },
        "ranks_on_host": answer.ranks_on_host,
        "page_size": rank.page_size if rank else None,
        "device_tokens": rank.device_tokens if rank else None,
        "per_rank_tokens": rank.tokens if rank and known else None,
        "per_rank_bytes": answer.per_rank_bytes if known else None,
        "per_rank_gb": gb(answer.per_rank_bytes) if known else None,
        "per_rank_gib": gib(answer.per_rank_bytes) if known else None,
        "host_bytes": answer.host_bytes if counted else None,
        "host_gb": gb(answer.host_bytes) if counted else None,
        "host_gib": gib(answer.host_bytes) if counted else None,
        "allocated_host_bytes": answer.resident_bytes if counted else None,
        "allocated_host_gib": gib(answer.resident_bytes) if counted else None,
        "percent_of_ram": (
            100 * answer.resident_bytes / question.host.effective_total_bytes
            if question.host and known and question.ram_is_known
            else None
        ),
        "pools": [
            {
                "label": pool.spec.label,
                "kind": pool.spec.kind,
                "bytes_per_token": pool.spec.bytes_per_token,
                "tokens": pool.tokens,
                "pages": pool.pages,
                "per_rank_bytes": pool.requested_bytes,
                "per_rank_gb": gb(pool.requested_bytes),
                "per_rank_allocated_bytes": resident_bytes(pool, question.rules),
            }
            for pool in (rank.pools if rank else ())
        ],
        "pools_gb": {pool.spec.label: gb(pool.requested_bytes) for pool in rank.pools} if rank else {},
        "hicache_size_gb": answer.size_gb,
        "resolved_ratio": answer.ratio,
        "equivalent_ratio": rank.anchor.equivalent_ratio if rank and known and rank.device_tokens else None,
        "auto_sized": answer.auto is not None,
        "available_bytes": question.host.effective_available_bytes if question.host else None,
        "overhead_bytes": question.overhead_bytes,
        "limit_bytes": limit,
        "margin_bytes": answer.margin_bytes if known else None,
        "margin_beyond_reserve_bytes": answer.over_reserve_bytes if known else None,
        "guaranteed_start_per_rank_bytes": answer.guaranteed_start_bytes,
        "orders": [
            {
                "ranks_check": order.name,
                "every_rank_passes": order.passes,
                "refused_rank": order.refusal.rank if order.refusal else None,
                "refused_rank_allowed_bytes": order.refusal.allowed_bytes if order.refusal else None,
                "killed_rank": order.killed_rank,
                "resident_bytes": order.resident_bytes,
            }
            for order in answer.orders
        ],
        "message": refusal.message if refusal else None,
        "refusal": asdict(refusal) if refusal else None,
        "warnings": list(answer.warnings),
        "notes": list(answer.notes),
        "missing": list(answer.missing),
        "advice": advice_record(advice) if advice else None,
        "explanation": explain(answer, advice),
    }
