"""Verdicts: the incident, the recorded cases, and properties over models, releases and hosts."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import read_records
from verdicts import judge_case, judge_cases

from hicache_lab.base.errors import UnknownFact, UsageError
from hicache_lab.base.units import GB, GIB
from hicache_lab.preflight import Answer, Question, advise, ask, assess, explain, with_release, with_size
from hicache_lab.preflight.record import answer_record
from hicache_lab.sglang.releases import RESERVE_BYTES, VERIFIED

CASES = Path(__file__).parents[1] / "baselines" / "cases.jsonl"
MORE = CASES.with_name("cases_more.jsonl")


def incident(version: str = "0.5.8", **changes: object) -> Question:
    facts: dict[str, object] = {"tp_size": 8, "device_tokens": 116_000, "host_ram": "449GB", "available": "445GB"}
    return ask("kimi-k2.5", version, **(facts | changes))


@pytest.mark.parametrize(("path", "least"), [(CASES, 16), (MORE, 80)], ids=["cases", "cases_more"])
def test_every_recorded_case_agrees(path: Path, least: int) -> None:
    judged = judge_cases(record for _, record in read_records(path))
    assert judged["total"] >= least
    assert judged["agree"] == judged["total"], [case for case in judged["cases"] if not case["agrees"]]


def test_a_wrong_expectation_disagrees() -> None:
    case = json.loads(CASES.read_text().splitlines()[0])
    for wrong in ({"verdict": ["FITS"]}, {"host_gb": 2500.0}, {"message_contains": "x"}, {"nonsense": 1}):
        assert not judge_case(case | {"expect": wrong})["agrees"]
    assert not judge_case({"id": "x", "args": {"model": "no-such-model", "sglang_version": "0.5.8"}})["agrees"]


def test_the_incident() -> None:
    answer = assess(incident(hicache_size=300))
    assert answer.verdict == "OOM_RISK"
    assert answer.rank is not None
    assert answer.rank.tokens == 4_269_126
    assert answer.host_bytes == pytest.approx(2400 * GB, rel=1e-4)
    together, apart = answer.orders
    assert together.passes
    assert apart.refusal is not None
    assert (apart.refusal.rank, round(apart.refusal.allowed_bytes / GB, 2)) == (1, 134.26)
    assert "134.26 GB free" in apart.refusal.message


def test_a_later_release_refuses_and_its_number_is_a_share() -> None:
    answer = assess(incident("0.5.19", hicache_size=300))
    assert answer.verdict == "REFUSED"
    assert answer.refusal is not None
    assert "only have 54.28 GB free" in answer.refusal.message
    assert "one rank's share" in answer.refusal.meaning


def test_a_safe_size_can_be_refused_when_ranks_come_one_after_another() -> None:
    answer = assess(incident("0.5.19", hicache_size=48))
    assert answer.verdict == "RACE"
    assert answer.orders[1].refusal is not None
    assert answer.orders[1].refusal.allowed_bytes // 10**7 == 4228
    assert answer.guaranteed_start_bytes == (445 * GB - RESERVE_BYTES) // 15


def test_advice_for_the_incident() -> None:
    advice = advise(incident(hicache_size=300))
    assert (advice.size_gb, advice.ratio) == (48, 5.9)
    assert advice.size_bytes == pytest.approx(384 * GB, rel=1e-4)
    assert advise(incident("0.5.19")).size_gb == 28
    assert advise(incident(overhead="40GB"), accepted=("FITS", "TIGHT")).size_gb == 49


def test_auto_size_takes_ratio_two() -> None:
    answer = assess(incident("0.5.21"))
    assert (answer.verdict, answer.ratio) == ("FITS", 2.0)
    assert answer.host_bytes == pytest.approx(130.43 * GB, rel=1e-4)


def test_the_words_of_the_incident() -> None:
    text = explain(assess(incident(hicache_size=300)), advise(incident()))
    for part in (
        "OOM_RISK  --hicache-size is per rank: 8 ranks × 300.00 GB = 2,400 GB (2,235 GiB); this host has 445 GB",
        "300.00 GB ≤ 434.26 GB (445.00 GB − 10 GiB) → passes, 8 times if they sample together",
        "will not help: swap",
        "--hicache-size 48 (8 ranks take 384.0 GB in all)",
        '"only have 54.28 GB free" is one rank\'s share',
    ):
        assert part in text


def test_bytes_on_the_device_say_no_tokens_of_deepseek_v4() -> None:
    answer = assess(ask("deepseek-v4-pro", "0.5.17", tp_size=8, device_kv_gb=30.0, hicache_ratio=2, host_ram="449GB"))
    assert answer.verdict == "UNKNOWN"
    assert "--device-tokens" in answer.missing[0]
    assert "--device-kv-gb" not in answer.missing[0]


def test_missing_facts_are_named_and_bytes_still_given() -> None:
    answer = assess(ask("llama-3.1-8b", "0.4.7", tp_size=4, device_tokens=1_005_629, hicache_ratio=2.0))
    assert answer.verdict == "UNKNOWN"
    assert any("--host-ram" in fact for fact in answer.missing)
    assert answer.per_rank_bytes == pytest.approx(65.9 * GB, rel=1e-3)
    no_tokens = assess(ask("llama-3.1-8b", "0.5.8", hicache_ratio=2.0, host_ram="500GB"))
    assert no_tokens.verdict == "UNKNOWN"
    assert any("--device-tokens" in fact for fact in no_tokens.missing)


@pytest.mark.parametrize(("version", "verdict"), [("0.5.20", "OOM_RISK"), ("0.5.21", "REFUSED"), ("0.5.23", "REFUSED")])
def test_a_container_is_seen_from_0_5_21_on(version: str, verdict: str) -> None:
    facts = {"host_ram": "1000GB", "available": "900GB", "cgroup_limit": "100GB", "cgroup_usage": "5GB"}
    answer = assess(ask("llama-3.1-8b", version, tp_size=2, hicache_size=60, **facts))
    assert answer.verdict == verdict


def test_unsupported_pools_are_refused_with_the_words_of_the_release() -> None:
    answer = assess(ask("gpt-oss-120b", "0.5.8", tp_size=8, hicache_size=30, host_ram="1000GB"))
    assert (answer.verdict, answer.refusal.message if answer.refusal else "") == (
        "REFUSED",
        "HiRadixCache only supports MHA and MLA yet",
    )
    v4 = assess(ask("deepseek-v4-pro", "0.5.17", tp_size=8, hicache_size=20, device_tokens=10**6, host_ram="1000GB"))
    assert v4.verdict == "REFUSED"
    assert v4.refusal is not None
    assert (answer.refusal.flag if answer.refusal else "", v4.refusal.flag) == ("--model-path", "--hicache-size")
    assert "--hicache-ratio instead" in v4.refusal.message


def test_contradictions_are_refused_before_anything_is_sized() -> None:
    answer = assess(incident(hicache_size=48, disable_radix_cache=True))
    assert answer.verdict == "REFUSED"
    assert "mutually exclusive" in (answer.refusal.message if answer.refusal else "")


def test_a_release_that_was_not_examined_warns() -> None:
    answer = assess(with_release(incident(hicache_size=48), "0.5.99"))
    assert any("not verified for 0.5.99" in text for text in answer.warnings)


def test_secondary_geometry_is_marked() -> None:
    answer = assess(ask("qwen3-14b", "0.5.8", hicache_size=10, host_ram="100GB"))
    assert any("secondary" in text for text in answer.warnings)


@pytest.mark.parametrize(
    "facts",
    [
        {"tp_sise": 8},
        {"host_ram": "449"},
        {"device_tokens": 0},
        {"tp_size": 0},
        {"hicache_ratio": -1.0},
        {"hicache_size": -3},
        {"cgroup_limit": "10GB"},
        {"nnodes": 3, "tp_size": 8},
    ],
)
def test_bad_input_is_refused_by_name(facts: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="|".join(name.replace("_", "[-_]") for name in facts)):
        ask("kimi-k2.5", "0.5.8", **facts)


def test_unknown_models_and_releases_are_refused() -> None:
    with pytest.raises(UnknownFact):
        ask("no-such-model-7b", "0.5.8")
    with pytest.raises(UnknownFact):
        ask("kimi-k2.5", "0.3.0")


def test_the_record_is_json_with_units_in_its_names() -> None:
    question = incident(hicache_size=300)
    record = json.loads(json.dumps(answer_record(assess(question), advise(question))))
    assert record["per_rank_tokens"] == 4_269_126
    assert record["host_gb"] == pytest.approx(2400, rel=1e-4)
    assert record["advice"]["hicache_size_gb"] == 48
    assert record["provenance"] == "computed"


MODELS = st.sampled_from(
    ["kimi-k2.5", "llama-3.1-8b", "deepseek-v3.2", "gpt-oss-120b", "qwen3.5-397b-a17b", "glm-5.2", "gemma-3-27b"]
)


@settings(max_examples=60, deadline=None)
@given(MODELS, st.sampled_from(VERIFIED[3:]), st.integers(1, 400), st.sampled_from([1, 2, 4, 8]), st.integers(50, 4000))
def test_a_plan_that_fits_never_exceeds_the_host(model: str, version: str, size: int, tp: int, ram_gb: int) -> None:
    answer = assess(ask(model, version, tp_size=tp, hicache_size=size, device_tokens=1000, host_ram=f"{ram_gb}GB"))
    if answer.verdict in ("FITS", "TIGHT", "RACE"):
        assert answer.resident_bytes <= ram_gb * GB
    if answer.verdict == "FITS":
        assert answer.resident_bytes + RESERVE_BYTES <= ram_gb * GB
    if answer.ranks:
        assert answer.host_bytes == sum(rank.requested_bytes for rank in answer.ranks)
        assert answer.ranks_on_host == tp
    if answer.verdict in ("REFUSED", "ASSERT"):
        assert answer.refusal is not None
        assert answer.refusal.message


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["0.4.6", "0.5.8", "0.5.17", "0.5.19", "0.5.23"]), st.integers(60, 3000), st.sampled_from([1, 4, 8])
)
def test_advice_is_the_largest_that_fits(version: str, ram_gb: int, tp: int) -> None:
    question = ask("kimi-k2.5", version, tp_size=tp, device_tokens=20_000, host_ram=f"{ram_gb}GB")
    advice = advise(question)
    if advice.size_gb is not None:
        assert assess(with_size(question, advice.size_gb)).verdict == "FITS"
        assert assess(with_size(question, advice.size_gb + 1)).verdict != "FITS"


def test_an_overhead_that_fills_the_host_is_named() -> None:
    text = explain(assess(incident(hicache_size=48, available="30GB", overhead="40GB")))
    assert text.startswith("OOM_RISK")
    assert "other memory (40.00 GB) alone takes all that is available" in text
    assert "clean refusal" not in text


def in_manifest(size_gb: int, version: str = "0.5.8") -> Answer:
    """8 ranks in a container of 1000Gi on a host of 1.5 TB, 60 GB for the server besides."""
    facts = {"host_ram": "1500GB", "cgroup_limit": "1000GiB", "overhead": "60GB", "device_tokens": 116_000}
    return assess(ask("kimi-k2.5", version, tp_size=8, hicache_size=size_gb, **facts))


def test_a_sequence_ends_where_the_limit_kills_not_where_the_check_would_refuse() -> None:
    """Rank 5 would have been refused with 179.26 GB allowed, but rank 4 passes the limit: 1,200 of 1,013.74 GB."""
    answer = in_manifest(300)
    together, apart = answer.orders
    assert answer.verdict == "OOM_RISK" and answer.refusal is None
    assert answer.question.limit_bytes == 1000 * GIB - 60 * GB
    assert (together.killed_rank, together.passes, together.refusal) == (3, True, None)
    assert (apart.killed_rank, apart.passes, apart.refusal) == (3, False, None)
    taken = 4 * answer.per_rank_bytes
    assert (apart.resident_bytes, together.resident_bytes) == (taken, 2 * taken)
    assert taken == 1_200_000_089_088
    text = explain(answer)
    assert "rank 4 passes the limit (1,200 GB of 1,013.74 GB) before any check refuses" in text
    assert "clean refusal" not in text and "179.26" not in text


def test_without_a_container_the_check_refuses_before_the_limit() -> None:
    answer = assess(ask("kimi-k2.5", "0.5.8", tp_size=8, hicache_size=300, host_ram="1500GB", overhead="60GB"))
    apart = answer.orders[1]
    assert apart.killed_rank is None and apart.refusal is not None
    assert (apart.refusal.rank, apart.refusal.allowed_bytes) == (4, 1440 * GB - 10 * GIB - 4 * answer.per_rank_bytes)
    assert "rank 5 is refused" in explain(answer) and "a clean refusal" in explain(answer)


def test_a_release_that_reads_the_container_refuses_in_time() -> None:
    answer = in_manifest(300, "0.5.22")
    assert answer.verdict == "REFUSED"
    assert all(order.killed_rank is None and order.refusal is not None for order in answer.orders)


def test_a_rounded_buffer_kills_where_the_bytes_asked_for_would_have_fitted() -> None:
    """0.5.2 pins 137.4 GB for each 100 asked for: the third passes 310 GB, which 3 × 100 would not."""
    answer = assess(ask("llama-3.1-70b", "0.5.2", tp_size=8, hicache_size=100, host_ram="1TB", cgroup_limit="310GB"))
    assert answer.orders[1].killed_rank == 2
    assert answer.orders[1].resident_bytes == 3 * 2**37


def test_what_binds_is_called_by_its_name() -> None:
    fits, over = explain(in_manifest(20)), explain(in_manifest(300))
    assert "left in the container: 853.74 GB" in fits and "(15 % of its limit)" in fits
    assert "the container is out of memory at about 1,014 GB resident" in over
    bare = explain(assess(incident(hicache_size=20)))
    assert "left on the host:" in bare and "% of RAM" in bare
