"""Parameters are checked first, a folder is whole or not there, and every end leaves a valid record."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np
import pytest

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.cli import main
from hicache_lab.host.processes import start_ticks
from hicache_lab.runs import (
    Limits,
    check_parameters,
    execute,
    inspect_parameters,
    load_result,
    parse_parameter,
    record,
)
from hicache_lab.runs.execution import _clear
from hicache_lab.runs.html import notebook_html
from hicache_lab.runs.recording import RUN_FOLDER_VARIABLE, read_records

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
GOOD, BROKEN = NOTEBOOKS / "good.ipynb", NOTEBOOKS / "broken.ipynb"


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports") / "good"
    assert execute(GOOD, folder, {"hicache_size_gb": 48}, progress=False).complete
    return folder


def test_parameters_are_read_with_types_defaults_and_comments() -> None:
    found = inspect_parameters(GOOD)
    assert [str(parameter) for parameter in found.values()] == [
        "hicache_size_gb: int = 300  # GB (1e9) for each rank",
        "ratio: float = 2.0  # host tokens over device tokens",
        "title: str = 'a # b'  # shown as it is",
        "path: str | None = None  # None: the shipped one",
        "sizes: list[int] = [48, 300]  # GB",
        "verbose: bool = False",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hicache_size": 48}, "did you mean hicache_size_gb"),
        ({"hicache_size_gb": "48"}, "expected int, got str '48'"),
        ({"hicache_size_gb": 48.5}, "expected int, got float 48.5"),
        ({"hicache_size_gb": True}, "expected int, got bool True"),
        ({"hicache_size_gb": None}, "expected int, got NoneType"),
        ({"ratio": "2"}, "expected float"),
        ({"verbose": 1}, "expected bool"),
        ({"sizes": 48}, "expected list"),
    ],
)
def test_misspelt_and_ill_typed_parameters_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_parameters(GOOD, given)


@pytest.mark.parametrize(
    "given",
    [
        {"api_key_env": "sk-do-not-print-me-91f2"},
        {"base_url": "https://user:sk-do-not-print-me-91f2@h"},
        {"base_url": "https://h/?key=sk-do-not-print-me-91f2"},
    ],
)
def test_a_key_given_as_a_parameter_is_refused_before_anything_is_recorded(
    given: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"-p{name}={value}" for name, value in given.items()]
    assert main(["run", "06_server_run", "--output", str(tmp_path / "reports"), *words]) == 2
    told = capsys.readouterr()
    assert "api_key_env" in told.err
    assert "sk-do-not" not in told.out + told.err
    assert not (tmp_path / "reports").exists()


def test_defaults_fill_what_is_not_given() -> None:
    values = check_parameters(GOOD, {"ratio": 2, "path": "x.log"})
    assert values == {
        "hicache_size_gb": 300,
        "ratio": 2,
        "title": "a # b",
        "path": "x.log",
        "sizes": [48, 300],
        "verbose": False,
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("hicache_size_gb", "1,024", 1024),
        ("ratio", "2.5", 2.5),
        ("title", "48", "48"),
        ("path", "None", None),
        ("path", "a=b", "a=b"),
        ("sizes", "[1, 2]", [1, 2]),
        ("verbose", "true", True),
    ],
)
def test_words_become_the_declared_type(name: str, text: str, value: object) -> None:
    assert parse_parameter(inspect_parameters(GOOD)[name], text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hicache_size_gb", "48.5"),
        ("hicache_size_gb", "4,8"),
        ("hicache_size_gb", "1,2345"),
        ("ratio", "2,5"),
        ("ratio", "two"),
        ("verbose", "maybe"),
        ("sizes", "[1"),
    ],
)
def test_words_of_another_type_are_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        parse_parameter(inspect_parameters(GOOD)[name], text)


def test_a_comment_belongs_to_its_parameter_wherever_the_formatter_put_it(tmp_path: Path) -> None:
    source = 'line: str = (\n    "a "\n    "b"  # inside\n)\nsize: int = (\n    48\n)  # behind'
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "x.ipynb")
    found = inspect_parameters(tmp_path / "x.ipynb")
    assert [(one.default, one.comment) for one in found.values()] == [("a b", "inside"), (48, "behind")]


def test_a_default_that_is_not_a_literal_is_refused(tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell("size: int = 8 * gpus", metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "x.ipynb")
    with pytest.raises(InputError, match="literal default, got '8 \\* gpus'"):
        inspect_parameters(tmp_path / "x.ipynb")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        "not json",
        '{"cells": 1}',
        '{"nbformat": 4, "cells": 7}',
        '{"nbformat": 4, "cells": [1]}',
    ],
)
def test_what_is_not_a_notebook_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.ipynb").write_text(content)
    with pytest.raises(InputError, match=r"x\.ipynb"):
        execute(tmp_path / "x.ipynb", tmp_path / "run", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["x.ipynb"]


def test_a_run_leaves_its_record(good_run: Path) -> None:
    result = load_result(good_run)
    assert result.value("host_gb") == 384
    assert result.figures["host_gb"].unit == "GB"
    assert result.figures["host_gb"].source == "computed"
    assert result.value("title") == "a # b"
    assert (result.given, result.parameters["hicache_size_gb"]) == (("hicache_size_gb",), 48)
    assert result.files == ("good.html", "good.ipynb", "notes.txt", "result.json")
    assert sorted(path.name for path in good_run.iterdir()) == list(result.files)
    assert [path.name for path in good_run.parent.iterdir()] == ["good"]


def test_the_page_opens_offline_and_holds_plotly_once(good_run: Path) -> None:
    page = (good_run / "good.html").read_text()
    assert "Plotly.newPlot" in page
    assert page.count("plotly.js v") == 1
    for tag in ("<script src", "<link rel", 'src="http', "@jupyter-widgets", "cdnjs", 'import("http'):
        assert tag not in page, tag
    assert "</script><b>size" not in page


def test_widgets_are_named_and_never_fetched() -> None:
    output = nbformat.v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("w", outputs=[output])])
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    page = notebook_html(notebook, "a <b> title")
    assert "open this notebook in JupyterLab" in page
    assert "<title>a &lt;b&gt; title</title>" in page
    assert "unpkg" not in page
    assert "widgets" in notebook.metadata


def test_a_failing_cell_is_recorded_with_its_traceback(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    assert execute(BROKEN, folder, progress=False, html=False).status == "failed"
    result = load_result(folder)
    assert result.error is not None
    assert (result.error.kind, result.error.message) == ("RuntimeError", "size 300 is too much")
    assert "raise RuntimeError" in result.error.cell_source
    assert "RuntimeError: size 300 is too much" in result.error.traceback
    assert "\x1b" not in result.error.traceback
    assert list(result.figures) == ["before"]
    assert (folder / "broken.ipynb").exists()


@pytest.mark.parametrize(
    ("limits", "message"),
    [(Limits(cell_seconds=1), "1 s a cell"), (Limits(run_seconds=2.5), "run's limit of 2.5 s")],
    ids=["cell", "run"],
)
def test_a_hanging_cell_is_stopped(tmp_path: Path, limits: Limits, message: str) -> None:
    result = execute(NOTEBOOKS / "hanging.ipynb", tmp_path / "hang", limits=limits, progress=False, html=False)
    assert result.status == "timed_out"
    assert result.error is not None
    assert message in result.error.message
    assert result.seconds < 60
    assert load_result(tmp_path / "hang") == result


def test_a_dead_kernel_is_recorded(tmp_path: Path) -> None:
    result = execute(NOTEBOOKS / "dying.ipynb", tmp_path / "dying", progress=False, html=False)
    assert (result.status, result.error.kind if result.error else "") == ("failed", "DeadKernelError")


def test_limits_are_positive() -> None:
    with pytest.raises(UsageError, match="positive seconds"):
        Limits(cell_seconds=0)


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not a run folder"):
        execute(GOOD, tmp_path / "mine", progress=False)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_leftovers_of_a_killed_run_are_removed_and_a_living_one_is_kept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    started = start_ticks(dead.pid)
    dead.wait()
    (tmp_path / f".run.{dead.pid}-{started}.partial").mkdir()
    # in a container the number of a killed process comes back at once: here it is this process's own
    (tmp_path / f".run.{os.getpid()}-1.partial").mkdir()
    living = f".run.{os.getppid()}-{start_ticks(os.getppid())}.partial"
    (tmp_path / living).mkdir()
    execute(NOTEBOOKS / "dying.ipynb", tmp_path / "run", progress=False, html=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [living, "run"]


def test_a_run_that_was_killed_just_before_it_was_in_place_is_put_there(tmp_path: Path) -> None:
    finished, earlier = tmp_path / ".run.1-1.partial", tmp_path / ".run.1-1.replaced"
    for folder, what in ((finished, "new"), (earlier, "old")):
        folder.mkdir()
        (folder / "result.json").write_text(what)
    _clear(finished, tmp_path / "run")
    assert (tmp_path / "run" / "result.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_ran(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, and a job that is cancelled; a load takes a moment to write what it measured."""
    command = [
        sys.executable,
        "-m",
        "hicache_lab",
        "run",
        str(NOTEBOOKS / "measuring.ipynb"),
        "--output",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    try:
        _wait_for(lambda: list(tmp_path.glob(".measuring.*/started.txt")), process)
        time.sleep(1)
        process.send_signal(number)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.communicate()
    result = load_result(tmp_path / "measuring")
    assert result.status == "interrupted"
    assert "measured.txt" in result.files
    assert (tmp_path / "measuring" / "measured.txt").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["measuring"]


def test_a_cell_that_is_stopped_at_its_limit_keeps_what_it_measured(tmp_path: Path) -> None:
    result = execute(
        NOTEBOOKS / "measuring.ipynb", tmp_path / "run", limits=Limits(cell_seconds=3), html=False, progress=False
    )
    assert result.status == "timed_out"
    assert "measured.txt" in result.files


def _wait_for(condition: object, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert callable(condition)
        if condition():
            return
        assert process.poll() is None
        time.sleep(0.1)
    raise AssertionError("the notebook did not start within 60 s")


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    yield tmp_path


def test_numpy_scalars_and_tables_are_plain_json(recording: Path) -> None:
    record("tokens", np.int64(683_061), unit="tokens", source="computed")
    record("rows", [{"claim": "2.4 TB", "agrees": np.bool_(True)}], source="computed")
    record("tokens", np.float32(2.5), source="measured")
    assert read_records(recording) == {
        "tokens": {"value": 2.5, "unit": "", "source": "measured"},
        "rows": {"value": [{"claim": "2.4 TB", "agrees": True}], "unit": "", "source": "computed"},
    }
    assert [path.name for path in recording.iterdir()] == ["record.json"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), np.array([1, 2]), {1}])
def test_values_that_json_cannot_hold_are_refused(recording: Path, value: object) -> None:
    with pytest.raises(UsageError, match="bad"):
        record("bad", value, source="computed")
    assert not list(recording.iterdir())


def test_a_figure_says_where_it_comes_from() -> None:
    with pytest.raises(UsageError, match="guessed"):
        record("x", 1, source="guessed")


def test_recording_in_an_interactive_session_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(RUN_FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    record("x", 1, source="computed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other"}, "not the record of a hicache-lab run"),
        ({"schema_version": 2}, "reads version 1"),
        ({"status": "fine"}, "status 'fine'"),
        ({"figures": {"x": {"value": 1}}}, "missing or of another form"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_record_of_another_form_is_refused(
    good_run: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    raw = json.loads((good_run / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(raw | change))
    with pytest.raises(InputError, match=message):
        load_result(tmp_path)


def test_a_value_that_was_not_recorded_names_those_that_were(good_run: Path) -> None:
    with pytest.raises(InputError, match="no figure 'host_gib'; it has host_gb, title"):
        load_result(good_run).value("host_gib")


def test_the_command_lists_parameters_and_refuses_before_running(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", str(GOOD), "--help"]) == 0
    assert "hicache_size_gb: int = 300  # GB (1e9) for each rank" in capsys.readouterr().out
    assert main(["run", str(GOOD), "-p", "hicache_siez_gb=48", "--output", str(tmp_path)]) == 2
    assert "did you mean hicache_size_gb" in capsys.readouterr().err
    assert main(["run", str(GOOD), str(BROKEN), "-p", "title", "--output", str(tmp_path)]) == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err
    assert main(["run", str(GOOD), "--name", "../x", "--output", str(tmp_path)]) == 2
    assert "--name: expected letters, digits, dot" in capsys.readouterr().err
    assert main(["run", str(GOOD), "--timeout", "nan", "--output", str(tmp_path)]) == 2
    assert "time limits are positive seconds" in capsys.readouterr().err
    assert main(["run", "nowhere.ipynb", "--output", str(tmp_path)]) == 1
    assert "no such file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_exits_1_when_a_notebook_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", str(BROKEN), "--output", str(tmp_path), "--no-html", "--json"]) == 1
    [shown] = json.loads(capsys.readouterr().out)
    assert (shown["status"], shown["folder"]) == ("failed", str(tmp_path / "broken"))
