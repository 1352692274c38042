"""``hicache-lab replay`` as it is called."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hicache_lab.base.errors import HostError
from hicache_lab.base.units import MB
from hicache_lab.cli import main
from hicache_lab.cli.replays import race_lines
from hicache_lab.race import RaceSample, scenario_of_release, simulate
from hicache_lab.race.cgroup import memory_group


def race_record(capsys, *words: str) -> tuple[int, dict]:
    code = main(["replay", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_the_incident_by_default(capsys) -> None:
    code, record = race_record(capsys)
    assert code == 3
    assert (record["oom_kills"], record["survivors"], record["refused"], record["passed"]) == (7, 1, 0, 8)
    assert record["peak_bytes"] == 449 * 10**9
    assert len(record["ranks"]) == 8
    assert record["provenance"] == "simulated"


@pytest.mark.parametrize(
    ("words", "code", "kills", "survivors", "refused"),
    [
        (["--hicache-size", "48"], 0, 0, 8, 0),
        (["--sglang-version", "0.5.19"], 3, 0, 0, 8),
        (["--sglang-version", "0.5.19", "--hicache-size", "48", "--skew", "24"], 3, 0, 0, 1),
        (["--skew", "150", "--no-launcher"], 3, 0, 1, 7),
        (["--ranks", "1"], 0, 0, 1, 0),
        (["--host-ram", "3TB"], 0, 0, 8, 0),
        (["--available", "300GB"], 3, 0, 0, 8),
        # torch's pinned allocator in 0.5.3: 40 GB become 64 GiB, and eight of them do not fit
        (["--sglang-version", "0.5.3", "--hicache-size", "40"], 3, 2, 6, 0),
    ],
)
def test_flags_vary_the_story(capsys, words, code, kills, survivors, refused) -> None:
    got, record = race_record(capsys, *words)
    assert (got, record["oom_kills"], record["survivors"], record["refused"]) == (code, kills, survivors, refused)


def test_the_text_names_each_rank_and_the_release(capsys) -> None:
    assert main(["replay", "--skew", "150"]) == 3
    out = capsys.readouterr().out
    assert out.startswith("REFUSED  8 ranks × 300.00 GB = 2,400.00 GB")
    assert "134.26 GB" in out
    assert "launcher stops every other process" in out
    assert main(["replay", "--sglang-version", "0.9.0", "--hicache-size", "40"]) == 0
    assert "warning: not verified for 0.9.0" in capsys.readouterr().out


def test_the_map_as_text_and_json(capsys) -> None:
    assert main(["replay", "--map"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("fits", "refused", "oom", "300"))
    assert main(["replay", "--map", "--json"]) == 0
    drawn = json.loads(capsys.readouterr().out)
    assert len(drawn["outcomes"]) == len(drawn["skews_seconds"])
    assert drawn["outcomes"][0][drawn["sizes_gb"].index(300)] == "oom"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host-ram", "449"], "--host-ram"),
        (["--hicache-size", "0"], "--hicache-size"),
        (["--hicache-size", "nan"], "--hicache-size"),
        (["--available", "500GB"], "--available"),
        (["--host-ram", "3GB"], "--host-ram: expected more than the 4.00 GB that others are taken to use"),
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "1025"], "--ranks: expected the ranks of one host, at most 1024"),
        (["--scale", "500"], "--scale: belongs to the physical race"),
        (["--cap", "2GB"], "--cap: belongs to the physical race"),
        (["--cgroup", "x"], "--cgroup: belongs to the physical race"),
        (["--skew", "-1"], "--skew"),
        (["--pin-rate", "0GB"], "--pin-rate"),
        (["--sglang-version", "0.4.5"], "--hicache-size exists from 0.4.5.post3"),
        (["--physical", "--scale", "10"], "above the cap of 1.00 GB"),
        (["--physical", "--scale", "0"], "--scale"),
        (["--physical", "--map"], "--map"),
    ],
)
def test_wrong_values_name_their_flag(capsys, words, said) -> None:
    assert main(["replay", *words]) == 2
    assert said in capsys.readouterr().err


def test_one_rank_is_one_rank(capsys) -> None:
    assert main(["replay", "--ranks", "1"]) == 0
    assert capsys.readouterr().out.startswith("FITS  1 rank × 300.00 GB")


def test_processes_larger_than_the_story_are_said() -> None:
    scenario = scenario_of_release("0.5.8", size_gb=300)
    result = replace(simulate(scenario), scale=20_000, samples=(RaceSample(0.0, 520_000, (0,) * 8),))
    [line] = [line for line in race_lines(result) if "themselves" in line]
    assert "hold 10.40 GB at this scale, the scenario has 4.00 GB in use" in line
    assert not any("themselves" in line for line in race_lines(simulate(scenario)))


def test_an_output_that_is_full_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hicache_lab", "replay"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (
        1,
        "hicache-lab replay: the output could not be written: No space left on device\n",
    )


def test_unknown_releases_are_refused(capsys) -> None:
    assert main(["replay", "--sglang-version", "0.3.0"]) == 1
    assert "known releases start at 0.4.4" in capsys.readouterr().err


@pytest.mark.physical
def test_physical_says_what_the_kernel_counted(capsys) -> None:
    try:
        with memory_group(64 * MB):
            pass
    except HostError as refusal:
        assert os.environ.get("CI") != "true", str(refusal)
        assert main(["replay", "--physical"]) == 1
        assert "control group" in capsys.readouterr().err
        return
    code, record = race_record(capsys, "--physical")
    assert code == 3
    assert record["oom_kills"] >= 1
    assert record["oom_kills"] == sum(rank["fate"] == "oom_killed" for rank in record["ranks"])
    assert record["peak_bytes"] <= 449 * MB
    assert (record["provenance"], record["scale"]) == ("replayed", 1000)
    assert main(["replay", "--physical", "--hicache-size", "48"]) == 0
    out = capsys.readouterr().out
    assert "kernel's own count of OOM kills" in out
    assert "the virtual model says: 8 passed" in out
