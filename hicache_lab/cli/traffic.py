"""What ``curve`` and ``simulate`` share: the trace, the launch, the pools behind it and the server's speed."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.cli.options import pairs, positive, positive_float, several, whole
from hicache_lab.forensics.prefill_rate import prefill_rate_of
from hicache_lab.preflight import Question, ask
from hicache_lab.preflight.ask import HOST_FACTS
from hicache_lab.sglang.launch import LaunchConfig, launch_from_flags, refusals
from hicache_lab.sglang.launch.flags import known_flags
from hicache_lab.sglang.releases import NEWEST, rules_for
from hicache_lab.traffic.cachesim import Rates, WritePolicy
from hicache_lab.traffic.cost_benefit import rates_for
from hicache_lab.traffic.traces import FORMATS, GENERATORS, Trace, generate, load_tokenizer, read_trace

_SHORT_FORMS = ("--tp", "--pp", "--dp", "--ep", "--dcp")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """The trace, the pools and the speeds; SGLang's own flags are taken as the server takes them."""
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="a trace file (plain, gzip or zstandard)")
    parser.add_argument("--generate", metavar="NAME", help=f"instead of a file: {', '.join(GENERATORS)}")
    parser.add_argument("--param", action="append", default=[], metavar="KEY=VALUE", help="a parameter of --generate")
    parser.add_argument("--format", default="auto", metavar="F", help=f"auto, {', '.join(FORMATS)}")
    parser.add_argument("--block-tokens", type=positive, metavar="N", help="tokens a block of the trace")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer.json for text prompts")
    parser.add_argument("--sessions-at-once", type=positive, default=8, metavar="N", help="conversations side by side")
    parser.add_argument("--skip-bad-lines", action="store_true", help="count bad records instead of stopping")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    parser.add_argument("--device-tokens", type=positive, metavar="N", help="max_total_num_tokens, as logged")
    parser.add_argument(
        "--host-tokens", type=several(partial(whole, least=0)), default=(), metavar="N[,N…]", help="host pools"
    )
    parser.add_argument("--model", metavar="M", help="sizes the host pool in bytes; a name or a config.json")
    parser.add_argument("--sglang-version", default=NEWEST, metavar="V", help=f"the release (default {NEWEST})")
    parser.add_argument("--prefill-tokens-per-s", type=positive_float, metavar="X", help="prefill rate of the engine")
    parser.add_argument("--rates-from-log", metavar="LOG", help="fit the prefill rate from a server log instead")
    parser.add_argument(
        "--load-back-gb-per-s", type=positive_float, metavar="X", help="host to device, GB (1e9)/s of one rank"
    )
    parser.epilog = "SGLang's own flags (--tp-size, --hicache-ratio, --hicache-write-policy, …) are taken as they are."


class _ServerFlag(argparse.Action):
    """Keeps one of SGLang's own options as it was written, for the launch parser."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        values = values if isinstance(values, list) else [] if values is None else [values]
        words = [*(getattr(namespace, self.dest, None) or []), str(option_string), *map(str, values)]
        setattr(namespace, self.dest, words)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Take every option that some release has: only then argparse knows its values from the trace's name."""
    own = {option for action in parser._actions for option in action.option_strings}
    arities = {name: flag.arity() for name, flag in known_flags().items()} | dict.fromkeys(_SHORT_FORMS, "1")
    for name, arity in arities.items():
        if name not in own:
            count: str | int | None = {"0": 0, "1": None}.get(arity, arity)
            parser.add_argument(name, action=_ServerFlag, nargs=count, dest="server_flags", help=argparse.SUPPRESS)


def lru_only(config: LaunchConfig, why: str, instead: str) -> None:
    """Refuse an eviction policy where the block model stands for all of it."""
    policy = dict(config.other).get("--radix-eviction-policy") or "lru"
    if policy != "lru":
        raise UsageError(f"--radix-eviction-policy {policy}: {why}; {instead}")


def reading_of(args: argparse.Namespace) -> partial[Trace]:
    """The trace asked for, to be read or generated when it is called."""
    parameters = pairs("--param", args.param)
    if parameters and not args.generate:
        raise UsageError("--param belongs to --generate")
    if args.generate:
        if args.block_tokens is not None:
            parameters["block_tokens"] = str(args.block_tokens)
        if args.trace:
            raise UsageError(f"give a trace file or --generate, not both ({args.trace}, {args.generate})")
        return partial(generate, args.generate, **parameters)
    if not args.trace:
        raise UsageError("expected a TRACE file, or --generate NAME; see --help")
    return partial(
        read_trace,
        args.trace,
        format=args.format,
        block_tokens=args.block_tokens,
        tokenizer=load_tokenizer(args.tokenizer) if args.tokenizer else None,
        sessions_at_once=args.sessions_at_once,
        skip_bad=args.skip_bad_lines,
    )


def launch_of(args: argparse.Namespace) -> LaunchConfig:
    """SGLang's own flags as the release takes them; what it refuses is refused here."""
    config = launch_from_flags(args.server_flags or (), model=args.model or "unnamed")
    for refused in refusals(config, args.sglang_version):
        raise UsageError(refused.message)
    if config.disable_radix_cache:
        raise UsageError("--disable-radix-cache: such a server caches no prefix, so every hit rate is 0; leave it out")
    if config.page_size is not None and config.page_size < 1:
        raise UsageError(f"--page-size: expected at least 1, got {config.page_size}")
    return config


def cautions(config: LaunchConfig) -> list[str]:
    """What the launch does that one replayed cache does not show."""
    if (config.dp_size or 1) == 1:
        return []
    return [
        f"--dp-size {config.dp_size}: every data-parallel rank has its own cache and gets a part of the requests; here "
        "one cache gets all of them, so split the trace as your router does for a rank's own hit rate"
    ]


def question_of(args: argparse.Namespace, config: LaunchConfig) -> Question | None:
    """The launch to size with every fact that the command was told of its host, or None without a model."""
    facts = {name: getattr(args, name, None) for name in (*HOST_FACTS, "overhead")}
    if not args.model:
        stated = [name for name, value in facts.items() if value is not None]
        if stated:
            raise UsageError(f"--{stated[0].replace('_', '-')} needs --model: without it no bytes are known")
        return None
    if not args.device_tokens:
        raise UsageError("--device-tokens: give max_total_num_tokens as the server logs it; --model needs it for sizes")
    facts |= {"device_tokens": args.device_tokens, "enable_hierarchical_cache": True}
    return ask(args.model, args.sglang_version, config=config, **facts)


def policy_of(args: argparse.Namespace, config: LaunchConfig) -> WritePolicy:
    """``--hicache-write-policy``, or the release's default."""
    default = rules_for(args.sglang_version).default_write_policy or "write_through"
    return WritePolicy.parse(config.hicache_write_policy or default)


def rates(args: argparse.Namespace, about: Question | None) -> Rates | None:
    """The server's speed, or None when nothing about it was given."""
    if args.prefill_tokens_per_s is None and args.load_back_gb_per_s is None and args.rates_from_log is None:
        return None
    if (
        args.load_back_gb_per_s is None
        or about is None
        or (args.prefill_tokens_per_s is None) == (args.rates_from_log is None)
    ):
        raise UsageError(
            "time saved needs --prefill-tokens-per-s (or --rates-from-log), --load-back-gb-per-s, and --model for the "
            "bytes of a token"
        )
    prefill, basis = args.prefill_tokens_per_s, "given"
    if args.rates_from_log is not None:
        prefill, basis = prefill_rate_of(args.rates_from_log)
    return rates_for(about, prefill, args.load_back_gb_per_s, basis)


def trace_text(record: dict[str, Any]) -> list[str]:
    """The same in words."""
    lines = [
        f"{record['origin']}: {record['requests']:,} requests, {record['input_tokens']:,} prompt tokens in "
        f"{record['references']:,} blocks of {record['block_tokens']}"
    ]
    lines += [f"  left out: {count} × {reason}" for reason, count in record["skipped"].items()]
    return lines + [f"  note: {note}" for note in record["notes"]]
