"""The functions of ``import hicache_lab as hl``: each is one call into the wings, under the command line's own names.

What they return says in one line what it is, shows itself as a table in a notebook, and leads on: ``.advice``,
``.pools``, ``.plot()``, ``.to_dict()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hicache_lab.base.display import Markdown, Rows
from hicache_lab.base.errors import InputError, UsageError, missing_packages_named

__all__ = [
    "Markdown",
    "across_releases",
    "compare",
    "diagnose",
    "explain",
    "hit_curve",
    "largest",
    "models",
    "plan",
    "preflight",
    "read_log",
    "read_trace",
    "releases",
    "simulate",
]

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from hicache_lab.forensics.incident import Diagnosis
    from hicache_lab.forensics.logs.collect import Log
    from hicache_lab.preflight import Advice, Answer, Question
    from hicache_lab.runs.comparison import Comparison
    from hicache_lab.sizing.geometry import ModelGeometry
    from hicache_lab.traffic.cachesim import HitCurve, ReplayResult
    from hicache_lab.traffic.traces import Trace

    Model: TypeAlias = str | Path | Mapping[str, Any] | ModelGeometry
    Asked: TypeAlias = Question | Answer
    Paths: TypeAlias = str | Path | Sequence[str | Path]


def plan(model: Model | Asked, sglang_version: str | None = None, **facts: Any) -> Answer:
    """What a launch takes per pool, rank and host, and whether it fits (``hicache-lab plan``).

    Args:
        model: a catalogue name (``hl.models()``), a hub id, the path of a config.json, or a geometry; or an
            answer or its question (``answer.question``), which needs nothing else.
        sglang_version: the release, e.g. "0.5.8".
        **facts: SGLang's flags under their own names (``tp_size=8, hicache_size=48`` in GB (1e9) per rank,
            ``hicache_ratio=2.5, page_size=64`` …); the host (``host_ram="449GB", available="445GB", hugepages,
            cgroup_limit, cgroup_usage, overhead, headroom``, each with its unit); the device pools of one rank
            (``device_tokens=116_000, device_kv_gb, swa_device_tokens, mamba_slots``); ``draft_model``.

    Returns:
        The verdict: FITS, TIGHT, RACE, REFUSED, OOM_RISK, ASSERT or UNKNOWN, with the numbers behind it. An unsafe
        launch is an answer and not an error.

    Raises:
        UsageError: a name that is not known (with a suggestion), or a quantity without its unit.
        UnknownFact: a model or release that is not known.
    """
    from hicache_lab.preflight import assess

    return assess(_asked(model, sglang_version, facts))


def _asked(model: Model | Asked, sglang_version: str | None, facts: Mapping[str, Any]) -> Question:
    from hicache_lab.preflight import Answer, Question, ask
    from hicache_lab.preflight.ask import check_names

    model = model.question if isinstance(model, Answer) else model
    if not isinstance(model, Question):
        check_names(facts)
        return ask(model, sglang_version, **facts)
    if sglang_version is not None or facts:
        raise UsageError(f"{next(iter(facts), 'sglang_version')}: the question has its own facts; ask a new one")
    return model


def preflight(
    launch: str | Path | Sequence[str],
    sglang_version: str | None = None,
    *,
    model: Model | None = None,
    this_host: bool = False,
    **facts: Any,
) -> Answer:
    """The same from a launch as it is pasted (``hicache-lab preflight``).

    Args:
        launch: a launch line, a docker command, a Kubernetes, compose or systemd file as text or as words, or the
            path of such a file.
        sglang_version: the release; None takes the one that the container's image names.
        model: as for ``plan``, where the launch's own path says nothing; None takes the launch's own.
        this_host: judge for this machine as it is now, instead of a stated host.
        **facts: as for ``plan``; a flag given here replaces the launch's own.

    Raises:
        UsageError: no launch in the text, or several different ones; or a fact that is not understood.
        InputError: the file cannot be read.
        UnknownFact: a model or release that is not known.
    """
    from hicache_lab.host import read_host
    from hicache_lab.preflight import ask, assess
    from hicache_lab.preflight.ask import check_names
    from hicache_lab.sglang.launch import parse_launch

    check_names(facts)
    text, folder = _paste(launch)
    config = parse_launch(text, sglang_version=sglang_version, base_dir=folder)
    return assess(ask(model, sglang_version, config=config, host=read_host() if this_host else None, **facts))


def _paste(launch: str | Path | Sequence[str]) -> tuple[str | Sequence[str], Path]:
    """The text of a launch and the folder that relative names in it are looked up in."""
    # a launch has blanks, and a file's path hardly ever has
    if isinstance(launch, Path) or (isinstance(launch, str) and len(launch.split()) == 1):
        path = Path(launch)
        try:
            return path.read_text(encoding="utf-8", errors="replace"), path.resolve().parent
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; give a launch line, or the path of a file with one") from None
    if not isinstance(launch, str):
        launch = list(launch) if isinstance(launch, Iterable) else [launch]
        if not launch or not all(isinstance(word, str) for word in launch):
            raise UsageError(f"launch: expected a launch line, its words or the path of a file, got {launch}")
    return launch, Path.cwd()


def largest(
    model: Model | Asked,
    sglang_version: str | None = None,
    *,
    accepted: Sequence[str] = ("FITS",),
    **facts: Any,
) -> Advice:
    """The largest ``--hicache-size`` and ``--hicache-ratio`` that fit (``hicache-lab max``).

    Args:
        model: as for ``plan``.
        sglang_version: as for ``plan``.
        accepted: verdicts that count as fitting; ``("FITS", "TIGHT")`` leaves only the reserve.
        **facts: as for ``plan``, without size and ratio.

    Returns:
        Both settings with their answers; None where none fits or the host is not known.

    Raises:
        UsageError: as ``plan``.
        UnknownFact: as ``plan``.
    """
    from hicache_lab.preflight import advise

    return advise(
        _asked(model, sglang_version, facts), accepted=(accepted,) if isinstance(accepted, str) else tuple(accepted)
    )


def across_releases(question: Asked) -> dict[str, Answer]:
    """The same launch under every examined release that has ``--hicache-size``.

    Args:
        question: the launch: an answer or its question (``answer.question``).

    Raises:
        UsageError: neither.
    """
    from hicache_lab.preflight import Answer, Question, across_releases

    if not isinstance(question, Answer | Question):
        raise UsageError(f"across_releases: expected an answer of plan or its question, got {question!r}")
    return across_releases(_asked(question, None, {}))


def explain(answer: Answer, advice: Advice | None = None) -> str:
    """The verdict in words: the arithmetic, what each rank believes, what will not help, what to do.

    Args:
        answer: the verdict.
        advice: the settings that the last part names (``answer.advice``, or others); None leaves it out.
    """
    from hicache_lab.preflight import explain

    return explain(answer, advice)


@missing_packages_named()
def read_log(paths: Paths) -> Log:
    """What server logs say (``hicache-lab parse``): launches, ranks, pools, batches, throughput, errors.

    Args:
        paths: one or more logs of any release, plain or compressed, or a folder of them; rotated files of one log
            are one stream.

    Raises:
        InputError: a file is missing or cannot be read.
        UsageError: no path.
    """
    from hicache_lab.forensics.logs.collect import read_log

    return read_log(_listed(paths))


@missing_packages_named()
def diagnose(
    paths: Paths,
    *,
    kernel_log: Iterable[str] = (),
    memory: Iterable[str] = (),
    **facts: Any,
) -> Diagnosis:
    """Why a server failed (``hicache-lab diagnose``): ranked causes with the lines that show them.

    Args:
        paths: server logs, kernel logs and memory series in any mixture, or a folder of them.
        kernel_log: dmesg, journalctl, kern.log, ``kubectl describe pod``, ``docker inspect``.
        memory: watch files, CSV, free, meminfo, vmstat, node-exporter text.
        **facts: what the files do not tell: ``host_ram="449GB", available, hugepages, cgroup_limit, cgroup_usage,
            overhead`` (each with its unit), ``sglang_version, model, draft_model, tp_size, device_tokens, device_kv_gb,
            swa_device_tokens, mamba_slots``.

    Raises:
        InputError: a file is missing, or nothing in the logs comes from SGLang.
        UsageError: no path, a name that is not known, a quantity without its unit, or a number that cannot be meant.
    """
    from hicache_lab.forensics.incident import diagnose, gather
    from hicache_lab.forensics.incident.question import stated_facts

    return diagnose(gather(_listed(paths), kernel_logs=kernel_log, memory=memory, **stated_facts(facts)))


def _listed(paths: Paths) -> list[str]:
    listed: list[Any] = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
    if not listed or not all(isinstance(path, str | Path) for path in listed):
        raise UsageError(f"expected a path, or at least one in a list, got {paths!r}")
    return [str(path) for path in listed]


@missing_packages_named()
def read_trace(name: str | Path, **reading: Any) -> Trace:
    """A workload trace from a file of any known format, or one that ships.

    Args:
        name: a file, a shipped trace ("mooncake_conversation"), or a generator ("multi_turn", with its parameters).
        **reading: ``format, block_tokens, tokenizer, sessions_at_once, skip_bad``; or a generator's parameters.

    Raises:
        UsageError: no such file, trace or generator.
        InputError: the file is not what it should be; the message names file and line.
    """
    from hicache_lab.traffic.cost_benefit import load_workload

    return load_workload(str(name), **reading)


@missing_packages_named()
def hit_curve(
    trace: Trace | str | Path, *, count: Literal["tokens", "blocks"] = "tokens", warm_up: float = 0.0
) -> HitCurve:
    """The hit rate at every cache size, exactly (``hicache-lab curve``; plain LRU).

    Args:
        trace: a trace, or what ``read_trace`` takes.
        count: what hits count.
        warm_up: share of the requests that only warm the cache, 0 to below 1.

    Raises:
        InputError: the trace holds lengths only.
        UsageError: another ``count`` or ``warm_up``.
    """
    from hicache_lab.traffic.cachesim import hit_curve

    if isinstance(warm_up, bool) or not isinstance(warm_up, int | float) or not 0 <= warm_up < 1:
        raise UsageError(f"warm_up: expected a share from 0 to below 1, got {warm_up!r}")
    read = read_trace(trace) if isinstance(trace, str | Path) else trace
    return hit_curve(read, count=count, count_from=int(read.requests * warm_up))


@missing_packages_named()
def simulate(trace: Trace | str | Path, launch: Answer | None = None, **settings: Any) -> ReplayResult:
    """Replay a trace by a release's own cache rules: cached tokens by tier (``hicache-lab simulate``).

    Args:
        trace: a trace, or what ``read_trace`` takes.
        launch: a verdict; its pools, page size, write policy and release are what is replayed.
        **settings: instead of it or over it: ``device_tokens, host_tokens, page_size, write_policy, eviction, release,
            concurrency, turnaround_steps, chunked_prefill_tokens``.

    Raises:
        UsageError: the pools are not known, or settings that the release does not take.
        InputError: the trace holds lengths only.
    """
    from hicache_lab.traffic.cachesim import replay

    read = read_trace(trace) if isinstance(trace, str | Path) else trace
    return replay(read, _replay_settings(launch, settings))


def _replay_settings(launch: Answer | None, settings: Mapping[str, Any]) -> Any:
    from hicache_lab.traffic.cachesim import ReplaySettings, WritePolicy

    chosen: dict[str, Any] = {}
    if launch is not None and launch.rank is not None and launch.rank.device_tokens:
        config, rules = launch.question.config, launch.question.rules
        chosen = {
            "device_tokens": launch.rank.device_tokens,
            "host_tokens": launch.rank.tokens,
            "page_size": launch.rank.page_size,
            "write_policy": config.hicache_write_policy or rules.default_write_policy or "write_through",
            "release": rules.version,
        }
    chosen |= settings
    if not {"device_tokens", "host_tokens"} <= set(chosen):
        raise UsageError("simulate: give device_tokens and host_tokens, or an answer of plan that has both pools")
    if "write_policy" in chosen:
        chosen["write_policy"] = WritePolicy.parse(str(chosen["write_policy"]))
    try:
        return ReplaySettings(**chosen)
    except TypeError as error:
        raise UsageError(f"simulate: {error}") from None


@missing_packages_named()
def compare(runs: Paths, *, baseline: str = "", objective: str = "") -> Comparison:
    """Runs side by side (``hicache-lab compare``): medians, intervals, and what is more than noise.

    Args:
        runs: run folders, sweep folders, or results of bench_serving or aiperf, each ``PATH`` or ``LABEL=PATH``.
        baseline: label of the setting that the others are compared with; the first otherwise.
        objective: the figure that decides.

    Raises:
        UsageError: a baseline or an objective that is not there.
        InputError: a path that is nothing of the kind.
    """
    from hicache_lab.sweeps import collect, compare_collection

    collection = collect(_listed(runs))
    return compare_collection(collection, baseline=baseline, objective=objective)


def models() -> Rows:
    """The models that ship: names, what they store for a token, and how sure their numbers are."""
    from hicache_lab.sizing.models import catalogue

    return Rows(
        {
            "model": entry.name,
            "hub id": entry.hf_id,
            "stores a token as": entry.kind,
            "confidence": entry.confidence,
            "also known as": ", ".join(entry.aliases),
        }
        for entry in catalogue()
    )


def releases(sglang_version: str | None = None) -> Rows:
    """What differs from release to release, or what one release does.

    Args:
        sglang_version: the release whose rules are listed; None lists every change with the source it was read from.

    Raises:
        UnknownFact: not a release, or one before 0.4.4, the first with a host tier.
    """
    from hicache_lab.sglang.releases import rules_for
    from hicache_lab.views.tables import change_rows, rule_rows

    return Rows(change_rows() if sglang_version is None else rule_rows(rules_for(sglang_version)))


@missing_packages_named()
def markdown(record: object) -> str:
    """What a notebook shows for a record."""
    from hicache_lab.views import cells

    return cells.markdown(record)


@missing_packages_named()
def plot(record: object, theme: Literal["light", "dark"] = "light") -> Figure:
    """The figure of a record."""
    from hicache_lab.views import cells

    return cells.plot(record, theme)


@missing_packages_named()
def to_dict(record: object) -> dict[str, Any]:
    """A record as plain values."""
    from hicache_lab.views import cells

    return cells.to_dict(record)
