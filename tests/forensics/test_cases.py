"""The incident's facts are kept with their origins, its claims recomputed, its logs rebuilt from its facts."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from hicache_lab.base.errors import InputError
from hicache_lab.base.resources import data_dir
from hicache_lab.base.units import GB
from hicache_lab.forensics.cases import CHECKS, Case, ClaimResult, alternatives, audit, load_case
from hicache_lab.forensics.cases.counterfactuals import case_conclusion
from hicache_lab.preflight import assess

ROOT = Path(__file__).parents[2]
SEED = "kimi-k25-hicache-300"


@pytest.fixture(scope="module")
def case() -> Case:
    return load_case(SEED)


@pytest.fixture(scope="module")
def results(case: Case) -> dict[str, ClaimResult]:
    return {result.id: result for result in audit(case)}


def test_the_launch_is_judged_as_it_happened(case: Case) -> None:
    answer = assess(case.question())
    assert (answer.verdict, answer.ranks_on_host) == ("OOM_RISK", 8)
    assert answer.rank is not None
    assert answer.rank.tokens == 4_269_126
    assert round(answer.host_bytes / GB, 1) == 2400.0


@pytest.mark.parametrize(
    ("claim", "status", "figure"),
    [
        ("size-is-a-total", "differs", "2,400.0 GB"),
        ("concurrency-50", "differs", "116,000 ÷ 4,000 = 29; 50 at a time means 2,320"),
        ("queue", "cannot be checked", "batch lines"),
        ("concurrency-100", "differs", "29 of 4,000 tokens fit, with or without"),
        ("check-is-per-process", "agrees", "0.5.8"),
        ("all-passed", "holds if", "134.26 GB had become resident; one after another, rank 2 is refused"),
        ("memory-sum", "agrees", "439 + 9 = 448 of 449 GB"),
        ("tokens-formula", "differs", "4,269,125 by the formula; 0.5.8 makes 4,269,126"),
        ("per-rank-total", "agrees", "2,400.0 GB"),
        ("size-48-total", "agrees", "384.0 GB"),
        ("size-48-safe", "agrees", "424 GB of 445 GB taken, 21.0 GB left, 10.3 GB beyond the reserve: TIGHT"),
        ("size-48-largest", "differs", "49 GB leaves the 10 GiB reserve"),
        ("ratio-2.5-safe", "agrees", "203 GB of 445 GB taken"),
        ("size-or-ratio", "differs", "384.0 GB, 683,061 tokens a rank; --hicache-ratio 2.5: 163.0 GB, 290,001"),
        ("tokens-add-up", "differs", "683,061 distinct tokens"),
        ("speedup", "differs", "1.55–2.25 times"),
        ("later-refuses", "agrees", "only have 54.28 GB free"),
        ("later-auto-size", "agrees", "ratio 2, 8 ranks × 16.30 GB = 130.4 GB"),
    ],
)
def test_claims_of_the_seed_incident(results: dict[str, ClaimResult], claim: str, status: str, figure: str) -> None:
    assert results[claim].status == status
    assert figure in results[claim].recomputed


def test_every_claim_is_in_the_table_and_every_check_is_used(case: Case, results: dict[str, ClaimResult]) -> None:
    raw = json.loads((case.folder / "claims.json").read_text())["claims"]
    assert [claim["id"] for claim in raw] == list(results)
    assert {claim["check"] for claim in raw} == set(CHECKS)
    assert {result.status for result in results.values()} == {"agrees", "differs", "holds if", "cannot be checked"}


def test_another_configuration_gives_other_answers(tmp_path: Path) -> None:
    """Nothing in the audit is fixed to the seed's numbers."""
    shutil.copytree(data_dir() / "incidents" / SEED, tmp_path / "mine")
    text = (tmp_path / "mine" / "incident.json").read_text()
    text = (
        text.replace('"0.5.8", "unit"', '"0.5.20", "unit"')
        .replace("116000", "250000")
        .replace("--tp-size 8", "--tp-size 4")
    )
    (tmp_path / "mine" / "incident.json").write_text(text)
    found = {result.id: result for result in audit(load_case(tmp_path / "mine"))}
    assert found["per-rank-total"].recomputed == "4 ranks × 300.00 GB = 1,200.0 GB"
    assert found["concurrency-50"].status == "agrees"
    assert found["check-is-per-process"].status == "differs"
    assert found["all-passed"].status == "differs"
    # 98 leave the reserve too, but a rank that checks last is refused; 394.26 / 7 = 56 pass in whatever order
    assert found["size-48-largest"].recomputed.startswith("56 GB leaves the 10 GiB reserve, in whatever order")


def test_levers_multiply_device_tokens(case: Case) -> None:
    tokens = {alternative.flag: alternative.device_tokens for alternative in alternatives(case)}
    assert tokens["--kv-cache-dtype fp8_e4m3"] == 232_000
    assert tokens["--dcp-size 8"] == 928_000
    assert tokens["--hicache-size 300"] == 116_000


def test_the_reconstructed_files_follow_from_the_facts(case: Case, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("rebuild", ROOT / "scripts" / "rebuild_incident.py")
    assert spec is not None
    assert spec.loader is not None
    rebuild = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rebuild)
    shutil.copy(case.folder / "incident.json", tmp_path)
    rebuild.main(tmp_path)
    for name in ("server.log", "kernel.log", "memory.csv"):
        assert (tmp_path / name).read_bytes() == (case.folder / name).read_bytes(), name
    log = (case.folder / "server.log").read_text()
    assert log.count("Allocating 300.00 GB host memory for hierarchical KV cache.") == 8
    assert log.count("#tokens: 116000, KV size: 7.59 GB") == 8
    rows = (case.folder / "memory.csv").read_text().splitlines()
    assert rows[-1].split(",")[2:4] == ["439000000000", "9000000000"]


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("incident.json", '"schema_version": 1', '"schema_version": 9', "schema_version"),
        ("incident.json", '"origin": "reported"', '"origin": "guessed"', "guessed"),
        ("incident.json", '"device_tokens"', '"device_token"', "no fact 'device_tokens'"),
        ("incident.json", '"title"', '"heading"', "title"),
        ("claims.json", '"check": "factor"', '"check": "magic"', "check is one of"),
        ("claims.json", '"mean_tokens": 4000', '"mean": 4000', "mean_tokens"),
        ("claims.json", "{", "", "not JSON"),
    ],
)
def test_what_is_wrong_in_a_folder_is_named(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    shutil.copytree(data_dir() / "incidents" / SEED, tmp_path / "x")
    path = tmp_path / "x" / name
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=message):
        audit(load_case(tmp_path / "x"))


def test_a_file_of_an_incident_stays_in_its_folder(tmp_path: Path) -> None:
    shutil.copytree(data_dir() / "incidents" / SEED, tmp_path / "x")
    path = tmp_path / "x" / "incident.json"
    path.write_text(path.read_text().replace('"server.log"', '"../../etc/passwd"'))
    assert load_case(tmp_path / "x").files["server_log"] == tmp_path / "x" / "passwd"


def test_an_unknown_incident_lists_those_that_ship() -> None:
    with pytest.raises(InputError, match=SEED):
        load_case("nowhere")


def own_incident(tmp_path: Path, dtype: str) -> Case:
    """Llama 3.1 70B on 0.5.2, 60 GB a rank: pinned buffers are rounded up, so the limit kills before any refusal."""
    shutil.copytree(data_dir() / "incidents" / SEED, tmp_path / "mine")
    path = tmp_path / "mine" / "incident.json"
    raw = json.loads(path.read_text())
    raw["launch"] = (
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B --tp-size 8 "
        "--enable-hierarchical-cache --hicache-size 60"
    )
    for name, value in {"sglang_version": "0.5.2", "kv_cache_dtype": dtype, "device_tokens": 200_000}.items():
        raw["facts"][name]["value"] = value
    path.write_text(json.dumps(raw))
    return load_case(tmp_path / "mine")


def test_a_kill_before_any_refusal_is_told(tmp_path: Path) -> None:
    results = {result.id: result for result in audit(own_incident(tmp_path, "auto"))}
    assert results["all-passed"].status == "holds if"
    assert "rank 1 passes the limit (549.76 GB of 445.00 GB) before any check refuses" in (
        results["all-passed"].recomputed
    )


def test_a_launch_that_the_parser_refuses_is_told(tmp_path: Path) -> None:
    case = own_incident(tmp_path, "bfloat16")
    results = {result.id: result for result in audit(case)}
    why = "--kv-cache-dtype bfloat16: 0.5.2 accepts auto, fp8_e5m2, fp8_e4m3"
    for claim in (
        "size-is-a-total",
        "all-passed",
        "tokens-formula",
        "size-48-safe",
        "size-48-largest",
        "tokens-add-up",
    ):
        assert results[claim].status == "cannot be checked"
        assert why in results[claim].recomputed
    assert why in case_conclusion(case)
