"""The tuner shows what the library computes; its controls are driven here without a kernel."""

from dataclasses import replace
from html import escape, unescape
from typing import Any

import pytest

from hicache_lab.preflight import ask, assess, explain
from hicache_lab.sglang.launch import parse_launch
from hicache_lab.sizing.models import catalogue
from hicache_lab.views.figures import tuner_data, tuner_figure
from hicache_lab.views.widgets import Tuner, TunerSettings
from hicache_lab.views.widgets.tuner import judge, launch_line

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ipywidgets")


def drawn(figure: Any) -> list[dict[str, Any]]:
    """The traces without the ids that a widget gives them."""
    return [{name: value for name, value in trace.items() if name != "uid"} for trace in figure.to_dict()["data"]]


@pytest.fixture
def tuner() -> Tuner:
    return Tuner()


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("hicache_size", 300, "OOM_RISK"),
        ("hicache_size", 43, "FITS"),
        ("hicache_size", 48, "TIGHT"),
        ("mode", "ratio", "FITS"),
        ("host_ram_gb", 1500, "FITS"),
        ("tp_size", 16, "OOM_RISK"),
        ("sglang_version", "0.5.19", "RACE"),
        ("device_tokens", 1_000_000, "ASSERT"),
    ],
)
def test_a_control_changes_bars_words_and_line(tuner: Tuner, name: str, value: Any, verdict: str) -> None:
    tuner.controls[name].value = value
    expected = replace(TunerSettings(model=tuner.settings.model), **{name: value})
    answer, advice = judge(expected)
    assert tuner.answer == answer
    assert answer.verdict == verdict
    assert escape(explain(answer, advice)) in tuner.words.value
    assert drawn(tuner.figure) == drawn(tuner_figure(tuner_data(answer, advice)))
    line = unescape(tuner.line.value.split(">")[1].split("<")[0])
    config = parse_launch(line)
    assert (config.hicache_size, config.tp_size) == (answer.question.config.hicache_size, expected.tp_size)
    assert config.model == "moonshotai/Kimi-K2.5"


def test_auto_sets_neither_flag(tuner: Tuner) -> None:
    tuner.controls["sglang_version"].value = "0.5.23"
    tuner.controls["mode"].value = "auto"
    assert tuner.answer is not None
    assert tuner.answer.auto is not None
    assert "--hicache-size" not in tuner.line.value
    assert "--hicache-ratio" not in tuner.line.value
    assert "--enable-hierarchical-cache" in tuner.line.value


def test_only_the_control_of_the_mode_is_shown(tuner: Tuner) -> None:
    tuner.controls["mode"].value = "ratio"
    assert tuner.controls["hicache_size"].layout.display == "none"
    assert tuner.controls["hicache_ratio"].layout.display == ""


def test_settings_that_are_no_launch_are_named_and_the_tuner_goes_on(tuner: Tuner) -> None:
    tuner.controls["overhead_gb"].value = 0
    tuner.controls["host_ram_gb"].value = 16
    tuner.controls["used_gb"].value = 512
    assert tuner.answer is not None
    tuner.controls["model"].value = "Jamba-v0.1" if "Jamba-v0.1" in tuner.controls["model"].options else "jamba-v0.1"
    assert "hicache-verdict" in tuner.words.value
    tuner.controls["model"].value = tuner.controls["model"].options[0]
    assert tuner.words.value


def test_a_start_outside_the_offered_values_is_kept() -> None:
    tuner = Tuner(TunerSettings(tp_size=6, hicache_size=900, sglang_version="0.5.10.post1"))
    assert tuner.settings.tp_size == 6
    assert tuner.settings.hicache_size == 900
    assert tuner.controls["hicache_size"].max == 900


def test_text_is_escaped() -> None:
    from hicache_lab.views.widgets.tuner import _block

    assert _block("<script>", "x").count("<script>") == 0


def test_every_model_and_release_can_be_chosen(tuner: Tuner) -> None:
    for name in ("model", "sglang_version"):
        for value in tuner.controls[name].options:
            tuner.controls[name].value = value
            assert "hicache-verdict" in tuner.words.value, value


@pytest.mark.parametrize("model", [name for entry in catalogue() for name in (entry.name, *entry.fp8_kv)])
def test_the_launch_line_describes_the_answer_it_stands_under(model: str) -> None:
    settings = TunerSettings(model, "0.5.17", tp_size=1, mode="ratio", hicache_ratio=2.5)
    answer, _ = judge(settings)
    again = assess(ask(None, "0.5.17", config=launch_line(answer), device_tokens=116_000))
    assert again.per_rank_bytes == answer.per_rank_bytes
