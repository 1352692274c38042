import re
from dataclasses import replace

import pytest

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, GIB
from hicache_lab.preflight import Question, ask
from hicache_lab.preflight.host_tiers import host_tier, host_tiers, largest_safe
from hicache_lab.sglang.releases import rules_for
from hicache_lab.traffic import cost_benefit
from hicache_lab.traffic.cachesim import Rates, WritePolicy, hit_curve, replay_blocks
from hicache_lab.traffic.cost_benefit import CostBenefit
from hicache_lab.traffic.traces import Trace, generate
from hicache_lab.views.figures import apply_cost_benefit, cost_benefit_data, cost_benefit_figure, curve_figure
from hicache_lab.views.widgets import CostBenefitExplorer


@pytest.fixture(scope="module")
def question() -> Question:
    """The incident's launch."""
    return ask(
        "kimi-k2.5", "0.5.8", tp_size=8, device_tokens=116_000, host_ram="449GB", available="445GB", page_size=64
    )


def behind(trace: Trace, question: Question, rates: Rates | None = None) -> CostBenefit:
    return CostBenefit(trace, hit_curve(trace, count="tokens"), question, rates=rates)


@pytest.fixture(scope="module")
def case(question: Question) -> CostBenefit:
    return behind(generate("multi_turn", sessions=300), question, cost_benefit.rates_for(question, 20_000, 20))


def test_a_tier_says_the_same_in_every_unit(question: Question) -> None:
    tier = host_tier(question, size_gb=48)
    assert tier.tokens == 683_072 and tier.host_bytes == 8 * tier.per_rank_bytes
    assert tier.ratio == pytest.approx(683_072 / 116_000)
    assert tier.verdict == "FITS"
    assert host_tier(question, size_gb=300).verdict == "OOM_RISK"
    with pytest.raises(UsageError, match="one of both"):
        host_tier(question)
    with pytest.raises(UsageError, match=r"--device-tokens|cannot be sized"):
        host_tier(ask("kimi-k2.5", "0.5.8", tp_size=8), ratio=2.0)


def test_tiers_are_ascending_and_the_safe_one_is_among_them(case: CostBenefit) -> None:
    tiers = case.tiers([8, 2, 2.5], [300, 48])
    assert [tier.tokens for tier in tiers] == sorted(tier.tokens for tier in tiers)
    assert case.safe in tiers and case.safe is not None
    assert case.safe.host_bytes < 445 * GB
    assert largest_safe(replace(case.question, host=None)) is None
    assert len(host_tiers(case.question, ratios=[2, 2.0])) == 1


def test_what_a_rounded_pool_really_takes_is_what_it_costs() -> None:
    """0.4.5 … 0.5.4 round each pinned pool up to a power of two: 8 × 48 GB take 8 × 64 GiB of the host."""
    question = ask("llama-3.1-70b", "0.5.2", tp_size=8, device_tokens=116_000, host_ram="1200GB")
    tier = host_tier(question, size_gb=48)
    assert tier.allocated_host_bytes == 8 * 64 * GIB > tier.host_bytes
    small = behind(generate("multi_turn", sessions=30), question)
    assert small.rows([tier])[0]["GB on the host"] == 549.8
    for taken in (tier.allocated_host_bytes, 1.9 * tier.allocated_host_bytes):
        held = small.tokens_within(taken)
        assert held == pytest.approx(tier.allocated_host_bytes / small.host_bytes_per_token, abs=1)
        assert host_tier(question, ratio=held / 116_000).allocated_host_bytes == tier.allocated_host_bytes
    exact = replace(small, question=replace(question, rules=rules_for("0.5.8")))
    assert exact.tokens_within(384 * GB) == pytest.approx(host_tier(exact.question, size_gb=48).tokens, abs=2)


def test_more_ranks_cost_bytes_and_hold_the_same_tokens() -> None:
    """MLA: every rank keeps the whole token."""
    one, eight = (host_tier(ask("kimi-k2.5", "0.5.8", tp_size=n, device_tokens=116_000), ratio=2.0) for n in (1, 8))
    assert eight.tokens == one.tokens and eight.host_bytes == 8 * one.host_bytes


def test_rows_say_what_a_setting_takes_and_buys(case: CostBenefit) -> None:
    tiers = case.tiers([1, 2.5, 5], [])
    rows = case.rows(tiers)
    assert rows[0]["host adds, points"] == pytest.approx(0, abs=0.2)
    rates = [row["hit rate %"] for row in rows]
    assert rates == sorted(rates)  # type: ignore[type-var]
    last = rows[-1]
    hits = replay_blocks(case.trace, 116_000, tiers[-1].tokens, case.policy)
    hourly = hits.host_tokens.sum() / (case.trace.duration_s or 0) * 3600
    assert last["prefill tokens saved an hour"] == pytest.approx(hourly, rel=1e-6)
    assert case.rate(tiers[-1].tokens) == pytest.approx(hits.total_rate)
    assert case.knee(tiers) in (None, *tiers)
    assert "points per extra GB" in last and "TTFT saved, mean ms" in last


def test_the_first_step_starts_from_no_host_tier(case: CostBenefit) -> None:
    tiers = host_tiers(case.question, ratios=[2, 4])
    steps = case.rate_per_gb(tiers)
    assert steps[0] == pytest.approx((case.rate(tiers[0].tokens) - case.device_rate) / (tiers[0].host_bytes / GB))
    assert case.rate_per_gb(()) == []


@pytest.mark.parametrize("ratio", [0.0, -2.0, float("nan"), float("inf")])
def test_a_ratio_or_size_that_cannot_be_is_refused(question: Question, ratio: float) -> None:
    with pytest.raises(UsageError, match="--hicache-ratio: expected a number above 0"):
        host_tier(question, ratio=ratio)
    with pytest.raises(UsageError, match="--hicache-size: expected whole GB"):
        host_tier(question, size_gb=0)


def test_half_the_gain_is_a_size_that_gives_half_the_gain(case: CostBenefit) -> None:
    for policy in (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK):
        one = replace(case, policy=policy)
        found = re.search(
            r"takes a host tier of ([\d,]+) tokens", cost_benefit.conclusion(one, host_tier(one.question, ratio=4))
        )
        assert found is not None
        tokens = int(found[1].replace(",", ""))
        half = (one.device_rate + one.curve.ceiling) / 2
        # the sum of two pools is cut into whole blocks twice
        assert one.rate(tokens + 2 * one.curve.block_tokens) >= half > one.rate(tokens - one.curve.block_tokens)


def test_the_conclusion_names_a_smaller_setting_that_does_the_same(question: Question) -> None:
    scan = behind(generate("cyclic_scan", items=50, item_tokens=4096), question)  # 204,800 tokens
    tiers = scan.tiers([1, 2, 4, 5])
    text = cost_benefit.conclusion(scan, tiers[-1], tiers)
    assert "--hicache-ratio 2** does the same with" in text and "100 % of the 75.0" in text
    assert "The knee of the settings compared is --hicache-ratio 2." in text
    small = behind(generate("cyclic_scan", items=2), question)
    text = cost_benefit.conclusion(small, tiers[-1], tiers)
    assert "the device pool alone already has" in text and "all do the same" in text and "Half" not in text
    assert ("knee", f"none up to {tiers[-1].label}", "") in cost_benefit.figures_of(small, tiers[-1], tiers)


def test_a_setting_that_does_not_fit_is_called_so_first(case: CostBenefit, question: Question) -> None:
    text = cost_benefit.conclusion(case, host_tier(question, size_gb=300))
    assert text.startswith(f"**This host cannot give that**; the largest that fits is {case.safe.label}")  # type: ignore[union-attr]
    tiny = ask("kimi-k2.5", "0.5.8", tp_size=8, device_tokens=116_000, host_ram="12GB", available="10GB")
    none = replace(case, question=tiny)
    assert cost_benefit.conclusion(none, host_tier(tiny, ratio=2)).startswith("**No host tier fits this host**")
    assert cost_benefit.conclusion(case, host_tier(question, ratio=2)).startswith("**--hicache-ratio 2**")


def test_rules_that_were_not_read_leave_the_block_model(case: CostBenefit) -> None:
    tier = host_tier(case.question, ratio=4)
    rows = case.replayed_rows(tier, "0.4.4", 64, requests=100)
    assert [row["rules of 0.4.4, hit rate %"] for row in rows] == [
        "not replayed: the rules of 0.4.4 have not been read"
    ] * 3
    assert all(isinstance(row["blocks, hit rate %"], float) for row in rows)
    assert "not replayed" in str(case.eviction_rows(tier, "0.4.4", 64, ["lru"], requests=100))


def test_replayed_rows_stand_beside_the_block_model(case: CostBenefit) -> None:
    tier = host_tier(case.question, ratio=4.0)
    rows = case.replayed_rows(tier, "0.5.8", 64, requests=400)
    assert [row["write policy"] for row in rows] == list(map(str, WritePolicy))
    # write_back of 0.5.8 keeps duplicates after a load back, so it stays below curve(D + H)
    for row, tolerance in zip(rows, (4, 4, 6), strict=True):
        assert row["rules of 0.5.8, hit rate %"] == pytest.approx(row["blocks, hit rate %"], abs=tolerance)
    assert len(case.eviction_rows(tier, "0.5.8", 64, ["lru", "lfu"], requests=200)) == 2


def test_shapes_and_seeds(question: Question) -> None:
    shapes = {row["traffic"]: row for row in cost_benefit.shape_rows(question, 683_072, WritePolicy.WRITE_THROUGH)}
    scan = shapes["cyclic_scan"]
    assert scan["device only %"] == 0 and scan["with the host tier %"] == 0 and scan["unlimited %"] == 75
    fitted = cost_benefit.shape_rows(question, 900_000, WritePolicy.WRITE_THROUGH, ["cyclic_scan"])
    assert fitted[0]["with the host tier %"] == 75
    rows = cost_benefit.seed_rows(question, 683_072, WritePolicy.WRITE_THROUGH, seeds=3, name="multi_turn")
    assert len({row["with the host tier %"] for row in rows}) == 3


def test_the_conclusion_has_numbers(case: CostBenefit) -> None:
    tier = host_tier(case.question, ratio=4.0)
    text = cost_benefit.conclusion(case, tier)
    assert "--hicache-ratio 4" in text and "points" in text and "prefill tokens" in text
    names = {name for name, _, _ in cost_benefit.figures_of(case, tier, case.tiers([2, 4], []))}
    assert {"hit_rate", "device_hit_rate", "ceiling", "verdict", "saved_prefill_tokens"} <= names
    bare = replace(case, rates=None)
    assert bare.savings(tier.tokens) is None and "TTFT" not in cost_benefit.conclusion(bare, tier)


def test_a_shipped_trace_is_found_by_name() -> None:
    trace = cost_benefit.load_workload("mooncake_synthetic")
    assert trace.requests == 3993
    assert cost_benefit.traffic_row(trace, hit_curve(trace, count="tokens"))["minutes"] == "17"
    assert cost_benefit.load_workload("cyclic_scan", items=3).requests == 12
    with pytest.raises(UsageError, match="no such trace file"):
        cost_benefit.load_workload("mooncake_nothing")


def test_the_figure_shows_what_was_looked_up(case: CostBenefit) -> None:
    tier = host_tier(case.question, ratio=4.0)
    data = cost_benefit_data(case, tier)
    figure = cost_benefit_figure(data)
    assert figure.data[6].y[0] == pytest.approx(100 * case.rate(tier.tokens))
    assert figure.data[5].x[0] == 449 and figure.data[4].x[0] == pytest.approx(data.safe_gb)
    assert "GB = 1e9" in figure.layout.xaxis.title.text and "%" in figure.layout.yaxis.title.text
    place = max(i for i, x in enumerate(data.host_gb) if x <= data.point_gb)
    assert data.through[place] == pytest.approx(data.point, abs=1.5)
    without_host = cost_benefit_figure(
        cost_benefit_data(replace(case, question=replace(case.question, host=None)), tier)
    )
    assert not without_host.data[5].showlegend
    assert len(curve_figure(case, theme="dark").data) == 1


def test_sliders_look_up_and_redraw_in_place(case: CostBenefit) -> None:
    explorer = CostBenefitExplorer(case, host_tier(case.question, ratio=2.5))
    figure = explorer.figure
    explorer.controls["ratio"].value = 5.0
    assert explorer.figure is figure and explorer.tier is not None
    assert figure.data[6].y[0] == pytest.approx(100 * case.rate(explorer.tier.tokens))
    explorer.controls["policy"].value = "write_back"
    assert figure.data[6].y[0] == pytest.approx(
        100 * replace(case, policy=WritePolicy.WRITE_BACK).rate(explorer.tier.tokens)
    )
    explorer.controls["device"].value = 300_000
    expected = 100 * float(hit_curve(case.trace, count="tokens").rate_at_tokens(300_000))
    assert figure.data[2].y[0] == pytest.approx(expected)
    explorer.controls["mode"].value = "size"
    explorer.controls["size"].value = 300
    assert "OOM_RISK" in explorer.words.value
    explorer.controls["mode"].value = "ratio"
    explorer.controls["ratio"].value = 0.5
    assert "ASSERT" in explorer.words.value, "0.5.8 refuses a host pool below the device pool"


def test_updating_a_figure_equals_drawing_it_anew(case: CostBenefit) -> None:
    first, second = (cost_benefit_data(case, host_tier(case.question, ratio=r)) for r in (2.0, 6.0))
    figure = cost_benefit_figure(first)
    apply_cost_benefit(figure, second, first)
    assert figure.to_dict() == cost_benefit_figure(second).to_dict()
