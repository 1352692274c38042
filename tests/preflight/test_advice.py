"""What is recommended can be run: properties of the inverse over every model, release and kind of host."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, GIB
from hicache_lab.preflight import Question, advise, ask, assess, corrected_line
from hicache_lab.preflight.ask import DEVICE_FACTS, HOST_FACTS, OTHER_FACTS
from hicache_lab.sglang.launch import render_launch
from hicache_lab.sglang.releases import VERIFIED
from hicache_lab.sizing.geometry import load_geometry
from hicache_lab.sizing.models import catalogue

MODELS = [load_geometry(entry.name) for entry in catalogue()]
HOST_GB = st.integers(64, 2000)
SAFE = ("FITS", "TIGHT")
FACTS = (*HOST_FACTS, *DEVICE_FACTS, *OTHER_FACTS)


@st.composite
def launches(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of ``ask`` for a launch and its host, without a size or ratio."""
    ram = draw(HOST_GB)
    facts: dict[str, Any] = {
        "model": draw(st.sampled_from(MODELS)),
        "sglang_version": draw(st.sampled_from(VERIFIED)),
        "tp_size": draw(st.sampled_from([1, 2, 4, 8])),
        "device_tokens": draw(st.sampled_from([8_192, 116_000, 1_000_000])),
        "host_ram": ram * GB,
        "overhead": draw(st.integers(0, 60)) * GB,
    }
    if draw(st.booleans()):
        facts["hugepages"] = draw(st.integers(1, ram // 2)) * GB
    if draw(st.booleans()):
        facts["cgroup_limit"] = draw(st.integers(32, 2 * ram)) * GIB
        facts["cgroup_usage"] = draw(st.integers(0, 20)) * GB
    if draw(st.booleans()):
        facts |= draw(
            st.sampled_from([{"pp_size": 2}, {"dp_size": 2}, {"page_size": 64}, {"kv_cache_dtype": "fp8_e4m3"}])
        )
    return facts


def question(facts: dict[str, Any], **changes: Any) -> Question | None:
    """The question, or None where the model cannot be split or sized like that."""
    try:
        asked = ask(**(facts | changes))
        assess(asked)
    except UsageError:
        return None
    return asked


@settings(max_examples=300, deadline=None)
@given(launches(), st.sampled_from([("FITS",), SAFE]))
def test_what_is_recommended_fits(facts: dict[str, Any], accepted: tuple[str, ...]) -> None:
    asked = question(facts)
    if asked is None:
        return
    advice = advise(asked, accepted=accepted)
    if advice.size_gb is not None:
        again = assess(ask(**facts, hicache_size=advice.size_gb))
        assert again.verdict in accepted
        assert again.resident_bytes == advice.size_bytes <= (asked.limit_bytes or 0)
    if advice.ratio is not None:
        again = assess(ask(**facts, hicache_ratio=advice.ratio))
        assert again.verdict in accepted
        assert again.resident_bytes == advice.ratio_bytes <= (asked.limit_bytes or 0)


@settings(max_examples=100, deadline=None)
@given(launches(), st.integers(1, 600))
def test_a_corrected_line_fits(facts: dict[str, Any], size_gb: int) -> None:
    asked = question(facts, hicache_size=size_gb)
    if asked is None:
        return
    others = {name: facts[name] for name in facts if name in ("model", "sglang_version", *FACTS)}
    pasted = ask(config=render_launch(asked.config), **others)
    answer = assess(pasted)
    if answer.refusal is not None and answer.refusal.error == "argparse":
        return  # a flag that this release does not have: no size mends that
    line = corrected_line(answer, advise(pasted), pasted.config)
    if line is not None:
        assert assess(ask(config=line, **others)).verdict == "FITS"


def at_least(larger: float | None, smaller: float | None) -> bool:
    return smaller is None or (larger is not None and larger >= smaller)


@settings(max_examples=200, deadline=None)
@given(launches(), st.integers(1, 1000), st.sampled_from([("FITS",), SAFE]))
def test_more_ram_never_means_a_smaller_recommendation(
    facts: dict[str, Any], more_gb: int, accepted: tuple[str, ...]
) -> None:
    small, large = question(facts), question(facts, host_ram=facts["host_ram"] + more_gb * GB)
    if small is None or large is None:
        return
    before, after = advise(small, accepted=accepted), advise(large, accepted=accepted)
    assert at_least(after.size_gb, before.size_gb)
    assert at_least(after.ratio, before.ratio)


@settings(max_examples=200, deadline=None)
@given(launches(), st.integers(32, 1000))
def test_a_container_counts_however_it_is_told(facts: dict[str, Any], limit_gib: int) -> None:
    """A limit in the launch line is the stated one, and no limit ever raises what is recommended."""
    facts = {name: value for name, value in facts.items() if not name.startswith("cgroup")}
    free, stated = question(facts), question(facts, cgroup_limit=limit_gib * GIB)
    if free is None or stated is None:
        return
    server = "python -m sglang.launch_server --model-path m --enable-hierarchical-cache"
    line = f"docker run --memory {limit_gib}g image {server}"
    carried = ask(config=line, **facts)
    bound = min(free.limit_bytes or 0, limit_gib * GIB - free.overhead_bytes)
    assert carried.limit_bytes == stated.limit_bytes == bound
    ours, theirs, without = advise(carried), advise(stated), advise(free)
    assert (ours.size_gb, ours.ratio) == (theirs.size_gb, theirs.ratio)
    assert at_least(without.size_gb, theirs.size_gb) and at_least(without.ratio, theirs.ratio)
