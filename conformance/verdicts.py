"""Replay recorded cases: what happened to people goes through the verdict, agreement is counted.

    python conformance/verdicts.py FILE [--json]

FILE holds one JSON object a line (``id``, ``args``, ``expect``), plain or compressed. Exit code 0: all agree; 3: one
does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from records import read_records, run_as_command

from hicache_lab.base.errors import HicacheLabError, InputError, UsageError
from hicache_lab.preflight.ask import ask
from hicache_lab.preflight.record import answer_record
from hicache_lab.preflight.verdict import assess
from hicache_lab.sglang.launch.flags import known_flags
from hicache_lab.sglang.releases import parse_version

TOLERANCE = 0.005
"""Figures agree within half a per cent; words and verdicts exactly."""

_FIGURES = ("per_rank_tokens", "per_rank_gb", "host_gb", "allocated_host_gib", "resolved_ratio")


def _far(expected: object, got: float | None) -> bool:
    if isinstance(expected, bool) or not isinstance(expected, (int, float)):
        raise UsageError(f"expect: expected a number, got {str(expected)[:60]!r}")
    return got is None or abs(got - expected) > TOLERANCE * abs(expected)


def _disagreements(expect: Mapping[str, Any], record: Mapping[str, Any]) -> Iterable[str]:
    """Every expectation that does not hold, in words."""
    for name, expected in expect.items():
        if name == "verdict":
            accepted = [expected] if isinstance(expected, str) else expected
            if record["verdict"] not in accepted:
                yield f"verdict {record['verdict']}, accepted {' or '.join(accepted)}"
        elif name in _FIGURES or name == "ranks_on_host":
            if _far(expected, record[name]):
                yield f"{name} {record[name]}, expected {expected}"
        elif name == "pools_gb":
            for pool, amount in expected.items():
                if _far(amount, record["pools_gb"].get(pool)):
                    yield f"pool {pool} {record['pools_gb'].get(pool)} GB, expected {amount}"
        elif name == "message_contains":
            if expected not in (record["message"] or ""):
                yield f"message {record['message']!r} lacks {expected!r}"
        elif name == "warning_contains":
            if not any(expected in text for text in record["warnings"]):
                yield f"no warning with {expected!r}"
        else:
            yield f"expectation {name!r} is not known"


def judge_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """One case: its verdict, whether it agrees, why not, and the figures.

    Args:
        case: ``id``, ``args`` (the flags of ``plan``) and ``expect``.
    """
    try:
        args = dict(case["args"])
        release = args.pop("sglang_version")
        # a report names the type in effect; early releases have no word for the model's own
        period = known_flags()["--kv-cache-dtype"].period(parse_version(release))
        if args.get("kv_cache_dtype") == "bf16" and period and period.choices and "bf16" not in period.choices:
            args["kv_cache_dtype"] = "auto"
        question = ask(args.pop("model"), release, **args)
        record = answer_record(assess(question))
        problems = list(_disagreements(case.get("expect", {}), record))
    except HicacheLabError as error:
        return {"id": case.get("id"), "verdict": None, "agrees": False, "reason": str(error)}
    except (KeyError, TypeError, AttributeError) as error:
        return {"id": case.get("id"), "verdict": None, "agrees": False, "reason": f"not a case: {error!r}"}
    figures = {name: record[name] for name in (*_FIGURES, "ranks_on_host", "pools_gb", "message", "warnings")}
    return {
        "id": case.get("id"),
        "verdict": record["verdict"],
        "agrees": not problems,
        "reason": "; ".join(problems) or "every expectation holds",
        **figures,
    }


def judge_cases(cases: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All cases: {"cases": [...], "agree": n, "total": n}."""
    judged = [judge_case(case) for case in cases]
    return {"cases": judged, "agree": sum(case["agrees"] for case in judged), "total": len(judged)}


def command(args: argparse.Namespace) -> int:
    """Judge the file's cases and print the outcome."""
    judged = judge_cases(record for _, record in read_records(args.file))
    if not judged["total"]:
        raise InputError(f"{args.file}: no case in it")
    if args.json:
        print(json.dumps(judged, indent=2))
    else:
        for case in judged["cases"]:
            mark = "agrees" if case["agrees"] else "MISSES"
            print(f"{mark}  {case['id']}: {case['verdict']}  {'' if case['agrees'] else case['reason']}".rstrip())
        print(f"{judged['agree']} of {judged['total']} agree")
    return 0 if judged["agree"] == judged["total"] else 3


if __name__ == "__main__":
    sys.exit(run_as_command("verdicts", "recorded cases", command))
