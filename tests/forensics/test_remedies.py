"""Whatever a diagnosis, a report or a corrected line recommends, preflight accepts: models × releases × hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_log import server_log

from hicache_lab.base.errors import HicacheLabError
from hicache_lab.base.units import GB
from hicache_lab.cli import main
from hicache_lab.forensics.incident import Diagnosis, diagnose, gather, question
from hicache_lab.preflight import Question, advise, ask, assess, with_ratio, with_size
from hicache_lab.sglang.launch import parse_launch
from hicache_lab.views.report import postmortem, to_document

MODELS = "kimi-k2.5 llama-3.1-70b deepseek-v3.2 qwen3-32b qwen3-next-80b-a3b gpt-oss-120b deepseek-v4-flash".split()
RELEASES = "0.4.5 0.4.6 0.4.9 0.5.2 0.5.4 0.5.5 0.5.8 0.5.12 0.5.14 0.5.17 0.5.18 0.5.19 0.5.21 0.5.23".split()
ACCEPTED = ("FITS", "TIGHT")


def named_settings(text: str) -> list[tuple[str, float]]:
    """Every size and ratio that a text names with its flag."""
    pairs = re.findall(r"--hicache-(size|ratio) (\d+(?:\.\d+)?)", text)
    return [(flag, float(number)) for flag, number in pairs]


def verdict(question: Question, flag: str, number: float) -> str:
    return assess(with_size(question, int(number)) if flag == "size" else with_ratio(question, number)).verdict


def check(question: Question, text: str) -> int:
    """Every setting in a text is accepted; how many there are."""
    found = named_settings(text)
    for flag, number in found:
        assert verdict(question, flag, number) in ACCEPTED, (flag, number, question.rules.version, text)
    return len(found)


def remedies(diagnosis: Diagnosis) -> str:
    return "\n".join(finding.remedy for finding in diagnosis.findings)


def launch(model: str, release: str, ram: int, used: int, **flags: Any) -> Question:
    if "qwen3-next" in model:
        flags = {**flags, "mamba_slots": 300}
    if "gpt-oss" in model:
        flags = {**flags, "swa_device_tokens": 50_000}
    facts = {"tp_size": 8, "device_tokens": 116_000, "host_ram": f"{ram}GB", "available": f"{ram - used}GB"}
    return ask(model, release, **{**facts, **flags})


@pytest.mark.parametrize(
    ("model", "release", "size", "bound", "ratio"),
    [
        ("llama-3.1-70b", "0.5.2", 34, 34, 7.2),
        ("llama-3.1-70b", "0.5.0rc1", 34, 34, 7.2),
        ("deepseek-v3.2", "0.5.12", 43, 48, 5.3),
        ("deepseek-v3.2", "0.5.13", 43, 48, 5.3),
        ("kimi-k2.5", "0.5.8", 48, 54, 5.9),
    ],
)
def test_launches_that_were_advised_to_their_death(
    model: str, release: str, size: int, bound: int, ratio: float, tmp_path: Path
) -> None:
    """54 was advised for each of them: 549.76 GB taken of 445, refused for the indexer, or just the reserve left."""
    question = launch(model, release, 449, 4, hicache_size=100)
    log = tmp_path / "server.log"
    log.write_text(server_log(question))
    first = diagnose(gather([str(log)], release=release, host_ram_bytes=449 * GB, available_bytes=445 * GB)).first
    assert first is not None
    assert first.remedy.startswith(f"--hicache-size {size} (")
    assert f"or --hicache-ratio {ratio:g} (" in first.remedy
    assert (f"only the 10 GiB reserve left: --hicache-size {bound}" in first.remedy) == (bound > size)
    assert check(question, first.remedy) == (3 if bound > size else 2)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_recommended_is_accepted(model: str, release: str, tmp_path: Path) -> None:
    """With the release stated and with its wording alone; from the host as stated and from the refusal alone."""
    named = 0
    for ram, used, flags in (
        (449, 4, {"hicache_size": 100}),
        (449, 60, {"hicache_size": 300}),
        (1500, 100, {"hicache_ratio": 30.0}),
        (2100, 20, {"hicache_size": 200, "tp_size": 4}),
    ):
        try:
            question = launch(model, release, ram, used, **flags)
        except HicacheLabError:
            continue
        if assess(question).rank is None:
            continue
        log = tmp_path / "server.log"
        log.write_text(server_log(question))
        host = {"host_ram_bytes": ram * GB, "available_bytes": (ram - used) * GB}
        for stated in ({"release": release}, {}):
            named += check(question, remedies(diagnose(gather([str(log)], **host, **stated))))
        # what was available is told by the refusal, or not at all and then nothing is named that needs it
        if assess(question).verdict == "REFUSED":
            named += check(question, remedies(diagnose(gather([str(log)], release=release))))
        post = postmortem(log, release=release, **host)
        assert post.answer is not None or post.why_no_answer
        document = to_document(post).to_markdown().replace("\\", "")
        actions = document.split("## Action items", 1)[1].split("## What is not known")[0]
        for line in re.findall(r"^python -m sglang.*", actions, flags=re.M):
            config = parse_launch(line)
            setting = ("size", config.hicache_size) if config.hicache_size else ("ratio", config.hicache_ratio)
            assert verdict(question, setting[0], float(setting[1] or 0)) in ACCEPTED, line
            named += 1
        named += check(question, actions)
    if model in ("kimi-k2.5", "llama-3.1-70b") and release != "0.4.5":
        assert named


KILLED = "[2026-03-01 10:04:00] Rank 0 scheduler is dead. Please check if there are relevant logs.\nExit code: -9\n"


@pytest.mark.parametrize(
    ("size", "facts", "limit", "advised"),
    [
        (50, {"host_ram": "449GB", "available": "445GB", "overhead": "60GB"}, 385, 41),
        (100, {"host_ram": "1500GB", "cgroup_limit": "1000GB", "cgroup_usage": "300GB"}, 700, 73),
        (100, {"host_ram": "1000GB", "hugepages": "300GB"}, 700, 73),
        # a size that one rank alone cannot have: no rule of several ranks applies
        (500, {"host_ram": "449GB", "available": "445GB", "overhead": "60GB"}, 385, 41),
    ],
)
def test_a_kill_is_judged_by_the_question_s_limit(
    size: int, facts: dict[str, str], limit: int, advised: int, tmp_path: Path
) -> None:
    asked = ask("kimi-k2.5", "0.5.8", tp_size=8, device_tokens=116_000, hicache_size=size, **facts)
    assert asked.limit_bytes == limit * GB
    assert advise(asked).size_gb == advised
    log = tmp_path / "server.log"
    # the pools as a host with room for them prints them
    roomy = ask("kimi-k2.5", "0.5.8", tp_size=8, device_tokens=116_000, hicache_size=size, host_ram="9000GB")
    log.write_text(server_log(roomy) + KILLED)
    found = diagnose(gather([str(log)], **question.stated_facts({**facts, "sglang_version": "0.5.8"})))
    assert found.first is not None
    assert found.first.cause == ("per_rank_size" if size < 449 else "kernel_oom_kill")
    killed = next(finding for finding in found.findings if finding.cause == "kernel_oom_kill")
    for finding in (found.first, killed):
        assert f"{limit}.00 GB (stated: " in finding.explanation
        assert f"--hicache-size {advised} (" in finding.remedy
    assert "alone" not in killed.explanation
    assert check(asked, remedies(found)) >= 3


def test_a_container_that_the_check_does_not_read_is_not_what_it_went_by(tmp_path: Path) -> None:
    facts = {"host_ram": "1500GB", "available": "1400GB", "cgroup_limit": "1000GB", "cgroup_usage": "300GB"}
    asked = ask("kimi-k2.5", "0.5.8", tp_size=8, device_tokens=116_000, hicache_size=100, **facts)
    log = tmp_path / "server.log"
    log.write_text(server_log(asked) + KILLED)
    found = diagnose(gather([str(log)], **question.stated_facts({**facts, "sglang_version": "0.5.8"})))
    texts = {finding.cause: finding.explanation for finding in found.findings}
    assert "each rank compares its own 100.00 GB with 1,389.26 GB (1,400.00 GB − 10 GiB)" in texts["per_rank_size"]
    assert "checked its own pool" not in texts["aggregate_overcommit"]
    assert "of which it already used 300.00 GB" in texts["container_limit"]


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        ({"host-ram": "449GB", "available": "500GB"}, "--available: 500000000000 bytes are more than --host-ram"),
        ({"host-ram": "449GB", "hugepages": "500GB"}, "--hugepages: 500000000000 bytes are more than --host-ram"),
        ({"host-ram": "449GB", "cgroup-usage": "5GB"}, "--cgroup-usage says nothing without --cgroup-limit"),
    ],
)
def test_stated_facts_that_contradict_are_refused_as_plan_refuses_them(
    facts: dict[str, str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_text(server_log(launch("kimi-k2.5", "0.5.8", 449, 4, hicache_size=300)))
    flags = [f"--{name}={value}" for name, value in facts.items()]
    shown = []
    for command in (
        ["plan", "--model", "kimi-k2.5", "--sglang-version", "0.5.8", "--tp-size", "8", "--hicache-size", "300"],
        ["diagnose", str(log)],
        ["report", str(log), "--output", str(tmp_path / "out")],
    ):
        assert main([*command, *flags]) == 2
        shown.append(capsys.readouterr().err.strip().removeprefix(f"hicache-lab {command[0]}: "))
    assert error in shown[0]
    assert len(set(shown)) == 1


def test_measured_amounts_may_disagree_and_the_smaller_one_counts(tmp_path: Path) -> None:
    """A stated 500 GB beside files that know 449 GB of RAM advises nothing that 449 GB cannot hold."""
    log, kernel = tmp_path / "server.log", tmp_path / "kernel.log"
    log.write_text(server_log(launch("kimi-k2.5", "0.5.8", 449, 4, hicache_size=300)))
    pages = 449 * GB // 4096
    kernel.write_text(f"[1.0] Mem-Info:\n[1.0] {pages} pages RAM\n[1.0] 0 pages HighMem/MovableOnly\n")
    stated = {"release": "0.5.8", "available_bytes": 500 * GB}
    facts = gather([str(log)], kernel_logs=[str(kernel)], **stated)
    assert facts.total is not None
    text = remedies(diagnose(facts))
    assert check(launch("kimi-k2.5", "0.5.8", 449, 0, hicache_size=300), text)


def test_only_flags_that_the_command_has_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnose", "--help"])
    usage = capsys.readouterr().out
    for model, lines, flag, value in (
        ("qwen3-next-80b-a3b", "Mamba Cache", "--mamba-slots", "300"),
        ("gpt-oss-120b", "sliding window", "--swa-device-tokens", "50000"),
    ):
        asked = launch(model, "0.5.23", 449, 4, hicache_size=300)
        log = tmp_path / "server.log"
        log.write_text("\n".join(line for line in server_log(asked).splitlines() if lines not in line) + "\n")
        command = ["diagnose", str(log), "--sglang-version", "0.5.23", "--host-ram", "449GB", "--available", "445GB"]
        main(command)
        text = capsys.readouterr().out
        assert f"({flag} states them)" in " ".join(text.split())
        assert all(name in usage for name in re.findall(r"\((--[a-z-]+) ", text))
        main([*command, flag, value])
        assert f"({flag} states them)" not in " ".join(capsys.readouterr().out.split())


def test_one_rank_takes(tmp_path: Path) -> None:
    one = launch("llama-3.1-70b", "0.5.8", 449, 4, tp_size=1, hicache_size=500)
    log = tmp_path / "server.log"
    log.write_text(server_log(one))
    stated = {"release": "0.5.8", "host_ram_bytes": 449 * GB, "available_bytes": 445 * GB}
    assert "(1 rank takes " in remedies(diagnose(gather([str(log)], **stated)))


def test_what_is_not_counted_or_assumed_is_said(tmp_path: Path) -> None:
    """A log that was cut lacks the state slots, and a draft model's pool cannot be counted without the model."""
    question = launch("qwen3-next-80b-a3b", "0.5.23", 449, 4, hicache_size=100)
    log = tmp_path / "server.log"
    log.write_text("\n".join(line for line in server_log(question).splitlines() if "Mamba Cache" not in line) + "\n")
    stated = {"release": "0.5.23", "host_ram_bytes": 449 * GB, "available_bytes": 445 * GB}
    text = remedies(diagnose(gather([str(log)], **stated)))
    assert "assumed: state slots follow from --mamba-full-memory-ratio 0.9 (--mamba-slots states them)" in text
    assert "the server's own host memory is not counted (--overhead states it)" in text
    eagle = launch("llama-3.1-70b", "0.5.17", 449, 4, hicache_size=100)
    dump = server_log(eagle).replace("enable_hier", "speculative_algorithm='EAGLE', enable_hier")
    log.write_text(dump)
    text = remedies(diagnose(gather([str(log)], **{**stated, "release": "0.5.17"})))
    assert "not counted: --speculative-algorithm EAGLE" in text
    text = remedies(diagnose(gather([str(log)], **{**stated, "release": "0.5.17"}, draft_model="llama-3.1-8b")))
    assert "not counted: " not in text


@pytest.mark.parametrize(
    ("cut", "stated", "says"),
    [
        ("model_path='Llama-3.1-70B', ", {}, "the model, which the log does not name (--model states it)"),
        ("tp_size=8, ", {}, None),
        ("", {"host_ram_bytes": None, "available_bytes": None}, "(--host-ram and --available state it)"),
        ("enable_hierarchical_cache=True", {}, None),
    ],
)
def test_a_fact_that_is_missing_is_named(cut: str, stated: dict[str, Any], says: str | None, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(server_log(launch("llama-3.1-70b", "0.5.8", 449, 4, hicache_size=100)).replace(cut, "", 1))
    known = {"release": "0.5.8", "host_ram_bytes": 449 * GB, "available_bytes": 445 * GB, **stated}
    first = diagnose(gather([str(log)], **known)).first
    assert first is not None
    assert (says is None) == bool(named_settings(first.remedy))
    if says is None:
        assert first.remedy.startswith("--hicache-size 48 (")
    else:
        assert says in first.remedy


@pytest.mark.parametrize("release", ["0.5.8", "0.5.23"])
def test_without_the_server_s_arguments_they_can_be_stated(release: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    question = launch("llama-3.1-70b", release, 449, 4, hicache_size=100)
    log.write_text(server_log(question).split("\n", 1)[1])
    known = {"release": release, "host_ram_bytes": 449 * GB, "available_bytes": 445 * GB}
    missing = remedies(diagnose(gather([str(log)], **known)))
    assert "the model, which the log does not name (--model states it)" in missing
    assert not named_settings(missing)
    stated = remedies(diagnose(gather([str(log)], **known, model="llama-3.1-70b", tp_size=8)))
    assert check(question, stated)


def test_a_damaged_dump_is_not_computed_with(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        server_log(launch("llama-3.1-70b", "0.5.8", 449, 4, hicache_size=100)).replace("tp_size=8", "tp_size='8")
    )
    first = diagnose(gather([str(log)], release="0.5.8", host_ram_bytes=449 * GB)).first
    assert first is not None
    assert not named_settings(first.remedy)


@given(
    ram=st.integers(64, 3000),
    used=st.integers(0, 63),
    overhead=st.integers(0, 40),
    size=st.integers(1, 400),
    ranks=st.sampled_from([1, 2, 4, 8]),
    model=st.sampled_from(MODELS[:4]),
    release=st.sampled_from(RELEASES),
    limit=st.none() | st.integers(20, 3000),
)
@settings(max_examples=60, deadline=None)
def test_any_host_any_size(
    tmp_path_factory: pytest.TempPathFactory, ram: int, used: int, overhead: int, size: int, ranks: int,
    model: str, release: str, limit: int | None,
) -> None:  # fmt: skip
    container = {} if limit is None else {"cgroup_limit": f"{limit}GB"}
    question = launch(
        model, release, ram, used, hicache_size=size, tp_size=ranks, overhead=f"{overhead}GB", **container
    )
    if assess(question).rank is None:
        return
    log = tmp_path_factory.mktemp("any") / "server.log"
    log.write_text(server_log(question))
    stated = {"host_ram_bytes": ram * GB, "available_bytes": (ram - used) * GB, "overhead_bytes": overhead * GB}
    if limit is not None:
        stated["cgroup_limit_bytes"] = limit * GB
    for version in ({"release": release}, {}):
        check(question, remedies(diagnose(gather([str(log)], **stated, **version))))


def test_diagnose_report_plan_and_max_name_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, release, size in (
        ("kimi-k2.5", "0.5.8", 300),
        ("deepseek-v3.2", "0.5.12", 54),
        ("llama-3.1-70b", "0.5.2", 40),
    ):
        question = launch(model, release, 449, 4, hicache_size=size)
        log = tmp_path / f"{model}.log"
        log.write_text(server_log(question))
        facts = ["--sglang-version", release, "--host-ram", "449GB", "--available", "445GB", "--overhead", "40GB"]
        flags = ["--model", model, "--tp-size", "8", "--device-tokens", "116000"]
        main(["max", *flags, *facts, "--json"])
        largest = json.loads(capsys.readouterr().out)["comfortable"]
        main(["plan", *flags, *facts, "--hicache-size", str(size), "--json"])
        assert json.loads(capsys.readouterr().out)["advice"]["hicache_size_gb"] == largest["hicache_size_gb"]
        main(["diagnose", str(log), *facts, "--json"])
        remedy = json.loads(capsys.readouterr().out)["findings"][0]["remedy"]
        assert named_settings(remedy)[:2] == [
            ("size", largest["hicache_size_gb"]), ("ratio", largest["hicache_ratio"])
        ]  # fmt: skip
        main(["report", str(log), *facts, "--output", str(tmp_path / model)])
        capsys.readouterr()
        text = (tmp_path / model / "postmortem.md").read_text(encoding="utf-8").replace("\\", "")
        named = {number for flag, number in named_settings(text.split("## Root cause")[1]) if flag == "size"}
        bound = advise(ask(model, release, config=question.config, host_ram="449GB", available="445GB",
                           overhead="40GB", device_tokens=116_000), accepted=ACCEPTED).size_gb  # fmt: skip
        assert named <= {float(size), float(largest["hicache_size_gb"] or 0), float(bound or 0)}
        assert f"--hicache-size {largest['hicache_size_gb']} (" in text


def test_a_crash_loop_asks_its_question_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch draws another random seed; nothing that a size depends on changes."""
    one = server_log(launch("kimi-k2.5", "0.5.8", 449, 4, hicache_size=100))
    log = tmp_path / "server.log"
    log.write_text("".join(one.replace("enable_hier", f"random_seed={n}, enable_hier") for n in range(30)))
    asked = []
    monkeypatch.setattr(question, "ask", lambda *args, **facts: asked.append(args) or ask(*args, **facts))
    findings = diagnose(gather([str(log)], release="0.5.8", host_ram_bytes=449 * GB, available_bytes=444 * GB)).findings
    assert len({finding.remedy for finding in findings if finding.cause == "per_rank_size"}) == 1
    assert {finding.run for finding in findings} == set(range(1, 31))
    assert len(asked) == 1
