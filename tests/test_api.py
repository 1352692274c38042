"""The door: what ``import hicache_lab as hl`` offers, what it costs, and what comes back."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

import hicache_lab as hl
from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.resources import data_dir
from hicache_lab.base.units import GB
from hicache_lab.cli import main
from hicache_lab.preflight import advise, ask, assess

FUNCTIONS = "plan preflight largest read_log diagnose read_trace hit_curve simulate compare models releases".split()
HOST = {"host_ram": "449GB", "available": "445GB"}
LAUNCH = {"tp_size": 8, "device_tokens": 116_000, **HOST}
LINE = "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp-size 8 --enable-hierarchical-cache"
INCIDENT = data_dir() / "incidents" / "kimi-k25-hicache-300"
SWEEP = data_dir() / "sweeps" / "before-after"


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    """One of everything that the door returns."""
    trace = hl.read_trace("multi_turn", sessions=20, seed=1)
    answer = hl.plan("kimi-k2.5", "0.5.8", hicache_size=300, **LAUNCH)
    return {
        "plan": answer,
        "preflight": hl.preflight(f"{LINE} --hicache-size 300", "0.5.8", device_tokens=116_000, **HOST),
        "largest": hl.largest("kimi-k2.5", "0.5.8", **LAUNCH),
        "read_log": hl.read_log(INCIDENT / "server.log"),
        "diagnose": hl.diagnose(INCIDENT),
        "read_trace": trace,
        "hit_curve": hl.hit_curve(trace),
        "simulate": hl.simulate(trace, hl.plan("kimi-k2.5", "0.5.8", hicache_ratio=2.5, page_size=64, **LAUNCH)),
        "compare": hl.compare(SWEEP),
        "models": hl.models(),
        "releases": hl.releases(),
    }


def test_the_door_names_what_it_offers() -> None:
    assert set(FUNCTIONS) <= set(hl.__all__) <= set(dir(hl))
    for name in hl.__all__:
        assert getattr(hl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'plane'"):
        hl.plane  # noqa: B018


def test_preflight_is_the_function_and_the_wing() -> None:

    assert sys.modules["hicache_lab.preflight"].assess is assess
    assert callable(hl.preflight)
    assert hl.preflight.__module__ == "hicache_lab.api"


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import hicache_lab; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("hicache_lab")} == {"hicache_lab"}
    assert {name.split(".")[0] for name in loaded} <= {"hicache_lab", *sys.stdlib_module_names}
    assert not loaded & {"asyncio", "argparse", "email", "http", "inspect", "json", "logging", "urllib"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_record_says_in_one_line_what_it_is(records: dict[str, Any], name: str) -> None:
    text = repr(records[name])
    assert "\n" not in text
    assert len(text) <= 200, text


def test_what_an_answer_holds_is_one_line_too(records: dict[str, Any]) -> None:
    question = records["plan"].question
    for part in (question, question.config, question.geometry):
        assert len(repr(part)) <= 200


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_record_is_shown_as_a_table_or_a_block(records: dict[str, Any], name: str) -> None:
    text = records[name]._repr_markdown_()
    assert text.startswith(("| ", "```text\n"))
    assert len(text.splitlines()) >= 3


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("models", "releases")])
def test_a_record_leads_on(records: dict[str, Any], name: str) -> None:
    record = records[name]
    assert json.loads(json.dumps(record.to_dict(), default=str))
    if name == "simulate":
        with pytest.raises(UsageError, match="curve of its trace"):
            record.plot()
    else:
        assert isinstance(record.plot(theme="dark"), go.Figure)


def test_plan_is_the_wings_answer_and_its_advice(records: dict[str, Any]) -> None:
    question = ask("kimi-k2.5", "0.5.8", hicache_size=300, **LAUNCH)
    answer = records["plan"]
    assert answer == assess(question)
    assert answer.advice == advise(question) == records["largest"] == hl.largest(answer.question)
    assert list(answer.pools["pool"]) == ["kv"]
    assert answer.pools["taken on the host (GB)"].sum() == 2400


@pytest.mark.parametrize("flags", [{}, {"hicache_size": 300}, {"hicache_ratio": 2.5}])
def test_the_door_gives_what_the_command_prints(capsys: pytest.CaptureFixture[str], flags: dict[str, Any]) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (LAUNCH | flags).items()]
    main(["plan", "--json", "--model=kimi-k2.5", "--sglang-version=0.5.8", *words])
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("launch_notes") == []
    assert hl.plan("kimi-k2.5", "0.5.8", **LAUNCH, **flags).to_dict() == printed


def test_a_question_that_was_asked_is_asked_again_on_every_release(records: dict[str, Any]) -> None:
    answer = records["plan"]
    assert hl.plan(answer.question) == answer
    with pytest.raises(UsageError, match="tp_size: the question has its own facts"):
        hl.plan(answer.question, tp_size=4)
    across = hl.across_releases(answer.question)
    assert across["0.5.8"].verdict == "OOM_RISK"
    assert across["0.5.19"].verdict == "REFUSED"
    assert "do: --hicache-size 48" in hl.explain(answer, answer.advice)


def test_preflight_reads_a_line_words_and_a_file(tmp_path: Path, records: dict[str, Any]) -> None:
    facts = {"device_tokens": 116_000, **HOST}
    line = f"{LINE} --hicache-size 300"
    file = tmp_path / "launch.sh"
    file.write_text(line)
    for launch in (line.split(), file, str(file)):
        assert hl.preflight(launch, "0.5.8", **facts).to_dict() == records["preflight"].to_dict()
    with pytest.raises(InputError, match="give a launch line"):
        hl.preflight(tmp_path / "nothing", "0.5.8")


def test_preflight_counts_the_limit_of_the_container_that_the_launch_starts() -> None:
    answer = hl.preflight(
        f"docker run --memory 300g lmsysorg/sglang:v0.5.8 {LINE} --hicache-size 48", device_tokens=116_000, **HOST
    )
    assert answer.verdict == "OOM_RISK"
    assert answer.advice.size_gb is not None
    assert (
        hl.plan("kimi-k2.5", "0.5.8", hicache_size=answer.advice.size_gb, cgroup_limit="300GiB", **LAUNCH).verdict
        == "FITS"
    )


def test_this_host_is_measured() -> None:
    answer = hl.preflight(f"{LINE} --hicache-size 1", "0.5.8", this_host=True, device_tokens=1000)
    assert answer.question.host is not None
    assert answer.question.host.total_bytes > 0


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(UsageError, match="did you mean hicache_size"):
        hl.plan("kimi-k2.5", "0.5.8", hicache_sizes=48)
    with pytest.raises(UsageError, match="host's memory is not known"):
        hl.plan("kimi-k2.5", "0.5.8", tp_size=8, hicache_size=48).plot()
    with pytest.raises(UsageError, match="device_tokens and host_tokens"):
        hl.simulate(hl.read_trace("multi_turn", sessions=5), device_tokens=1000)
    with pytest.raises(UsageError, match="hots_tokens"):
        hl.simulate(hl.read_trace("multi_turn", sessions=5), device_tokens=1000, host_tokens=1, hots_tokens=1)
    unsized = hl.largest("kimi-k2.5", "0.5.8", tp_size=8)
    assert "not known" in unsized._repr_markdown_()
    with pytest.raises(UsageError, match="not known"):
        unsized.plot()


def test_the_incident_is_diagnosed_from_its_folder(records: dict[str, Any]) -> None:
    assert records["diagnose"].first.cause == "per_rank_size"
    shown = records["diagnose"]._repr_markdown_()
    assert "| per_rank_size | cause, high |" in shown
    assert "server.log:1 |" in shown


def test_diagnose_takes_the_facts_that_the_files_do_not_tell(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text((INCIDENT / "server.log").read_text())
    stated = hl.diagnose(log, **HOST, sglang_version="0.5.8", overhead="40GB").facts.stated
    assert (stated.host_ram_bytes, stated.available_bytes) == (449 * GB, 445 * GB)
    assert (stated.overhead_bytes, stated.release) == (40 * GB, "0.5.8")
    with pytest.raises(UsageError, match="host_rams: not a fact of an incident"):
        hl.diagnose(log, host_rams="449GB")
    with pytest.raises(UsageError, match="with a unit"):
        hl.diagnose(log, host_ram="449")


def test_text_from_outside_is_no_markup(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(
        (INCIDENT / "server.log").read_text().replace("Kimi-K2.5", "<img src=x onerror=alert(1)>|[a](http://b)```")
    )
    for record in (hl.diagnose(log), hl.read_log(log)):
        text = record._repr_markdown_()
        outside_fence = "" if text.startswith("```") else text
        assert "<img" not in outside_fence
        assert "](http" not in outside_fence
    fence = hl.read_log(log)._repr_markdown_().splitlines()[0]
    assert fence.startswith("````"), "the fence is longer than any in the text"


def test_models_and_releases_are_tables(records: dict[str, Any]) -> None:
    assert "Kimi-K2.5" in set(records["models"].frame["model"])
    assert {"0.5.19"} <= {row["from release"] for row in records["releases"]}
    one = hl.releases("0.5.8").frame
    assert list(one.columns) == ["question", "SGLang 0.5.8", "since"]


def test_one_accepted_verdict_may_be_a_text_and_an_unknown_one_is_named() -> None:
    facts = {"tp_size": 8, "device_tokens": 116_000, "host_ram": "449GB", "available": "445GB"}
    assert hl.largest("kimi-k2.5", "0.5.8", accepted="FITS", **facts).size_gb == 48
    with pytest.raises(UsageError, match=r"accepted: expected a tuple of FITS, TIGHT.*got \('FIT',\)"):
        hl.largest("kimi-k2.5", "0.5.8", accepted=("FIT",), **facts)


def test_a_curve_counts_blocks_or_tokens() -> None:
    with pytest.raises(UsageError, match="count: expected blocks or tokens, got 'foo'"):
        hl.hit_curve(hl.read_trace("multi_turn"), count="foo")


def test_a_repr_stays_one_line_whatever_a_name_holds() -> None:
    inline = {"name": "a\nb\x1b[31m", "kind": "gqa", "num_hidden_layers": 2, "num_key_value_heads": 8, "head_dim": 128}
    answer = hl.plan(inline, "0.5.8", tp_size=1, device_tokens=1000, hicache_size=1, host_ram="64GB")
    for record in (answer, answer.question, answer.question.geometry, answer.question.config):
        assert repr(record).isprintable()


FACTS = {"tp_size": 8, "hicache_size": 48, **HOST}
WRONG: dict[str, Any] = {
    "plan with a container": lambda answer: hl.plan("kimi-k2.5", "0.5.8", host="x", **FACTS),
    "plan with a config": lambda answer: hl.plan("kimi-k2.5", "0.5.8", config=answer.question.config, **FACTS),
    "largest with a config": lambda answer: hl.largest("kimi-k2.5", "0.5.8", config="x", **FACTS),
    "preflight with a config": lambda answer: hl.preflight(LINE, "0.5.8", config="x", **HOST),
    "preflight with overrides": lambda answer: hl.preflight(LINE, "0.5.8", geometry_overrides={}, **HOST),
    "preflight of nothing": lambda answer: hl.preflight(None),
    "preflight of no words": lambda answer: hl.preflight([]),
    "preflight of a number": lambda answer: hl.preflight(["sglang", 8]),
    "across releases of a name": lambda answer: hl.across_releases("kimi-k2.5"),
    "read_log of nothing": lambda answer: hl.read_log([]),
    "read_log of None": lambda answer: hl.read_log(None),
    "diagnose of nothing": lambda answer: hl.diagnose([]),
    "compare of nothing": lambda answer: hl.compare([]),
    "warm-up in words": lambda answer: hl.hit_curve("multi_turn", warm_up="x"),
    "warm-up of everything": lambda answer: hl.hit_curve("multi_turn", warm_up=1),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_what_the_door_does_not_take_is_a_usage_error(records: dict[str, Any], call: Any) -> None:
    with pytest.raises(UsageError):
        call(records["plan"])


@pytest.mark.parametrize(
    ("fact", "value"), [("tp_size", "x"), ("tp_size", -8), ("tp_size", 0), ("device_tokens", -1), ("mamba_slots", "x")]
)
def test_a_number_that_cannot_be_meant_is_refused_by_every_function(fact: str, value: object) -> None:
    option = "--" + fact.replace("_", "-")
    with pytest.raises(UsageError, match=option):
        hl.diagnose(INCIDENT, **{fact: value})
    with pytest.raises(UsageError, match=option):
        hl.plan("kimi-k2.5", "0.5.8", **{fact: value})


def test_the_command_refuses_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(INCIDENT), "--tp-size=-8"]) == 2
    assert "--tp-size: expected at least 1, got -8" in capsys.readouterr().err


def test_a_flag_that_plan_sets_by_itself_may_be_given() -> None:
    assert hl.plan("kimi-k2.5", "0.5.8", enable_hierarchical_cache=True, **FACTS) == hl.plan(
        "kimi-k2.5", "0.5.8", **FACTS
    )
    assert hl.plan("kimi-k2.5", "0.5.8", enable_hierarchical_cache=False, **FACTS).host_bytes == 0
    with pytest.raises(UsageError, match="--tp-size: expected a whole number"):
        hl.plan("kimi-k2.5", "0.5.8", tp_size="8")


def test_an_answer_stands_for_its_question(records: dict[str, Any]) -> None:
    answer = records["plan"]
    assert hl.plan(answer) == answer
    assert hl.largest(answer) == answer.advice
    assert hl.across_releases(answer) == hl.across_releases(answer.question)
    with pytest.raises(UsageError, match="tp_size: the question has its own facts"):
        hl.largest(answer, tp_size=4)


def test_preflight_takes_the_model_that_the_line_does_not_tell(records: dict[str, Any]) -> None:
    line = f"{LINE} --hicache-size 300".replace("moonshotai/Kimi-K2.5", "/models/m")
    answer = hl.preflight(line, "0.5.8", model="kimi-k2.5", device_tokens=116_000, **HOST)
    assert answer.host_bytes == records["preflight"].host_bytes


LACKING = {
    "pandas": "answer.pools, hl.models().frame",
    "plotly": "answer.plot()",
    "pyarrow": "hl.read_trace('mooncake_conversation')",
}


@pytest.mark.parametrize("package", LACKING)
def test_a_package_that_is_not_installed_is_named_as_on_the_command_line(package: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
import hicache_lab as hl
from hicache_lab.base.errors import HostError
answer = hl.plan("kimi-k2.5", "0.5.8", hicache_size=48, tp_size=8, host_ram="449GB")
for expression in {LACKING[package].split(", ")!r}:
    try:
        eval(expression)
    except HostError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = (
        f"needs the package {package}, which is not installed; `pip install hicache-lab` brings it and all others, "
    )
    assert done.stdout.splitlines() == [f"{expected}`pip install {package}` it alone"] * len(
        LACKING[package].split(", ")
    )
