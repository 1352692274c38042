"""Whoever asks, the answer is one: commands, notebooks and the widget get the same verdict and the same numbers."""

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from synthetic_log import server_log

import hicache_lab as hl
from hicache_lab.base.units import GB, GIB, parse_bytes
from hicache_lab.cli import main
from hicache_lab.forensics.cases import case_conclusion
from hicache_lab.preflight import Advice, Answer, advise, ask, assess, explain, with_ratio, with_size
from hicache_lab.preflight.record import answer_record
from hicache_lab.sglang.launch import parse_launch
from hicache_lab.views.report import postmortem
from hicache_lab.views.widgets import Tuner, TunerSettings

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
COMPARED = (
    "verdict",
    "per_rank_bytes",
    "host_bytes",
    "allocated_host_bytes",
    "limit_bytes",
    "available_bytes",
    "margin_bytes",
    "guaranteed_start_per_rank_bytes",
    "orders",
    "message",
    "advice",
)
WRAPPERS = {
    "bare": "{line}",
    "docker": "docker run --gpus all --memory {limit} lmsysorg/sglang:v{release} {line}",
    "kubernetes": """apiVersion: v1
kind: Pod
metadata: {{name: kv}}
spec:
  containers:
  - name: server
    image: lmsysorg/sglang:v{release}
    command: ["bash", "-lc"]
    args: ["{line}"]
    resources: {{limits: {{memory: {limit}}}}}
""",
    "compose": """services:
  server:
    image: lmsysorg/sglang:v{release}
    command: {line}
    mem_limit: {limit}
""",
    "slurm": "srun --mem={limit} {line}",
}


@dataclass(frozen=True)
class Launch:
    """One launch on one host; amounts in GB (1e9), ``limit`` as the wrapper writes it and in bytes."""

    model: str = "kimi-k2.5"
    release: str = "0.5.8"
    flags: dict[str, Any] = field(default_factory=dict)
    tokens: int = 116_000
    ram: int = 1500
    used: int = 0
    overhead: int = 60
    hugepages: int = 0
    wrapper: str = "bare"
    limit: tuple[str, int] | None = None
    usage: int = 0

    @property
    def flag_words(self) -> list[str]:
        return [word for name, value in self.flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    @property
    def text(self) -> str:
        line = " ".join(
            ["python -m sglang.launch_server --model-path", self.model, "--enable-hierarchical-cache", *self.flag_words]
        )
        return WRAPPERS[self.wrapper].format(line=line, release=self.release, limit=self.limit and self.limit[0])

    @property
    def host_facts(self) -> dict[str, str]:
        facts = {
            "host_ram": f"{self.ram}GB",
            "available": f"{self.ram - self.used - self.hugepages}GB",
            "overhead": f"{self.overhead}GB",
        }
        if self.hugepages:
            facts["hugepages"] = f"{self.hugepages}GB"
        if self.usage:
            facts["cgroup_usage"] = f"{self.usage}GB"
        return facts

    @property
    def facts(self) -> dict[str, str]:
        """The host with the container's limit stated beside it, for doors that see no launch text."""
        return {**self.host_facts, **({"cgroup_limit": f"{self.limit[1]}B"} if self.limit else {})}

    @property
    def settings(self) -> TunerSettings:
        mode = "size" if "hicache_size" in self.flags else "ratio" if "hicache_ratio" in self.flags else "auto"
        return TunerSettings(
            model=self.model,
            sglang_version=self.release,
            device_tokens=self.tokens,
            host_ram_gb=self.ram,
            used_gb=self.used,
            overhead_gb=self.overhead,
            hugepages_gb=self.hugepages,
            cgroup_limit_gb=self.limit[1] / GB if self.limit else 0.0,
            cgroup_usage_gb=self.usage,
            mode=mode,  # type: ignore[arg-type]
            **{"tp_size": 1, "page_size": 1, **self.flags},
        )


GI_1000 = ("1000Gi", 1000 * GIB)
LAUNCHES = {
    "size over the manifest's limit": Launch(
        flags={"tp_size": 8, "hicache_size": 140}, wrapper="kubernetes", limit=GI_1000
    ),
    "ratio over the manifest's limit": Launch(
        flags={"tp_size": 8, "hicache_ratio": 20.0}, wrapper="kubernetes", limit=GI_1000
    ),
    "size far over the manifest's limit": Launch(
        flags={"tp_size": 8, "hicache_size": 300}, wrapper="kubernetes", limit=GI_1000
    ),
    "docker --memory": Launch(flags={"tp_size": 8, "hicache_size": 140}, wrapper="docker", limit=("1000g", 1000 * GIB)),
    "docker --memory, limit not reached": Launch(
        flags={"tp_size": 8, "hicache_size": 100}, wrapper="docker", limit=("1000g", 1000 * GIB)
    ),
    "docker --memory, half of it used": Launch(
        flags={"tp_size": 8, "hicache_size": 100}, wrapper="docker", limit=("1000g", 1000 * GIB), usage=500
    ),
    "docker on a release that reads the container": Launch(
        release="0.5.22", flags={"tp_size": 8, "hicache_size": 100}, wrapper="docker", limit=("900g", 900 * GIB)
    ),
    "auto-size in a container": Launch(
        release="0.5.22", flags={"tp_size": 8}, wrapper="docker", limit=("300g", 300 * GIB)
    ),
    "compose": Launch(flags={"tp_size": 4, "hicache_size": 60}, ram=512, wrapper="compose", limit=("256g", 256 * GIB)),
    "slurm": Launch(flags={"tp_size": 4, "hicache_size": 48}, ram=1000, wrapper="slurm", limit=("200G", 200 * GIB)),
    "the incident": Launch(flags={"tp_size": 8, "hicache_size": 300}, ram=449, used=4, overhead=0),
    "the incident's remedy": Launch(flags={"tp_size": 8, "hicache_size": 48}, ram=449, used=4, overhead=40),
    "a race on 0.5.19": Launch(release="0.5.19", flags={"tp_size": 8, "hicache_size": 48}, ram=449, used=4, overhead=0),
    "pinned power of two": Launch(
        model="llama-3.1-70b", release="0.5.2", flags={"tp_size": 8, "hicache_size": 48}, ram=600, overhead=20
    ),
    "huge pages": Launch(flags={"tp_size": 8, "hicache_size": 60}, ram=1000, hugepages=500, overhead=40),
    "an indexer on top": Launch(
        model="deepseek-v3.2", release="0.5.12", flags={"tp_size": 8, "hicache_size": 54}, ram=449, used=4, overhead=0
    ),
    "two pools": Launch(
        model="qwen3-next-80b-a3b", release="0.5.17", flags={"tp_size": 2, "hicache_size": 50}, ram=256, overhead=10
    ),
    "pipeline stages": Launch(
        model="deepseek-v3", release="0.5.16", flags={"tp_size": 4, "pp_size": 2, "hicache_size": 40}, ram=512
    ),
    "data-parallel replicas": Launch(
        model="llama-3.1-8b", flags={"tp_size": 1, "dp_size": 4, "hicache_ratio": 3.0}, tokens=400_000, ram=512
    ),
    "a ratio too small": Launch(
        model="qwen3-32b", flags={"tp_size": 2, "hicache_ratio": 0.8, "page_size": 64}, ram=256, overhead=20
    ),
}


@cache
def _code_cells(name: str) -> list[str]:
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_notebook(name: str, until: str, **parameters: Any) -> dict[str, Any]:
    """The names after running a notebook's own cells, its parameters replaced, until it has worked one out."""
    space: dict[str, Any] = {}
    first, *cells = _code_cells(name)
    exec(first, space)
    assert parameters.keys() <= space.keys(), f"{name} has no parameter {parameters.keys() - space.keys()}"
    space |= parameters
    for cell in cells:
        exec(cell, space)
        if until in space:
            return space
    raise AssertionError(f"{name} never sets {until}")


def compared(answer: Answer, advice: Advice | None) -> dict[str, Any]:
    record = answer_record(answer, advice)
    return {name: record[name] for name in COMPARED}


@cache
def expected(name: str) -> dict[str, Any]:
    """The answer of the library to the pasted text."""
    launch = LAUNCHES[name]
    question = ask(sglang_version=launch.release, config=launch.text, device_tokens=launch.tokens, **launch.host_facts)
    return compared(assess(question), advise(question))


def command(capsys: pytest.CaptureFixture[str], words: list[str]) -> dict[str, Any]:
    main([*words, "--json"] if "--" not in words else words)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def options(facts: dict[str, Any]) -> list[str]:
    return [word for name, value in facts.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize("name", LAUNCHES)
def test_preflight_and_plan_agree(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    launch = LAUNCHES[name]
    tokens = ["--sglang-version", launch.release, "--device-tokens", str(launch.tokens)]
    pasted = command(capsys, ["preflight", *tokens, "--json", *options(launch.host_facts), "--", launch.text])
    typed = command(capsys, ["plan", "--model", launch.model, *tokens, *options(launch.facts), *launch.flag_words])
    assert {key: pasted[key] for key in COMPARED} == expected(name)
    assert {key: typed[key] for key in COMPARED} == expected(name)


@pytest.mark.parametrize("name", LAUNCHES)
def test_max_recommends_the_same(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    launch = LAUNCHES[name]
    words = ["max", "--model", launch.model, "--sglang-version", launch.release, *options(launch.facts)]
    found = command(capsys, [*words, "--device-tokens", str(launch.tokens), *launch.flag_words])["comfortable"]
    assert {key: found[key] for key in expected(name)["advice"]} == expected(name)["advice"]


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_preflight_notebook_agrees(name: str) -> None:
    launch = LAUNCHES[name]
    space = run_notebook(
        "04_preflight.ipynb",
        "advice",
        launch=launch.text,
        sglang_version=launch.release,
        device_tokens=launch.tokens,
        **launch.host_facts,
    )
    assert compared(space["answer"], space["advice"]) == expected(name)


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_tuner_and_its_notebook_agree(name: str) -> None:
    settings = LAUNCHES[name].settings
    tuner = Tuner(settings)
    assert tuner.answer is not None
    assert compared(tuner.answer, advise(tuner.answer.question)) == expected(name)
    space = run_notebook("03_tuner.ipynb", "advice", **vars(settings))
    assert compared(space["answer"], space["advice"]) == expected(name)


@pytest.mark.parametrize(
    "name",
    [name for name, launch in LAUNCHES.items() if not {"pp_size", "dp_size", "kv_cache_dtype"} & set(launch.flags)],
)
def test_the_cost_benefit_notebook_agrees(name: str) -> None:
    settings = vars(LAUNCHES[name].settings)
    unused = ("pp_size", "dp_size", "kv_cache_dtype", "mode", "hicache_size", "hicache_ratio")
    stated = {field: value for field, value in settings.items() if field not in unused}
    question = run_notebook("05_is_it_worth_it.ipynb", "question", trace="cyclic_scan", **stated)["question"]
    assert compared(assess(question), advise(question))["advice"] == expected(name)["advice"]


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_log_of_the_launch_leads_to_the_same(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The server's log and what the user says of the host: diagnose and report name what plan and max name."""
    launch, log = LAUNCHES[name], tmp_path / "server.log"
    question = ask(launch.model, launch.release, device_tokens=launch.tokens, **launch.flags, **launch.facts)
    log.write_text(server_log(question))
    words = ["--sglang-version", launch.release, "--device-tokens", str(launch.tokens), *options(launch.facts)]
    stated = {f"{name}_bytes": parse_bytes(text, what=name) for name, text in launch.facts.items()}
    post = postmortem(log, release=launch.release, device_tokens=launch.tokens, **stated)
    assert post.answer is not None, post.why_no_answer
    assert compared(post.answer, post.advice) == expected(name)
    said = [finding["remedy"] for finding in command(capsys, ["diagnose", str(log), *words])["findings"]]
    size, ratio = expected(name)["advice"]["hicache_size_gb"], expected(name)["advice"]["hicache_ratio"]
    for remedy in (remedy for remedy in said if remedy.startswith("--hicache-size")):
        assert remedy.startswith(f"--hicache-size {size} (")
        assert f" or --hicache-ratio {ratio:g} (" in remedy


@pytest.mark.parametrize("name", ["the incident", "the incident's remedy", "docker --memory", "pinned power of two"])
def test_the_notebook_about_flags_agrees(name: str) -> None:
    launch = LAUNCHES[name]
    size = launch.flags["hicache_size"]
    space = run_notebook(
        "02_what_the_flags_mean.ipynb",
        "by_size",
        model=launch.model,
        sglang_version=launch.release,
        tp_size=launch.flags["tp_size"],
        device_tokens=launch.tokens,
        hicache_size_gb=size,
        **{name: value for name, value in launch.facts.items() if name != "overhead"},
    )
    stated = {name: value for name, value in launch.facts.items() if name != "overhead"}
    question = ask(launch.model, launch.release, device_tokens=launch.tokens, **launch.flags, **stated)
    assert compared(space["by_size"], None) == compared(assess(question), None)


def test_the_notebook_about_the_incident_recommends_one_thing() -> None:
    """Section 3 and the conclusion name the same settings, and the report on the incident names them too."""
    space = run_notebook("01_incident.ipynb", "recommended")
    case, setting = space["case"], space["recommended"]
    text = case_conclusion(case)
    assert f"**Set** `--hicache-size {setting.size_gb}`" in text
    assert f"do: --hicache-size {setting.size_gb} (" in explain(space["answer"], setting)
    post = postmortem(case.id)
    assert post.diagnosis.first is not None
    assert post.diagnosis.first.remedy.startswith(f"--hicache-size {setting.size_gb} (")
    question = case.question(with_overhead=True)
    for flag, number in re.findall(r"--hicache-(size|ratio) ([\d.]+)", text):
        asked = with_size(question, int(number)) if flag == "size" else with_ratio(question, float(number))
        assert assess(asked).verdict in ("FITS", "TIGHT")


def test_the_manifest_of_the_newcomer() -> None:
    """limits.memory 1000Gi on a host of 1.5 TB: the notebook said FITS, 153 a rank; the limit allows 111."""
    found = expected("size over the manifest's limit")
    assert found["verdict"] == "OOM_RISK"
    assert found["limit_bytes"] == 1000 * GIB - 60 * GB
    assert found["advice"]["hicache_size_gb"] == 111


def test_this_machine_is_one_host_to_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured facts move between two readings; what does not move is the smaller of all limits."""
    line = "docker run --memory 12g lmsysorg/sglang:v0.5.8 python -m sglang.launch_server --model-path llama-3.1-8b "
    line += "--enable-hierarchical-cache --hicache-size 16"
    words = ["preflight", "--this-host", "--json", "--device-tokens", "50000", "--overhead", "1GB", "--", line]
    pasted = command(capsys, words)
    space = run_notebook(
        "04_preflight.ipynb",
        "advice",
        launch=line,
        sglang_version="0.5.8",
        device_tokens=50_000,
        overhead="1GB",
        host_ram="",
    )
    noted = answer_record(space["answer"], space["advice"])
    for record in (pasted, noted):
        assert record["available_bytes"] <= 12 * GIB
        assert record["verdict"] in ("OOM_RISK", "REFUSED")
    assert parse_launch(line).container is not None
    assert space["question"].host.effective_total_bytes <= 12 * GIB
    assert pasted["host_bytes"] == noted["host_bytes"]


def test_curve_draws_the_safe_tier_of_a_container(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its largest safe tier is what ``max`` recommends, the container's limit counted."""
    launch = LAUNCHES["size over the manifest's limit"]
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 8, "hash_ids": [1, 2]}\n' * 3)
    words = ["curve", str(trace), "--model", launch.model, "--sglang-version", launch.release, "--tp-size", "8"]
    words += ["--device-tokens", str(launch.tokens), "--sizes-gb", "48", *options(launch.facts)]
    safe = command(capsys, words)["tiers"]["largest_safe"]
    advice = expected("size over the manifest's limit")["advice"]
    size, ratio = advice["hicache_size_gb"], advice["hicache_ratio"]
    assert safe["label"] in (f"--hicache-size {size}", f"--hicache-ratio {ratio:g}")


def test_a_line_without_a_host_tier_takes_nothing_in_every_door(capsys: pytest.CaptureFixture[str]) -> None:
    line = "python -m sglang.launch_server --model-path llama-3.1-8b --hicache-size 500"
    pasted = command(capsys, ["preflight", "--sglang-version", "0.5.8", "--host-ram", "64GB", "--json", "--", line])
    space = run_notebook("04_preflight.ipynb", "advice", launch=line, host_ram="64GB")
    for record in (pasted, answer_record(space["answer"], space["advice"])):
        assert (record["verdict"], record["host_bytes"], record["allocated_host_bytes"]) == ("FITS", 0, 0)
        assert "no host pool is built" in record["warnings"][0]
        assert record["advice"]["hicache_size_gb"] is None


def test_a_flag_that_the_release_refuses_is_refused_at_every_door(capsys: pytest.CaptureFixture[str]) -> None:
    """0.4.9 has no --hicache-io-backend: no size helps, and no line that keeps the flag is called corrected."""
    flags = "--tp-size 8 --hicache-size 100 --hicache-io-backend kernel"
    facts = ["--host-ram", "449GB", "--available", "445GB", "--device-tokens", "116000", "--json"]
    common = ["--sglang-version", "0.4.9", *facts]
    line = f"python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B --enable-hierarchical-cache {flags}"
    answers = []
    for argv in (
        ["plan", "--model", "llama-3.1-70b", *common, *flags.split()],
        ["preflight", *common, "--", *line.split()],
    ):
        assert main(argv) == 3
        answers.append(json.loads(capsys.readouterr().out))
    for record in answers:
        assert record["verdict"] == "REFUSED"
        assert "--hicache-io-backend" in record["message"]
        assert record.get("corrected_launch") is None
    answer = hl.plan(
        "llama-3.1-70b", "0.4.9", tp_size=8, hicache_size=100, hicache_io_backend="kernel", device_tokens=116_000,
        host_ram="449GB", available="445GB",
    )  # fmt: skip
    assert answer.verdict == "REFUSED"
    assert answer.advice.size_gb is answer.advice.ratio is None
    assert "do: correct or remove --hicache-io-backend first" in hl.explain(answer, answer.advice)


def test_the_layout_that_the_release_chose_is_not_written_into_a_line() -> None:
    answer = hl.plan("llama-3.1-70b", "0.4.6", tp_size=8, hicache_size=40, host_ram="128GB", available="120GB")
    assert answer.question.config.hicache_mem_layout is None
