"""``hicache-lab replay`` and ``hicache-lab read-source``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hicache_lab import race
from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, format_gb, parse_bytes
from hicache_lab.preflight.text import count_ranks
from hicache_lab.race import RaceResult, Scenario
from hicache_lab.sglang import source

INCIDENT_OTHER_BYTES = 4 * GB  # 449 GB of RAM, 445 GB available


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """The flags of one of the two commands."""
    if command == "read-source":
        parser.add_argument("path", nargs="?", metavar="PATH|WHEEL", help="a source folder or a wheel; only parsed")
        parser.add_argument("--installed", action="store_true", help="read the installed sglang (not imported)")
        parser.add_argument("--json", action="store_true", help="one JSON object")
        return
    add = parser.add_argument
    add("--hicache-size", type=float, default=300.0, metavar="GB", help="GB (1e9) per rank; the incident's 300")
    add("--ranks", type=int, default=8, help="scheduler processes on this host (default 8)")
    add("--host-ram", default="449GB", help="with its unit (default 449GB)")
    add("--available", help="before the first check, with its unit (default: RAM less 4 GB)")
    add("--sglang-version", default="0.5.8", help="whose check the ranks make (default 0.5.8)")
    add("--pin-rate", default="2GB", help="per second and rank, an assumption (default 2GB)")
    add("--skew", type=float, default=0.0, metavar="S", help="seconds between one rank's check and the next (0)")
    add("--jitter", type=float, default=0.0, metavar="S", help="each check up to S seconds later, by --seed (0)")
    add("--order", choices=["rank", "reversed", "random"], default="rank", help="who checks first")
    add("--seed", type=int, default=0)
    add("--no-launcher", action="store_true", help="a refusal ends its rank only, not the whole launch")
    add("--map", action="store_true", help="the outcome for every skew and size, instead of one race")
    add("--physical", action="store_true", help="real processes in a memory control group, killed by the kernel")
    add("--scale", type=int, help="physical: bytes are divided by this (1000)")
    add("--cap", help="physical: never a larger control group than this (1GB)")
    add("--cgroup", type=Path, help="physical: work below this control group only")
    add("--json", action="store_true", help="one JSON object")


def run(command: str, args: argparse.Namespace) -> int:
    """0: fits, or the source follows known rules; 3: killed or refused, or it follows none."""
    if command == "replay":
        return _race(args)
    reading = source.read_source(source.tree_from(args.path, args.installed))
    print(
        json.dumps(_reading_json(reading), indent=1, ensure_ascii=False)
        if args.json
        else "\n".join(_reading_lines(reading))
    )
    return 0 if reading.matches else 3


def _scenario(args: argparse.Namespace) -> Scenario:
    host = parse_bytes(args.host_ram, what="--host-ram")
    if args.available is None and host <= INCIDENT_OTHER_BYTES:
        raise UsageError(
            f"--host-ram: expected more than the {format_gb(INCIDENT_OTHER_BYTES)} that others are taken to use, got "
            f"{format_gb(host)}; say what is --available"
        )
    available = (
        host - INCIDENT_OTHER_BYTES if args.available is None else parse_bytes(args.available, what="--available")
    )
    if not 0 < args.hicache_size < 10**9:
        raise UsageError(f"--hicache-size: expected GB per rank above 0, got {args.hicache_size}")
    return race.scenario_of_release(
        args.sglang_version,
        size_gb=args.hicache_size,
        ranks=args.ranks,
        host_bytes=host,
        other_bytes=host - available,
        pin_bytes_per_second=parse_bytes(args.pin_rate, what="--pin-rate"),
        skew_seconds=args.skew,
        jitter_seconds=args.jitter,
        order=args.order,
        seed=args.seed,
        launcher=not args.no_launcher,
    )


def _race(args: argparse.Namespace) -> int:
    for flag, value in [("--scale", args.scale), ("--cap", args.cap), ("--cgroup", args.cgroup)]:
        if value is not None and not args.physical:
            raise UsageError(f"{flag}: belongs to the physical race; add --physical, or leave it out")
    scenario = _scenario(args)
    if args.map:
        if args.physical:
            raise UsageError("--map: only the virtual race draws it; leave --physical out")
        return _map(scenario, args.json)
    simulated = result = race.simulate(scenario)
    if args.physical:
        cap = parse_bytes(args.cap or "1GB", what="--cap")
        scale = 1000 if args.scale is None else args.scale
        result = race.run_physical(scenario, scale=scale, cap_bytes=cap, parent=args.cgroup)
    if args.json:
        print(json.dumps(_race_json(result), indent=1))
    else:
        print("\n".join(race_lines(result)))
        if result is not simulated:
            print(f"  the virtual model says: {_counts(simulated)}; peak {format_gb(simulated.peak_bytes)}")
    return 0 if result.outcome == "fits" else 3


def _counts(result: RaceResult) -> str:
    return (
        f"{result.passed} passed their check, {result.refused} refused, {result.oom_kills} killed by the kernel, "
        f"{result.survivors} survived"
    )


def race_lines(result: RaceResult) -> list[str]:
    """The race for a terminal."""
    scenario = result.scenario
    scaled = f", really 1:{result.scale}" if result.scale > 1 else ""
    lines = [
        f"{result.outcome.upper()}  {count_ranks(scenario.ranks)} × {format_gb(scenario.requested_bytes)} = "
        f"{format_gb(scenario.ranks * scenario.requested_bytes)} on a host with {format_gb(scenario.host_bytes)} "
        f"({format_gb(scenario.available_bytes)} available)  "
        f"[SGLang {scenario.rules.version}, {result.provenance}{scaled}]"
    ]
    if scenario.rules.warning:
        lines.append(f"  warning: {scenario.rules.warning}")
    if scenario.pool_bytes != scenario.requested_bytes:
        lines.append(
            f"  each pool takes {format_gb(scenario.pool_bytes)}: torch's pinned allocator rounds up to a power of two"
        )
    held = result.samples[0].used_bytes * result.scale
    if held > scenario.other_bytes + scenario.host_bytes // 100:
        lines.append(
            f"  the processes themselves hold {format_gb(held)} at this scale, the scenario has "
            f"{format_gb(scenario.other_bytes)} in use before the first check: a smaller --scale is truer"
        )
    lines.append(f"  {'rank':>4} {'checks at':>10} {'sees':>12} {'may take':>12} {'held':>12}  fate")
    for rank in result.ranks:
        sees = "-" if rank.saw_bytes is None else format_gb(rank.saw_bytes * result.scale)
        allowed = "-" if rank.budget_bytes is None else format_gb(rank.budget_bytes * result.scale)
        end = "" if rank.end_seconds is None else f" at {rank.end_seconds:.1f} s"
        lines.append(
            f"  {rank.rank:>4} {rank.arrival_seconds:>8.1f} s {sees:>12} {allowed:>12} "
            f"{format_gb(rank.peak_bytes * result.scale):>12}  {rank.outcome.replace('_', '-')}{end}"
        )
    lines.append(f"  {_counts(result)}; peak {format_gb(result.peak_bytes * result.scale)}")
    if result.refused and scenario.launcher:
        lines.append("  a refused rank ends the launch: SGLang's launcher stops every other process")
    if result.group is not None:
        lines.append(f"  kernel's own count of OOM kills in {result.group}: {result.oom_kills}")
        lines += [f"  kernel: {line}" for line in result.kernel_lines if line.startswith("Memory cgroup")]
    return lines


_RESULT_KEYS = (
    *("outcome", "passed", "refused", "oom_kills", "survivors", "peak_bytes", "provenance"),
    *("scale", "speed", "group", "kernel_lines"),
)
_SCENARIO_KEYS = ("host_bytes", "available_bytes", "skew_seconds", "seed")


def _race_json(result: RaceResult) -> dict[str, Any]:
    """The JSON form of a race; bytes as they really were (see ``scale``)."""
    scenario = result.scenario
    return {
        **{key: getattr(result, key) for key in _RESULT_KEYS},
        **{key: getattr(scenario, key) for key in _SCENARIO_KEYS},
        "sglang_version": scenario.rules.version,
        "warning": scenario.rules.warning,
        "per_rank_requested_bytes": scenario.requested_bytes,
        "per_rank_resident_bytes": scenario.pool_bytes,
        "ranks": [
            {"fate" if key == "outcome" else key: value for key, value in asdict(rank).items()} for rank in result.ranks
        ],
        "samples": [asdict(sample) for sample in result.samples],
    }


def _map(scenario: Scenario, as_json: bool) -> int:
    """Skew down, size across; the scenario's own size and skew are among them."""
    fair = scenario.available_bytes / scenario.ranks / GB
    spread = [float(round(fair * part)) for part in (0.4, 0.7, 0.85, 0.97, 1.05, 1.5, 3, 5)]
    sizes = sorted({*spread, scenario.requested_bytes / GB, 48.0} - {0.0})
    skews = sorted({0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 150.0, scenario.skew_seconds})
    drawn = race.race_map(scenario, skews, sizes)
    if as_json:
        print(json.dumps({key: getattr(drawn, key) for key in ("skews_seconds", "sizes_gb", "outcomes")}))
        return 0
    available = format_gb(scenario.available_bytes)
    print(f"SGLang {scenario.rules.version}, {count_ranks(scenario.ranks)}, {available} available [simulated]")
    print("seconds between checks \\ GB per rank")
    print(" " * 8 + "".join(f"{size:>9g}" for size in sizes))
    for skew, row in zip(drawn.skews_seconds, drawn.outcomes, strict=True):
        print(f"{skew:>6g} s" + "".join(f"{outcome:>9}" for outcome in row))
    return 0


def _constructor_json(one: source.Constructor) -> dict[str, Any]:
    return {
        "class": one.class_name,
        **_place(one.where),
        "signature": one.signature,
        "sizing": [_place(line) | {"text": line.text} for line in one.sizing],
        "guard": [_place(line) | {"text": line.text} for line in one.guard],
    }


def _place(line: source.Line | None) -> dict[str, Any]:
    return {"file": line.file if line else None, "line": line.number if line else None}


def _reading_json(reading: source.Reading) -> dict[str, Any]:
    """The JSON form of a reading."""
    era = reading.era
    primary = _constructor_json(reading.primary)
    return {
        "path": reading.tree.label,
        "kind": reading.tree.kind,
        "version": reading.tree.version,
        "matches": reading.matches,
        "era": era.name if era else None,
        "releases": list(era.releases) if era else [],
        "nearest_era": reading.nearest.name,
        "sizing": primary.pop("sizing"),
        "guard": primary.pop("guard"),
        "constructor": primary,
        "other_pools": [_constructor_json(one) for one in reading.others],
        "facts": {
            name: {"value": fact.value, "says": fact.says, **_place(fact.line)} for name, fact in reading.facts.items()
        },
        "differences": [
            {
                "fact": difference.fact.name,
                "owner": difference.owner or None,
                "source": difference.fact.value,
                "rules": difference.expected,
                "says": difference.fact.says,
                **_place(difference.fact.line),
            }
            for difference in reading.differences
        ],
        "contradiction": reading.contradiction,
        "warning": reading.warning,
        "notes": [f"not parsed: {note}" for note in reading.tree.unreadable],
    }


def _reading_lines(reading: source.Reading) -> list[str]:
    """The reading for a terminal; file text is the tree's own and stands quoted, line by line."""
    one, era = reading.primary, reading.era
    lines = [
        f"sglang {reading.tree.version or '(version not stated)'}  {reading.tree.kind} {reading.tree.label}",
        f"host-pool constructor: class {one.class_name}  {one.where}",
        f"  {one.signature}",
    ]
    for title, places in (("sizing", one.sizing), ("guard", one.guard)):
        lines += [f"{title}:", *(f"  {at}  {at.text}" for at in places)]
    if reading.others:
        lines.append(
            "pools with a check of their own: " + ", ".join(f"{o.class_name} ({o.where})" for o in reading.others)
        )
    if era is not None:
        lines.append(f"MATCH  the rules of {era}, because")
        for name in dict.fromkeys([*source.MEANING, *reading.facts]):
            fact = reading.facts.get(name)
            if fact is not None:
                place = f"  ({fact.line})" if fact.line else ""
                lines.append(f"  {source.MEANING.get(name, name)}: {fact.value}{place}")
    else:
        lines.append(f"NO MATCH  this is not what any known release does; nearest is {reading.nearest}, but")
        lines += [f"  {difference}" for difference in reading.differences]
        lines.append("  do not trust sizes computed for a release: read these lines, or ask whoever changed them")
    if reading.contradiction:
        lines.append(f"BUT  {reading.contradiction}")
    if reading.warning:
        lines.append(f"note: {reading.warning}")
    return [*lines, *(f"note: not parsed: {note}" for note in reading.tree.unreadable)]
