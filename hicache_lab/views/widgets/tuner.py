"""The tuner: sliders for one launch, redrawn in place by the functions that the command line uses.

>>> tuner = Tuner(TunerSettings(model="kimi-k2.5"))   # in a notebook, the last line shows it
>>> tuner.controls["hicache_size"].value = 48
>>> tuner.answer.verdict
'TIGHT'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from html import escape
from typing import Any, Literal, TypeVar

from hicache_lab.base.errors import HicacheLabError
from hicache_lab.base.units import GB
from hicache_lab.preflight import Advice, Answer, Question, advise, ask, assess, explain
from hicache_lab.sglang.launch import render_launch
from hicache_lab.sglang.releases import VERIFIED
from hicache_lab.sizing.geometry import ModelGeometry, load_geometry
from hicache_lab.sizing.models import catalogue, find, is_known
from hicache_lab.views.figures import Theme, apply_tuner, tuner_data, tuner_figure, tuner_values

Mode = Literal["size", "ratio", "auto"]
_T = TypeVar("_T")

_DTYPES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")
_GROUPS = (1, 2, 4, 8, 16, 32)
_WIDTH = 940  # pixels: three columns of controls in a JupyterLab cell
_PAGES = (1, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class TunerSettings:
    """What the controls say; GB are 1e9 bytes, ``hicache_size`` is GB per rank.

    ``used_gb`` is host memory that is taken before the launch, ``overhead_gb`` what the server takes besides its
    pools; ``cgroup_limit_gb`` 0 is no container. ``mode`` says which of size and ratio is set; ``auto`` sets neither.
    """

    model: str = "kimi-k2.5"
    sglang_version: str = "0.5.8"
    tp_size: int = 8
    pp_size: int = 1
    dp_size: int = 1
    kv_cache_dtype: str = "auto"
    page_size: int = 1
    device_tokens: int = 116_000
    host_ram_gb: int = 449
    used_gb: int = 4
    overhead_gb: int = 40
    hugepages_gb: int = 0
    cgroup_limit_gb: float = 0.0
    cgroup_usage_gb: int = 0
    mode: Mode = "size"
    hicache_size: int = 48
    hicache_ratio: float = 2.5

    def question(self) -> Question:
        """The launch that these settings describe.

        Raises:
            HicacheLabError: a model or release that is not known, or numbers that contradict each other.
        """
        tier: dict[str, Any] = {}
        if self.mode == "size":
            tier["hicache_size"] = self.hicache_size
        elif self.mode == "ratio":
            tier["hicache_ratio"] = self.hicache_ratio
        return ask(
            _geometry(self.model),
            self.sglang_version,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            dp_size=self.dp_size,
            page_size=self.page_size,
            kv_cache_dtype=self.kv_cache_dtype,
            device_tokens=self.device_tokens,
            host_ram=self.host_ram_gb * GB,
            available=max(0, self.host_ram_gb - self.used_gb - self.hugepages_gb) * GB,
            hugepages=self.hugepages_gb * GB,
            cgroup_limit=round(self.cgroup_limit_gb * GB) or None,
            cgroup_usage=self.cgroup_usage_gb * GB if self.cgroup_limit_gb else None,
            overhead=self.overhead_gb * GB,
            **tier,
        )

    @property
    def without_tier(self) -> TunerSettings:
        """The same launch whatever size or ratio is set: what the advice depends on."""
        return replace(self, mode="auto", hicache_size=0, hicache_ratio=2.0)


@lru_cache(maxsize=128)
def _geometry(model: str) -> ModelGeometry:
    return load_geometry(model)


@lru_cache(maxsize=256)
def advice_for(settings: TunerSettings) -> Advice:
    """The largest settings of a launch; only asked again when something else than size or ratio has moved."""
    return advise(settings.question())


def judge(settings: TunerSettings) -> tuple[Answer, Advice]:
    """The verdict on the settings and the largest ones that fit."""
    return assess(settings.question()), advice_for(settings.without_tier)


def launch_line(answer: Answer) -> str:
    """The launch line that was judged, ready to paste; what is the default stays out.

    A repository whose checkpoint asks for an fp8 KV cache and a plain one of the same model take different room, and a
    question knows its model by the catalogue's name: what the checkpoint asked for is then written out.
    """
    config = answer.question.config
    checkpoint_dtype = answer.question.geometry.checkpoint_kv_dtype
    kv_cache_dtype = _unless(config.kv_cache_dtype, "auto")
    model = _hub_name(config.model or "")
    if checkpoint_dtype and kv_cache_dtype is None and is_known(model) and not find(model).asks_fp8_kv(model):
        kv_cache_dtype = checkpoint_dtype
    return render_launch(
        replace(
            config,
            model=model,
            pp_size=_unless(config.pp_size, 1),
            dp_size=_unless(config.dp_size, 1),
            page_size=_unless(config.page_size, 1),
            kv_cache_dtype=kv_cache_dtype,
        )
    )


def _unless(value: _T | None, default: _T) -> _T | None:
    return None if value == default else value


def _hub_name(name: str) -> str:
    return find(name).repository(name) if is_known(name) else name


class Tuner:
    """The controls, the figure, the verdict in words and the launch line.

    Attributes:
        controls: one ipywidgets control for each field of ``TunerSettings``.
        figure: the FigureWidget; updated in place.
        answer: the verdict on show, None while the settings describe no launch.
    """

    def __init__(self, settings: TunerSettings | None = None, theme: Theme = "light") -> None:
        import ipywidgets
        import plotly.graph_objects as go

        start = settings or TunerSettings()
        self.controls: dict[str, Any] = _controls(start)
        answer, advice = judge(start)
        self.answer: Answer | None = answer
        data = tuner_data(answer, advice)
        # a FigureWidget must be built from a complete figure: traces added later stay invisible in the browser
        self.figure: Any = go.FigureWidget(tuner_figure(data, theme).update_layout(width=_WIDTH))
        self._shown = tuner_values(data)
        self.words, self.line = ipywidgets.HTML(), ipywidgets.HTML()
        self._say(answer, advice)
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self._show_mode(start.mode)
        self.box: Any = self._box()

    @property
    def settings(self) -> TunerSettings:
        """What the controls say now."""
        return TunerSettings(**{field.name: self.controls[field.name].value for field in fields(TunerSettings)})

    def _changed(self, change: Mapping[str, Any]) -> None:
        settings = self.settings
        if change["owner"] is self.controls["mode"]:
            self._show_mode(settings.mode)
        try:
            answer, advice = judge(settings)
        except HicacheLabError as error:
            self.answer = None
            self.words.value = _block(f"no launch: {error}", "hicache-verdict")
            self.line.value = ""
            return
        self.answer = answer
        data = tuner_data(answer, advice)
        with self.figure.batch_update():
            self._shown = apply_tuner(self.figure, data, self._shown)
        self._say(answer, advice)

    def _say(self, answer: Answer, advice: Advice) -> None:
        self.words.value = _block(explain(answer, advice), "hicache-verdict")
        self.line.value = _block(launch_line(answer), "hicache-line")

    def _show_mode(self, mode: str) -> None:
        for name in ("size", "ratio"):
            self.controls[f"hicache_{name}"].layout.display = "" if mode == name else "none"

    def _box(self) -> Any:
        from ipywidgets import HBox, VBox

        names = list(self.controls)
        columns = [
            VBox([self.controls[name] for name in names[start : start + 6]]) for start in range(0, len(names), 6)
        ]
        return VBox([HBox(columns), self.figure, self.words, self.line])

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Shown as the last line of a cell."""
        return self.box._repr_mimebundle_(**options)


def _block(text: str, css_class: str) -> str:
    """Text as it is, whatever it holds; one click selects it for copying."""
    style = "white-space: pre-wrap; user-select: all; line-height: 1.35"
    return f'<pre class="{css_class}" style="{style}">{escape(text)}</pre>'


def _controls(start: TunerSettings) -> dict[str, Any]:
    """One control a field; a value outside the offered ones is offered too."""
    import ipywidgets as w

    model = find(start.model).name if is_known(start.model) else start.model
    buttons = {"description_width": "80px", "button_width": "68px"}
    wide: dict[str, Any] = {"style": {"description_width": "145px"}, "layout": {"width": "310px"}}

    def choice(text: str, options: Sequence[Any], value: Any) -> Any:
        offered = options if value in options else (*options, value)
        return w.Dropdown(options=offered, value=value, description=text, **wide)

    def whole(text: str, low: int, high: int, value: int, step: int = 1) -> Any:
        return w.IntSlider(
            min=min(low, value),
            max=max(high, value),
            step=step,
            value=value,
            description=text,
            continuous_update=True,
            **wide,
        )

    return {
        "model": choice("model", tuple(entry.name for entry in catalogue()), model),
        "sglang_version": choice("SGLang release", VERIFIED, start.sglang_version),
        "tp_size": choice("--tp-size", _GROUPS, start.tp_size),
        "pp_size": choice("--pp-size", _GROUPS, start.pp_size),
        "dp_size": choice("--dp-size", _GROUPS, start.dp_size),
        "kv_cache_dtype": choice("--kv-cache-dtype", _DTYPES, start.kv_cache_dtype),
        "page_size": choice("--page-size (tokens)", _PAGES, start.page_size),
        "device_tokens": w.BoundedIntText(
            min=1, max=10**9, step=1000, value=start.device_tokens, description="device tokens a rank", **wide
        ),
        "host_ram_gb": whole("host RAM (GB)", 16, 4096, start.host_ram_gb),
        "used_gb": whole("used before (GB)", 0, 512, start.used_gb),
        "overhead_gb": whole("server besides (GB)", 0, 512, start.overhead_gb),
        "hugepages_gb": whole("huge pages (GB)", 0, 2048, start.hugepages_gb),
        "cgroup_limit_gb": w.BoundedFloatText(
            min=0, max=10**6, step=1, value=start.cgroup_limit_gb, description="container limit (GB)", **wide
        ),
        "cgroup_usage_gb": whole("container uses (GB)", 0, 512, start.cgroup_usage_gb),
        "mode": w.ToggleButtons(
            options=("size", "ratio", "auto"), value=start.mode, description="host tier by", style=buttons
        ),
        "hicache_size": whole("--hicache-size (GB a rank)", 1, 512, start.hicache_size),
        "hicache_ratio": w.FloatSlider(
            min=0.5,
            max=20,
            step=0.1,
            value=start.hicache_ratio,
            description="--hicache-ratio",
            readout_format=".1f",
            **wide,
        ),
    }
