"""``plan``, ``preflight`` and ``max``: what a launch will take, and what would fit."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.units import format_gb
from hicache_lab.cli.options import add_facts, pairs
from hicache_lab.host import read_host
from hicache_lab.preflight import Advice, Question, advise, ask, assess, corrected_line, explain
from hicache_lab.preflight.ask import DEVICE_FACTS, HOST_FACTS, OTHER_FACTS, release_of
from hicache_lab.preflight.decode import host_pool_without_hicache
from hicache_lab.preflight.record import advice_record, answer_record
from hicache_lab.preflight.text import count_ranks
from hicache_lab.sglang.launch import LaunchConfig, launch_from_flags, parse_launch
from hicache_lab.sizing.guard import RESERVE_TEXT

EXIT = {"FITS": 0, "TIGHT": 0, "UNKNOWN": 1, "RACE": 3, "REFUSED": 3, "ASSERT": 3, "OOM_RISK": 3}
TAKES_SERVER_FLAGS = frozenset({"plan", "max"})
TAKES_LINE = frozenset({"preflight"})
_FACTS = (*HOST_FACTS, *OTHER_FACTS, *DEVICE_FACTS)


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Options of the three commands; SGLang's own flags are taken as the server takes them."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    parser.add_argument("--sglang-version", metavar="V", help="the SGLang release, e.g. 0.5.8")
    parser.add_argument("--this-host", action="store_true", help="take the memory facts of this machine")
    parser.add_argument(
        "--model",
        "--model-path",
        dest="model",
        required=command != "preflight",
        help="a catalogue name, a hub id, a config.json or an inline geometry as JSON",
    )
    parser.add_argument(
        "--geometry",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an explicit fact of the model, e.g. --geometry kind=mla; may be repeated",
    )
    add_facts(parser, _FACTS)
    if command == "preflight":
        parser.add_argument(
            "--from", dest="source", metavar="FILE", help="read the launch line from a file, - for stdin"
        )
        parser.epilog = "After -- comes the launch line as it is pasted: … -- python -m sglang.launch_server …"
    else:
        parser.epilog = (
            "SGLang's own flags (--tp-size, --hicache-size, --page-size, …) are taken as the server takes them."
        )


def _model(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--model: the inline geometry is not JSON: {error}") from None


def _overrides(texts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs("--geometry", texts).items():
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def _pasted(args: argparse.Namespace) -> str | list[str]:
    if args.source is None:
        if not args.line:
            raise UsageError("expected a launch line after --, or --from FILE; see hicache-lab preflight --help")
        return list(args.line) if len(args.line) > 1 else str(args.line[0])
    if args.source == "-":
        return sys.stdin.read()
    try:
        return Path(args.source).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"--from {args.source}: {error.strerror}") from None


def _config(command: str, args: argparse.Namespace) -> LaunchConfig:
    if command == "preflight":
        folder = Path(args.source).resolve().parent if args.source not in (None, "-") else Path.cwd()
        return parse_launch(_pasted(args), sglang_version=args.sglang_version, base_dir=folder)
    model = "inline" if args.model.lstrip().startswith("{") else args.model
    # plan answers for given flags, not for a line that was pasted: nothing is refused for how it is spelt
    return replace(launch_from_flags(args.rest, model=model, enable_hierarchical_cache=True), source=None)


def _question(command: str, args: argparse.Namespace) -> tuple[Question, LaunchConfig, list[str]]:
    config = _config(command, args)
    version, note = release_of(config, args.sglang_version)
    question = ask(
        _model(args.model) if args.model else None,
        version,
        host=read_host() if args.this_host else None,
        config=config,
        geometry_overrides=_overrides(args.geometry),
        **{name: getattr(args, name) for name in _FACTS},
    )
    return question, config, [*config.notes, *([note] if note else [])]


def _maximum(question: Question, args: argparse.Namespace) -> int:
    if question.limit_bytes is None:
        raise UsageError(
            "--host-ram: max needs the host's memory (--host-ram and, better, --available; or --this-host)"
        )
    comfortable, just = advise(question), advise(question, accepted=("FITS", "TIGHT"))
    fitting = comfortable.size_answer or comfortable.ratio_answer or just.size_answer or just.ratio_answer
    plain = replace(question.config, hicache_size=None, hicache_ratio=None)
    record: dict[str, Any] = {
        "provenance": "computed",
        "sglang_version": question.rules.version,
        "ranks_on_host": fitting.ranks_on_host if fitting else question.config.processes,
        "takes_a_size": question.takes_size,
        "device_tokens": fitting.rank.device_tokens if fitting and fitting.rank else question.device.tokens,
        "comfortable": _settings(comfortable),
        "leaving_only_the_reserve": _settings(just),
        "guaranteed_start_per_rank_bytes": fitting.guaranteed_start_bytes if fitting else None,
        "auto_size": None,
        "warnings": [question.rules.warning] if question.rules.warning else [],
        "refusal": None,
    }
    if fitting is None:
        # with the least that a host tier can be asked for: what still refuses it is not memory
        least = replace(plain, max_total_tokens=plain.max_total_tokens or 2**20)
        if refusal := assess(replace(question, config=least)).refusal:
            record["refusal"] = {"flag": refusal.flag, "error": refusal.error, "message": refusal.message}
    if question.rules.auto_size:
        auto = assess(replace(question, config=plain))
        record["auto_size"] = {
            "verdict": auto.verdict,
            "ratio": auto.ratio,
            "host_bytes": auto.host_bytes,
            "unused_bytes": auto.over_reserve_bytes,
            "message": auto.refusal.message if auto.refusal else None,
            "missing": list(auto.missing),
        }
    print(json.dumps(record, indent=2) if args.json else _maximum_text(record))
    return 3 if fitting is None else 0


def _settings(advice: Advice) -> dict[str, Any]:
    size, ratio = (answer.rank if answer else None for answer in (advice.size_answer, advice.ratio_answer))
    return advice_record(advice) | {
        "hicache_size_per_rank_tokens": size.tokens if size else None,
        "hicache_size_equivalent_ratio": size.anchor.equivalent_ratio if size and size.device_tokens else None,
        "hicache_ratio_per_rank_tokens": ratio.tokens if ratio else None,
    }


def _maximum_text(record: dict[str, Any]) -> str:
    ranks = count_ranks(record["ranks_on_host"])
    lines = [f"largest settings for {ranks} on this host ({record['sglang_version']}, computed)"]
    no_size = "no size fits" if record["takes_a_size"] else "this model and release take no --hicache-size"
    no_ratio = "no ratio fits" if record["device_tokens"] else "no ratio known (give --device-tokens)"
    for key, name in (
        ("comfortable", "comfortable (headroom beyond the reserve)"),
        ("leaving_only_the_reserve", f"leaving only the {RESERVE_TEXT} reserve"),
    ):
        lines.append(f"  {name}:")
        for flag, unit, text in (("hicache_size", "_gb", no_size), ("hicache_ratio", "", no_ratio)):
            value, taken, tokens = (record[key][flag + end] for end in (unit, "_host_bytes", "_per_rank_tokens"))
            if value is not None:
                text = (
                    f"--{flag.replace('_', '-')} {value:g} → {format_gb(taken)} on the host, {tokens:,} tokens a rank"
                )
            lines.append(f"    {text}")
    if refusal := record["refusal"]:
        lines.append(f"  the server does not start: {refusal['flag']}: {refusal['error']}: {refusal['message']}")
    auto = record["auto_size"]
    if auto and auto["ratio"] is not None and auto["unused_bytes"] is not None:
        lines.append(
            f"  auto-size (neither flag) would take ratio {auto['ratio']:.3g} → {format_gb(auto['host_bytes'])}, "
            f"leaving {format_gb(auto['unused_bytes'])} beyond the reserve unused"
        )
    lines.append("  a size is GB (1e9) per rank; a ratio follows the device pool: they are different settings")
    return "\n".join(lines + [f"  warning: {text}" for text in record["warnings"]])


def run(command: str, args: argparse.Namespace) -> int:
    """Answer one of the three commands."""
    question, config, notes = _question(command, args)
    if command == "max":
        return _maximum(question, args)
    answer = assess(question)
    if not config.enable_hierarchical_cache:
        still_builds = host_pool_without_hicache(question)
        notes += [still_builds] if still_builds else []
    advice = advise(question)
    corrected = corrected_line(answer, advice, config) if config.source else None
    if args.json:
        pasted = {"corrected_launch": corrected} if command == "preflight" else {}
        print(json.dumps(answer_record(answer, advice) | {"launch_notes": notes} | pasted, indent=2))
    else:
        print(explain(answer, advice), *(f"  note: {note}" for note in notes), sep="\n")
        if corrected:
            print(f"  corrected launch:\n{corrected}")
    return EXIT[answer.verdict]
