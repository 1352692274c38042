"""The maintainers' two referees as they are run: from any folder, a relative file, the exit codes of a command."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_lab.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
VECTOR = json.loads(gzip.decompress((ROOT / "tests/baselines/sizing_vectors.jsonl.gz").read_bytes()).split(b"\n")[0])
CASE = json.loads((ROOT / "tests/baselines/cases.jsonl").read_text().splitlines()[0])


def referee(name: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "conformance" / f"{name}.py"
    return subprocess.run([sys.executable, script, *words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "good", "bad", "code", "counts"),
    [
        ("vectors", VECTOR, VECTOR | {"outcome": "AssertionError"}, 1, lambda said: said["total"]["mismatched"]),
        ("vectors", VECTOR, VECTOR | {"kind": "teapot"}, 1, lambda said: said["total"]["unsupported"]),
        (
            "verdicts",
            CASE,
            CASE | {"expect": {"verdict": ["TEAPOT"]}},
            3,
            lambda said: said["total"] - said["agree"],
        ),
    ],
)
def test_what_differs_is_counted_and_fails(tmp_path: Path, name: str, good: dict, bad: dict, code: int, counts) -> None:
    (tmp_path / "good.jsonl").write_text(json.dumps(good) + "\n")
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress((json.dumps(bad) + "\n").encode()))
    for file, expected, differing in (("good.jsonl", 0, 0), ("bad.jsonl.gz", code, 1)):
        done = referee(name, tmp_path, file, "--json")
        assert (done.returncode, done.stderr) == (expected, "")
        assert counts(json.loads(done.stdout)) == differing
        assert referee(name, tmp_path, file).returncode == expected


@pytest.mark.parametrize("name", ["vectors", "verdicts"])
def test_a_file_that_is_none_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for words, code, named in (("missing.jsonl",), 1, "missing.jsonl"), (("empty.jsonl",), 1, "no "), ((), 2, "file"):
        done = referee(name, tmp_path, *words)
        assert done.returncode == code and named in done.stderr and "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith(f"{name}.py: ")


def test_they_are_no_commands_of_the_user() -> None:
    assert not {"vectors", "verdicts"} & set(COMMANDS)
