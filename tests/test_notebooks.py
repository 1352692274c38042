"""The shipped notebooks: written as the project writes notebooks, clean in git, and right when they are run."""

import ast
import json
import re
import statistics
from pathlib import Path
from typing import Any

import nbformat
import pytest

from hicache_lab.base.errors import HostError
from hicache_lab.base.resources import data_dir, notebooks_dir
from hicache_lab.base.units import MB
from hicache_lab.race.cgroup import memory_group
from hicache_lab.runs import RunResult, execute, inspect_parameters, load_result

NOTEBOOKS = sorted(notebooks_dir().glob("*.ipynb"))
WIDGETS = re.compile(r"\bTuner\(|\bwidgets\.")
FIGURES = re.compile(r"figure\(")


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def code_lines(source: str) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in source.splitlines())


def is_parameters(cell: Any) -> bool:
    return "parameters" in cell.metadata.get("tags", [])


named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_the_notebooks_are_numbered_without_a_gap() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02d}" for number in range(1, len(NOTEBOOKS) + 1)]


@named
def test_outputs_are_stripped(path: Path) -> None:
    for cell in code_cells(path):
        assert cell.outputs == []
        assert cell.execution_count is None
    assert set(read(path).metadata) <= {"kernelspec", "language_info"}


@named
def test_papermill_itself_reads_every_parameter(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import papermill

    # it takes a second "=" or an apostrophe in a comment for code, and says so before every run
    read_by_papermill = papermill.inspect_notebook(str(path))
    assert "Unable to parse" not in caplog.text
    assert list(read_by_papermill) == list(inspect_parameters(path))


@named
def test_code_is_short_and_prose_is_not(path: Path) -> None:
    cells = [cell for cell in code_cells(path) if not is_parameters(cell)]
    lines = [code_lines(cell.source) for cell in cells]
    assert statistics.median(lines) <= 3, lines
    assert max(lines) <= 15, lines
    words = sum(len(cell.source.split()) for cell in read(path).cells if cell.cell_type == "markdown")
    assert words >= 8 * sum(lines), f"{words} words of prose for {sum(lines)} lines of code"


@named
def test_a_notebook_defines_nothing(path: Path) -> None:
    for cell in code_cells(path):
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
            # GB and GiB have one home: the units module
            assert not (isinstance(node, ast.Constant) and node.value in (1e9, 10**9, 2**30)), cell.source


@named
def test_a_notebook_imports_from_the_door(path: Path) -> None:
    imports = [
        line.strip()
        for cell in code_cells(path)
        for line in cell.source.splitlines()
        if line.strip().startswith(("import ", "from "))
    ]
    assert "import hicache_lab as hl" in imports
    assert len(imports) <= 3, imports
    assert sum(line.count(",") for line in imports) <= 4, imports


@named
def test_the_order_is_question_goal_parameters_cases(path: Path) -> None:
    cells = read(path).cells
    title = cells[0].source.splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("?")
    assert "What you will know" in cells[0].source
    assert is_parameters(cells[1])
    assert "Other cases to try" in cells[2].source
    assert "> **" in cells[2].source, "a banner says what is recorded, computed or measured"
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert any(text.startswith("## Conclusion") for text in texts)
    assert "What next" in texts[-1]


@named
def test_every_parameter_says_its_type_and_meaning(path: Path) -> None:
    parameters = inspect_parameters(path)
    assert parameters
    for parameter in parameters.values():
        assert parameter.comment, f"{parameter.name} has no comment"
        assert parameter.accepts(parameter.default)


@named
def test_a_figure_is_followed_by_what_is_seen_and_preceded_where_there_are_controls(path: Path) -> None:
    cells = read(path).cells
    figure_seen = False
    for place, cell in enumerate(cells):
        if cell.cell_type == "code" and FIGURES.search(cell.source):
            figure_seen = True
            assert cells[place + 1].cell_type == "markdown", f"cell {place}: no sentence after the figure"
        if cell.cell_type == "code" and WIDGETS.search(cell.source) and "import" not in cell.source:
            assert figure_seen, "a static figure stands before the controls"


@named
def test_a_notebook_leaves_a_record(path: Path) -> None:
    assert "record(" in "".join(cell.source for cell in code_cells(path))


def run(name: str, folder: Path, **parameters: Any) -> RunResult:
    result = execute(notebooks_dir() / f"{name}.ipynb", folder, parameters, progress=False)
    assert result.error is None, result.error
    assert load_result(folder) == result
    return result


def test_01_tells_the_incident(tmp_path: Path) -> None:
    result = run("01_incident", tmp_path / "run")
    assert result.value("verdict") == "OOM_RISK"
    assert result.value("per_rank_tokens") == 4_269_126
    assert round(result.value("host_gb")) == 2400
    assert result.figures["peak_used_gb"].source == "reconstructed"
    assert (result.value("replayed_oom_kills"), result.figures["replayed_oom_kills"].source) == (7, "simulated")
    settings = {row["setting"]: (row["verdict"], row["taken on the host (GB)"]) for row in result.value("settings")}
    assert settings["--hicache-size 48"] == ("TIGHT", 384.0)
    assert settings["--hicache-ratio 2.5"] == ("FITS", 163.0)
    assert settings["the same on 0.5.19"][0] == "REFUSED"
    claims = {row["claim"] for row in result.value("claims")}
    stated = json.loads((data_dir() / "incidents" / "kimi-k25-hicache-300" / "claims.json").read_text())["claims"]
    assert claims == {claim["claim"] for claim in stated}
    page = (tmp_path / "run" / "01_incident.html").read_text()
    assert page.count('class="plotly-graph-div"') == 5


def test_01_takes_another_incident_folder(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(data_dir() / "incidents" / "kimi-k25-hicache-300", tmp_path / "mine")
    path = tmp_path / "mine" / "incident.json"
    path.write_text(path.read_text().replace("--hicache-size 300", "--hicache-size 43"))
    try:
        with memory_group(64 * MB):
            source = "replayed"
    except HostError:  # no memory control group here: the model alone tells the race
        source = "simulated"
    result = run("01_incident", tmp_path / "run", incident=str(tmp_path / "mine"), physical=source == "replayed")
    assert (result.value("verdict"), round(result.value("host_gb"))) == ("FITS", 344)
    assert (result.value("replayed_oom_kills"), result.figures["replayed_oom_kills"].source) == (0, source)


def test_02_explains_a_release(tmp_path: Path) -> None:
    result = run("02_what_the_flags_mean", tmp_path / "run", sglang_version="0.5.19")
    assert result.value("size_per_rank_tokens") == 683_061
    assert result.value("ratio_per_rank_tokens") == 290_001
    assert result.value("size_verdict") == "RACE"
    assert result.value("releases")["0.5.8"] != result.value("releases")["0.5.19"]


@pytest.mark.parametrize(("version", "contradicted"), [("0.5.8", False), ("0.5.19", True)])
def test_02_says_what_a_tree_contradicts(tmp_path: Path, version: str, contradicted: bool) -> None:
    from source_trees import NO_CACHE, write

    tree = write(tmp_path / "tree", {}, NO_CACHE, version=version)
    run("02_what_the_flags_mean", tmp_path / "run", source_path=str(tree))
    page = (tmp_path / "run" / "02_what_the_flags_mean.html").read_text()
    assert "era E, 0 differences" in page
    assert ("But the tree calls itself 0.5.19, which is era G" in page) == contradicted


def test_03_answers_before_the_controls(tmp_path: Path) -> None:
    result = run("03_tuner", tmp_path / "run", hicache_size=300)
    assert (result.value("verdict"), result.value("largest_size_gb")) == ("OOM_RISK", 43)
    assert "--hicache-size 300" in result.value("launch_line")
    page = (tmp_path / "run" / "03_tuner.html").read_text()
    assert page.count('class="plotly-graph-div"') == 1
    assert "open this notebook in JupyterLab" in page


def test_04_takes_no_overhead_as_not_given(tmp_path: Path) -> None:
    result = run("04_preflight", tmp_path / "run", host_ram="449GB", available="445GB", overhead="")
    assert result.value("largest_size_gb") == 48


@pytest.mark.parametrize("host_ram", ["449GB", ""], ids=["stated", "this-machine"])
def test_04_judges_a_line_on_a_host(tmp_path: Path, host_ram: str) -> None:
    result = run("04_preflight", tmp_path / "run", host_ram=host_ram, available="445GB" if host_ram else "")
    assert ("available_gb" in result.figures) == (host_ram == "")
    if host_ram:
        assert result.value("verdict") == "OOM_RISK"
        assert "--hicache-size 43" in result.value("corrected_line")
    else:
        assert result.figures["available_gb"].source == "measured"
        assert result.value("available_gb") > 0


def test_07_decides_from_a_recorded_sweep(tmp_path: Path) -> None:
    result = run("07_sweep", tmp_path / "run")
    assert result.value("skipped") == 2
    assert round(result.value("safe_gb"), 2) == 394.26
    # from ratio 4 on all that comes back is found; it takes least of those
    assert result.value("take") == "ratio 4"
    hits = {row["setting"]: row["hit_share (share of prompt tokens)"] for row in result.value("table")}
    assert hits["ratio 1.5"].endswith("inside the noise")
    assert hits["ratio 4"].endswith("higher")
    assert {"decision.md", "decision.html"} <= set(result.files)
    assert "Not enough host memory available. Requesting 300.00 GB" in (tmp_path / "run" / "decision.md").read_text()


def test_07_runs_a_grid_of_its_own(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    varying = Path(__file__).parent / "notebooks" / "varying.ipynb"
    label = "<img src=x onerror=alert(1)>"
    grid.write_text(f"label: mine\nnotebook: {varying}\naxes: {{size_gb: [{{label: '{label}', value: 48}}, 13]}}\n")
    result = execute(NOTEBOOKS[6], tmp_path / "run", {"grid": str(grid), "run": True}, progress=False)
    assert (result.value("points"), result.value("take")) == (2, label)
    assert "mine/sweep.json" in result.files
    # a label is nobody's markup, and the command to go on names the folder that is there
    for page in ("07_sweep.html", "decision.html"):
        assert not re.search(r'<img [^>]*onerror="?alert', (tmp_path / "run" / page).read_text()), page
    command = f"hicache-lab sweep {grid} --output {tmp_path / 'run'} --label mine --resume"
    assert command in (tmp_path / "run" / "decision.md").read_text()
