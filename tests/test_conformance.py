"""The conformance harness's own side: cases, reporting and refusals (the releases' code runs in `make conformance`)."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vectors import compute, replay

from hicache_lab.base.errors import HostError

CONFORMANCE = Path(__file__).parents[1] / "conformance"


@pytest.fixture
def harness(monkeypatch) -> Iterator:
    monkeypatch.syspath_prepend(str(CONFORMANCE))
    import grid
    import run
    import stand_ins

    yield run, grid, stand_ins
    for name in ("run", "grid", "stand_ins"):
        sys.modules.pop(name)


def cases() -> list[dict]:
    return [json.loads(line) for line in (CONFORMANCE / "cases.jsonl").read_text().splitlines()]


def test_the_case_file_is_what_the_grid_writes(harness, tmp_path) -> None:
    _, grid, _ = harness
    written = tmp_path / "cases.jsonl"
    assert grid.write(written) == len(cases())
    assert written.read_text() == (CONFORMANCE / "cases.jsonl").read_text()
    assert len({case["case_id"] for case in cases()}) == len(cases())


def outcome_of_library(release: str) -> list[tuple[int, dict]]:
    """Records as a worker would write them if the release did what the library says."""
    found = []
    for number, case in enumerate(cases()):
        if case["kind"] in ("mla", "mha") and isinstance(case["available"], int):
            record = case | {"release": release}
            found.append((number, record | compute(record)))
    return found


def test_a_mismatch_names_era_field_and_case(harness) -> None:
    run, _, _ = harness
    records = outcome_of_library("0.5.23")
    assert len(records) > 50
    assert replay(records).total.mismatched == 0
    altered = next(record for _, record in records if record["outcome"] == "ok")
    altered["size"] += 1
    report = replay(records)
    said = "\n".join(run.lines("0.5.23", len(records), {"no nsa host pool": 35}, report))
    assert f"DIFFERS era J, field size, case {altered['case_id']}" in said
    assert "not carried out: 35 × no nsa host pool" in said
    assert f"{len(records) - 1} of {len(records)} cases equal" in said
    assert "NOT examined before" in "\n".join(run.lines("0.9.0", 1, {}, report))


def test_a_whole_kind_that_was_not_carried_out_is_no_agreement(harness, tmp_path, capsys, monkeypatch) -> None:
    run, _, _ = harness
    records = [record for _, record in outcome_of_library("0.5.23") if record["kind"] == "mha"]
    monkeypatch.setattr(run, "unpacked", lambda release, cache: tmp_path)

    def execute(release, root, python, cases, out):
        out.write_text("".join(json.dumps(record) + "\n" for record in records))
        return len(records), {"no mla host pool": 200}

    monkeypatch.setattr(run, "execute", execute)
    monkeypatch.setattr(run, "reading_of", lambda root: (True, ["read-source: the tree follows era J"]))
    words = ["--release", "0.5.23", "--cache", str(tmp_path), "--python", sys.executable]
    assert run.main(words) == 1
    assert "no case of an mla pool could be carried out" in capsys.readouterr().err
    records += [record for _, record in outcome_of_library("0.5.23") if record["kind"] == "mla"]
    assert run.main(words) == 0
    # equal outcomes do not make a tree that reads otherwise equal
    monkeypatch.setattr(run, "reading_of", lambda root: (False, ["  DIFFERS read-source: reserve"]))
    capsys.readouterr()
    assert run.main(words) == 3
    assert "DIFFERS read-source: reserve" in capsys.readouterr().out
    del records[10:]
    assert run.main(words) == 1
    assert "only 10 cases could be carried out" in capsys.readouterr().err


def test_an_error_of_the_release_is_not_taken_for_a_lacking_class() -> None:
    worker = ast.parse((CONFORMANCE / "worker.py").read_text())
    handlers = [ast.unparse(node.type) for node in ast.walk(worker) if isinstance(node, ast.ExceptHandler)]
    assert "Lacking" in handlers
    assert not {"LookupError", "Exception", "BaseException"} & set(handlers)


def test_failures_are_said_with_their_reason(harness, tmp_path, capsys, monkeypatch) -> None:
    run, _, _ = harness
    with pytest.raises(HostError, match=r"counting failed \(exit code 1\)"):
        run._run([sys.executable, "-c", "raise SystemExit('no torch')"], "counting")
    monkeypatch.setattr(run, "NEEDED_BYTES", 10**18)
    with pytest.raises(HostError, match="torch needs"):
        run.torch_python(tmp_path)
    assert not (tmp_path / "torch-env").exists()
    assert run.main(["--release", "not-a-release", "--cache", str(tmp_path), "--python", sys.executable]) == 1
    assert "expected a release" in capsys.readouterr().err


def test_inert_modules_do_nothing_and_do_not_hide_missing_ones(tmp_path) -> None:
    package = tmp_path / "sglang/srt/mem_cache"
    package.mkdir(parents=True)
    (tmp_path / "sglang/srt/utils.py").write_text("raise SystemExit('the real one ran')\n")
    (package / "memory_pool.py").write_text(
        "import not_installed_anywhere\n"
        "from sglang.srt.utils import is_cuda, synchronized, Base\n"
        "@synchronized\n"
        "def kept():\n    return 41\n"
        "class Pool(Base[int]):\n    def __init__(self, size):\n        self.size = size\n"
        "ON_CUDA = bool(is_cuda())\n"
        "try:\n    import sglang.srt.nowhere\nexcept ModuleNotFoundError:\n    MISSING = True\n"
    )
    code = (
        "import sys; from pathlib import Path; from stand_ins import ReleaseFinder\n"
        f"sys.meta_path.insert(0, ReleaseFinder(Path({str(tmp_path)!r})))\n"
        "import sglang.srt.mem_cache.memory_pool as pool\n"
        "print(pool.kept() + pool.Pool(1).size, pool.ON_CUDA, pool.MISSING)\n"
        "try:\n    import not_installed_either\nexcept ModuleNotFoundError:\n    print('still missing')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CONFORMANCE, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["42 False True", "still missing"], done.stderr
