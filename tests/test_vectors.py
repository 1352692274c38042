"""Every vector recorded from the real code, in the default suite; and the tally must be able to fail."""

import copy
import json
from pathlib import Path

import pytest
from records import read_records
from vectors import compute, differences, replay

from hicache_lab.base.errors import InputError

BASELINE = Path(__file__).parent / "baselines" / "sizing_vectors.jsonl.gz"


@pytest.fixture(scope="module")
def records() -> list[tuple[int, dict]]:
    return list(read_records(BASELINE))


def test_every_recorded_vector_is_reproduced(records: list[tuple[int, dict]]) -> None:
    report = replay(records)
    assert not report.mismatches, "\n".join(map(str, report.mismatches[:20]))
    assert not report.reasons
    assert report.total.as_dict() == {"checked": 7899, "mismatched": 0, "unsupported": 0}
    assert len(report.by_kind) == 14
    assert len(report.by_release) == 34


@pytest.mark.parametrize(
    "kind",
    ["mha", "mla", "nsa", "mamba", "dsa_indexer", "dsv4_paged", "host_memory_budget", "auto_size", "resolve_args"],
)
def test_a_changed_record_is_a_mismatch(records: list[tuple[int, dict]], kind: str) -> None:
    line, record = next((n, r) for n, r in records if r["kind"] == kind and r["outcome"] == "ok")
    changed = copy.deepcopy(record)
    changed["outcome"] = "AssertionError"
    assert [name for name, *_ in differences(changed, compute(changed))] == ["outcome"]
    assert replay([(line, changed)]).total.mismatched == 1


def test_one_byte_more_is_a_mismatch(records: list[tuple[int, dict]]) -> None:
    record = copy.deepcopy(next(r for _, r in records if r["kind"] == "mla" and r["outcome"] == "ok"))
    record["requested_bytes"] += 1
    assert [name for name, *_ in differences(record, compute(record))] == ["requested_bytes"]


def test_what_cannot_be_answered_is_unsupported_not_equal() -> None:
    report = replay([(1, {"kind": "teapot", "release": "0.5.8"}), (2, {"kind": "mha", "release": "0.1.0"})])
    assert report.total.as_dict() == {"checked": 0, "mismatched": 0, "unsupported": 2}
    assert len(report.reasons) == 2


@pytest.mark.parametrize("text", ["{", "[1]", "\x00\x01"])
def test_a_bad_line_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "vectors.jsonl"
    path.write_text(json.dumps({"kind": "mha"}) + "\n" + text + "\n")
    with pytest.raises(InputError, match=r"vectors\.jsonl:2"):
        list(read_records(path))
