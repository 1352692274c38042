"""docs/scheduling.md: its commands run, and end as it says."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scheduling.md").read_text()
COMMANDS = dict(
    zip(("run", "sweep", "gate", "papermill"), re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL), strict=True)
)
NOTEBOOK = ROOT / "tests" / "notebooks" / "varying.ipynb"


def shell(folder: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command as a scheduler runs it: sh, with the venv's commands on the path."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    (folder / "bin").mkdir(exist_ok=True)
    command_file = folder / "bin" / "hicache-lab"
    # as installed: the same entry point, whether or not this checkout is
    command_file.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m hicache_lab "$@"\n')
    command_file.chmod(0o755)
    environment = {
        "PATH": path, "HOME": str(folder), "REPORTS": str(folder), "PYTHONPATH": str(ROOT), "NOTEBOOK": str(NOTEBOOK),
        **variables,
    }  # fmt: skip
    return subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, cwd=folder, check=False
    )


def test_a_run_is_a_command_with_an_exit_code_and_a_result_path(tmp_path: Path) -> None:
    done = shell(tmp_path, COMMANDS["run"])
    assert done.returncode == 0, done.stderr
    [shown] = json.loads((tmp_path / "nightly.json").read_text())
    result = json.loads((tmp_path / "nightly" / "result.json").read_text())
    assert (shown["folder"], shown["status"], result["status"]) == (str(tmp_path / "nightly"), "complete", "complete")
    assert shell(tmp_path, COMMANDS["run"].replace("size_gb=48", "size_gb=13")).returncode == 1
    assert json.loads((tmp_path / "nightly" / "result.json").read_text())["status"] == "failed"
    wrong = shell(tmp_path, COMMANDS["run"].replace("size_gb", "size_bg"))
    assert wrong.returncode == 2
    assert "did you mean size_gb" in wrong.stderr


def test_a_sweep_and_a_gate_are_too(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        f"label: nightly\nnotebook: {NOTEBOOK}\naxes: {{size_gb: [48]}}\nrepeats: 2\nrepeat_parameter: seed\n"
    )
    first = shell(tmp_path, COMMANDS["sweep"], GRID=str(grid))
    assert first.returncode == 0, first.stderr
    assert json.loads((tmp_path / "sweep.json").read_text())["folder"] == str(tmp_path / "nightly")
    assert (tmp_path / "nightly" / "comparison.html").is_file()
    again = shell(tmp_path, COMMANDS["sweep"], GRID=str(grid))
    assert again.returncode == 0
    assert all(point["reused"] for point in json.loads((tmp_path / "sweep.json").read_text())["points"])
    for number, point in enumerate(sorted((tmp_path / "nightly" / "points").iterdir())):
        shutil.copytree(point, tmp_path / f"before-{number}")
        worse = json.loads((point / "result.json").read_text())
        worse["parameters"]["size_gb"] = 47
        worse["figures"]["output_tokens_per_s"]["value"] /= 2
        shutil.copytree(point, tmp_path / f"after-{number}")
        (tmp_path / f"after-{number}" / "result.json").write_text(json.dumps(worse))
    gate = shell(tmp_path, COMMANDS["gate"])
    assert gate.returncode == 3, gate.stderr
    assert "worse: output_tokens_per_s: size_gb=47" in gate.stdout
    assert (tmp_path / "gate.html").is_file()


def test_papermill_runs_the_notebook_as_it_is(tmp_path: Path) -> None:
    record = tmp_path / "figures"
    record.mkdir()
    command = COMMANDS["papermill"].replace("papermill ", f'"{sys.executable}" -m papermill ', 1)
    done = shell(tmp_path, command, HICACHE_LAB_RUN_FOLDER=str(record))
    assert done.returncode == 0, done.stderr
    assert json.loads((record / "record.json").read_text())["host_gb"]["value"] == 8 * 48


@pytest.mark.parametrize("command", ["run", "sweep", "compare"])
def test_the_page_names_options_that_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from hicache_lab.cli import main

    assert main([command, "--help"]) == 0
    known = capsys.readouterr().out
    for line in re.findall(rf"hicache-lab {command} ([^`\n]*)", PAGE):
        for option in re.findall(r"(?<!\S)(--[a-z-]+)", line):
            assert option in known, f"{command} has no {option}"
