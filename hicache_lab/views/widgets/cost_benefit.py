"""Sliders over cost and benefit: ratio or size, device pool, write policy; all looked up, nothing simulated again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from hicache_lab.base.errors import HicacheLabError
from hicache_lab.base.units import gb
from hicache_lab.preflight.host_tiers import HostTier, host_tier
from hicache_lab.traffic.cachesim import WritePolicy
from hicache_lab.traffic.cost_benefit import CostBenefit
from hicache_lab.views.figures import Theme
from hicache_lab.views.figures.cost_benefit import apply_cost_benefit, cost_benefit_data, cost_benefit_figure


class CostBenefitExplorer:
    """Controls, figure and one line of words.

    Attributes:
        controls: mode, ratio, size, device pool and policy.
        figure: the FigureWidget; updated in place.
        tier: the setting on show, None while it cannot be sized.
    """

    def __init__(self, case: CostBenefit, tier: HostTier, theme: Theme = "light") -> None:
        import ipywidgets as w
        import plotly.graph_objects as go

        self.case = case
        self.tier: HostTier | None = tier
        wide: dict[str, Any] = {"style": {"description_width": "150px"}, "layout": {"width": "420px"}}
        size = tier.size_gb or 0
        self.controls: dict[str, Any] = {
            "mode": w.ToggleButtons(options=("ratio", "size"), value="size" if size else "ratio", description="set by"),
            "ratio": w.FloatSlider(
                min=0.5,
                max=max(20.0, tier.ratio),
                step=0.1,
                value=round(tier.ratio, 1),
                description="--hicache-ratio",
                **wide,
            ),
            "size": w.IntSlider(
                min=1, max=max(400, size), value=size or 48, description="--hicache-size (GB a rank)", **wide
            ),
            "device": w.BoundedIntText(
                min=1, max=10**9, step=1000, value=case.device_tokens, description="device tokens a rank", **wide
            ),
            "policy": w.Dropdown(
                options=[str(policy) for policy in (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK)],
                value=str(case.policy) if case.policy is WritePolicy.WRITE_BACK else str(WritePolicy.WRITE_THROUGH),
                description="write policy",
                **wide,
            ),
        }
        self.words = w.HTML()
        # a FigureWidget must be built from a complete figure: traces added later stay invisible in the browser
        self._shown = cost_benefit_data(case, tier)
        self.figure: Any = go.FigureWidget(cost_benefit_figure(self._shown, theme))
        self._say(tier)
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self.box: Any = w.VBox([*self.controls.values(), self.figure, self.words])

    def _changed(self, _change: Mapping[str, Any]) -> None:
        controls = self.controls
        device = controls["device"].value
        if device != self.case.device_tokens:
            question = replace(self.case.question, device=replace(self.case.question.device, tokens=device))
            self.case = replace(self.case, question=question)
        self.case = self._under(WritePolicy.parse(controls["policy"].value))
        try:
            if controls["mode"].value == "ratio":
                self.tier = host_tier(self.case.question, ratio=controls["ratio"].value)
            else:
                self.tier = host_tier(self.case.question, size_gb=controls["size"].value)
        except HicacheLabError as error:
            self.tier = None
            self.words.value = f"<p>{escape(str(error))}</p>"
            return
        data = cost_benefit_data(self.case, self.tier)
        with self.figure.batch_update():
            apply_cost_benefit(self.figure, data, self._shown)
        self._shown = data
        self._say(self.tier)

    def _under(self, policy: WritePolicy) -> CostBenefit:
        if policy is self.case.policy:
            return self.case
        changed = replace(self.case, policy=policy)
        for known in ("safe", "host_bytes_per_token"):  # the write policy changes neither
            if known in self.case.__dict__:
                changed.__dict__[known] = self.case.__dict__[known]
        return changed

    def _say(self, tier: HostTier) -> None:
        case = self.case
        rate = case.rate(tier.tokens)
        self.words.value = (
            f"<p><b>{escape(tier.label)}</b>: {tier.tokens:,} tokens, {gb(tier.per_rank_bytes):,.1f} GB a rank, "
            f"{gb(tier.allocated_host_bytes):,.1f} GB on the host, <b>{escape(tier.verdict)}</b>. "
            f"Hit rate {100 * rate:.2f} %, "
            f"{100 * (rate - case.device_rate):.2f} points from the host tier (simulated, exact block LRU).</p>"
        )

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Shown as the last line of a cell."""
        return self.box._repr_mimebundle_(**options)
