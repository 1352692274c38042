"""The wheel beside psutil, packaging, PyYAML and numpy alone: sizing answers; what cannot says what it lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import source_trees

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("psutil", "packaging", "pyyaml", "numpy")
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_REQUIRE_VIRTUALENV")
}
HOST = ("--host-ram", "449GB", "--available", "445GB", "--device-tokens", "116000")
KIMI = ("--model", "kimi-k2.5", "--sglang-version", "0.5.8", "--tp-size", "8", *HOST)
LAUNCH = ("python", "-m", "sglang.launch_server", "--model-path", "moonshotai/Kimi-K2.5", "--tp-size", "8",
          "--enable-hierarchical-cache", "--hicache-size", "300")  # fmt: skip
LOG = "[2026-01-02 03:04:05] server_args=ServerArgs(model_path='moonshotai/Kimi-K2.5', tp_size=8, hicache_size=300)\n"
REQUEST = {"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``hicache-lab`` of such an environment; its folder's parent has a log and a trace."""
    folder = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    pip = [folder / "env" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    reached = subprocess.run(
        [*pip, "install", "--constraint", ROOT / "constraints.txt", *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    if reached.returncode:
        reason = f"pip could not install {', '.join(PACKAGES)}: {reached.stderr.strip()[-300:]}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True, env=ENVIRONMENT)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", wheel], check=True, env=ENVIRONMENT)
    (folder / "server.log").write_text(LOG)
    (folder / "trace.jsonl").write_text(json.dumps(REQUEST) + "\n")
    (folder / "large.log").write_text(
        LOG + "[2026-01-02 03:04:06 TP0] Load weight begin. avail mem=94.10 GB\n" * 110_000
    )
    (folder / "grid.yaml").write_text("notebook: 03_tuner\naxes:\n  hicache_size: [43, 48]\n")
    return folder / "env" / "bin" / "hicache-lab"


def run(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [core, *words], cwd=core.parents[2], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )


def test_plan(core: Path) -> None:
    done = run(core, "plan", *KIMI, "--hicache-size", "300", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"], answer["ranks_on_host"]) == (3, "OOM_RISK", 8)
    assert answer["host_gb"] == pytest.approx(2400, abs=0.1)


def test_max(core: Path) -> None:
    done = run(core, "max", *KIMI)
    assert done.returncode == 0
    assert "--hicache-size 48" in done.stdout and "--hicache-ratio 5.9" in done.stdout


def test_preflight(core: Path) -> None:
    done = run(core, "preflight", "--sglang-version", "0.5.8", *HOST, "--", *LAUNCH)
    assert done.returncode == 3 and done.stdout.startswith("OOM_RISK")
    assert "--hicache-size 48" in done.stdout


def test_the_door(core: Path) -> None:
    code = """
import hicache_lab as hl
host = {"host_ram": "449GB", "available": "445GB"}
answer = hl.plan("kimi-k2.5", "0.5.8", tp_size=8, hicache_size=300, device_tokens=116_000, **host)
print(answer, answer.advice)
print(answer._repr_markdown_())
print(hl.diagnose("server.log"), hl.models(), hl.releases()[0]["from release"], hl.largest(answer.question).to_dict())
"""
    done = subprocess.run(
        [core.parent / "python", "-c", code],
        cwd=core.parents[2],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert "Answer(OOM_RISK: Kimi-K2.5 on 0.5.8, 8 × 300.00 GB) Advice(--hicache-size 48," in done.stdout
    assert "do: --hicache-size 48" in done.stdout


def test_read_source(core: Path) -> None:
    tree = source_trees.write(core.parents[2] / "tree", {}, source_trees.NO_CACHE, version="0.5.8")
    done = run(core, "read-source", str(tree), "--json")
    reading = json.loads(done.stdout)
    assert (done.returncode, reading["version"], reading["era"]) == (0, "0.5.8", "E"), done.stderr


@pytest.mark.parametrize(
    "words", [("parse", "server.log"), ("diagnose", "server.log"), ("replay",), ("server", "status")]
)
def test_what_needs_no_more_works_too(core: Path, words: tuple[str, ...]) -> None:
    done = run(core, *words)
    assert done.returncode in (0, 3) and done.stdout and "not installed" not in done.stderr


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (("run", "03_tuner"), "nbformat"),
        (("sweep", "grid.yaml", "--check"), "nbformat"),
        (("parse", "large.log"), "numba"),
        (("parse", "server.log", "--parquet", "out"), "pandas"),
        (("report", "server.log"), "plotly"),
        (("watch", "--samples", "1", "--output", "watch.jsonl"), "tqdm"),
        (("server", "install"), "tqdm"),
        (("curve", "trace.jsonl"), "pyarrow"),
        (("simulate", "trace.jsonl", "--sglang-version", "0.5.8", "--device-tokens", "100"), "pyarrow"),
    ],
)
def test_what_needs_more_names_it_in_one_line(core: Path, words: tuple[str, ...], package: str) -> None:
    done = run(core, *words)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"hicache-lab {words[0]}: needs the package {package}, which is not installed; `pip install hicache-lab` "
        f"brings it and all others, `pip install {package}` it alone"
    )
    assert "Traceback" not in done.stderr
