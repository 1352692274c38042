"""A sweep runs what may run, survives whatever stops it, and never does a point twice."""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

import hicache_lab
from hicache_lab.base.errors import HostError, InputError, ServerError, UsageError
from hicache_lab.base.units import GB
from hicache_lab.cli import main
from hicache_lab.host import HostMemory
from hicache_lab.host.processes import ProcessId
from hicache_lab.runs import Limits, load_result
from hicache_lab.runs.results import Failure, Figure, RunResult
from hicache_lab.sweeps import Options, Plan, SweepRecord, load_grid, load_sweep, make_plan, run_sweep
from hicache_lab.sweeps.collecting import collect

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
STAND_IN = Path(__file__).parents[1] / "fixtures" / "stand_in_server"
QUIET = Options(html=False, progress=False)


def plan_of(folder: Path, text: str, notebook: str = "varying", host: HostMemory | None = None) -> Plan:
    path = folder / "grid.yaml"
    path.write_text(f"notebook: {NOTEBOOKS / notebook}.ipynb\n{text}")
    return make_plan(load_grid(path), host=host)


def statuses(record: SweepRecord) -> dict[str, str]:
    return {point.label: point.status for point in record.points}


class Quick:
    """In place of ``execute`` where not the notebook is in question: writes a run folder at once."""

    def __init__(self) -> None:
        self.ran: list[dict[str, Any]] = []
        self.failing: Callable[[dict[str, Any]], BaseException | None] = lambda _parameters: None

    def __call__(self, notebook: Path, folder: Path, parameters: dict[str, Any], **_options: object) -> RunResult:
        error = self.failing(parameters)
        if error is not None:
            raise error
        self.ran.append(dict(parameters))
        failed = parameters.get("size_gb") == 13
        result = RunResult(
            notebook=notebook.stem,
            notebook_sha256=hashlib.sha256(notebook.read_bytes()).hexdigest(),
            status="failed" if failed else "complete",
            parameters=parameters,
            given=(),
            started_at="2026-01-01",
            seconds=0.1,
            hicache_lab=hicache_lab.__version__,
            python="3",
            figures={"output_tokens_per_s": Figure(600.0 + parameters.get("seed", 0), "tokens/s", "measured")},
            error=Failure("RuntimeError", "thirteen", 2, "raise", "Traceback: thirteen") if failed else None,
        )
        folder.mkdir(parents=True, exist_ok=True)
        result.write(folder)
        return result


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Quick:
    found = Quick()
    monkeypatch.setattr("hicache_lab.sweeps.engine.execute", found)
    return found


# ---- real notebooks


def test_a_broken_point_is_recorded_and_the_grid_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parents[1]))
    plan_of(
        tmp_path,
        "label: story\naxes: {size_gb: [48, 13, 300]}\nparameters: {seconds: 0}\ncompare: {baseline: size_gb=48}\n",
    )
    command = ["sweep", str(tmp_path / "grid.yaml"), "--output", str(tmp_path), "--no-images", "--no-html"]
    assert main(command) == 1
    shown = capsys.readouterr().out
    assert "failed  size_gb=13" in shown
    assert "RuntimeError in code cell 5: thirteen is too much" in shown
    assert "2 of 3 points complete (0 from before), 1 failed, 0 skipped" in shown
    record = load_sweep(tmp_path / "story")
    assert statuses(record) == {"size_gb=48": "complete", "size_gb=13": "failed", "size_gb=300": "complete"}
    error = record.points[1].error
    assert error is not None
    assert "RuntimeError: thirteen is too much" in error.traceback
    report = (tmp_path / "story" / "comparison.md").read_text()
    assert "thirteen is too much" in report
    assert f"--output {tmp_path} --label story --resume" in report
    # the setting is named as it is called
    assert "\nTake size_gb=300: output throughput" in report
    # what was complete is kept, what failed is tried again
    assert main(command) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    before = {point.label: (tmp_path / "story" / point.folder).stat().st_mtime_ns for point in record.points}
    assert main([*command, "--resume", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(point["status"], point["reused"]) for point in found["points"]] == [
        ("complete", True), ("failed", False), ("complete", True),
    ]  # fmt: skip
    after = {point["label"]: (tmp_path / "story" / point["folder"]).stat().st_mtime_ns for point in found["points"]}
    assert [label for label in before if before[label] != after[label]] == ["size_gb=13"]
    # kernels of runs side by side would share sockets left in the working directory
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.yaml", "story"]


def test_a_hanging_point_is_stopped_and_the_grid_goes_on(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "axes: {seconds: [600.0, 0.0]}\nlimits: {cell_seconds: 3}")
    record = run_sweep(plan, tmp_path / "out", QUIET)
    assert statuses(record) == {"seconds=600.0": "timed_out", "seconds=0.0": "complete"}
    assert record.points[0].error is not None
    assert "3 s a cell" in record.points[0].error.message
    assert load_sweep(tmp_path / "out") == record


def start_sweep(tmp_path: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hicache_lab", "sweep", str(tmp_path / "grid.yaml"), "--output", str(tmp_path)]
    return subprocess.Popen(
        [*command, "--no-images", "--no-html", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen[bytes] | None = None, seconds: float = 240
) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        assert process is None or process.poll() is None, process.stderr and process.stderr.read().decode()
        time.sleep(0.05)
    raise AssertionError(f"nothing happened within {seconds} s")


def running_points(folder: Path) -> list[Path]:
    """Hidden folders of runs whose notebook has recorded its first figure."""
    return [path.parent for path in (folder / "points").glob(".*.partial/record.json")]


def test_a_kill_9_in_the_middle_loses_only_the_run_under_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_of(tmp_path, "label: killed\naxes: {seconds: [0.0, 4.0, 0.1]}\n")
    folder = tmp_path / "killed"
    process = start_sweep(tmp_path)
    try:
        wait_until(lambda: (folder / "sweep.json").is_file() and load_sweep(folder).count("complete") == 1, process)
        wait_until(lambda: running_points(folder), process)
        # while it runs, nobody else may
        assert main(["sweep", str(tmp_path / "grid.yaml"), "--output", str(tmp_path), "--resume"]) == 2
        assert f"another sweep runs in this folder (process {process.pid})" in capsys.readouterr().err
        process.kill()
        process.wait()
    finally:
        process.kill()
        process.communicate()
    record = load_sweep(folder)
    assert statuses(record) == {"seconds=0.0": "complete", "seconds=4.0": "pending", "seconds=0.1": "pending"}
    first = folder / record.points[0].folder
    before = first.stat().st_mtime_ns
    again = run_sweep(
        make_plan(load_grid(tmp_path / "grid.yaml")), folder, Options(resume=True, html=False, progress=False)
    )
    assert [(point.status, point.reused) for point in again.points] == [
        ("complete", True), ("complete", False), ("complete", False),
    ]  # fmt: skip
    assert first.stat().st_mtime_ns == before
    # nothing half-written is left
    assert sorted(path.name for path in (folder / "points").iterdir()) == sorted(
        Path(p.folder).name for p in again.points
    )


def test_a_schedulers_term_closes_the_run_and_keeps_the_rest(tmp_path: Path) -> None:
    plan_of(tmp_path, "label: stopped\naxes: {seconds: [600.0, 0.0]}\n")
    process = start_sweep(tmp_path)
    try:
        wait_until(lambda: running_points(tmp_path / "stopped"), process)
        process.terminate()
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.communicate()
    record = load_sweep(tmp_path / "stopped")
    assert statuses(record) == {"seconds=600.0": "interrupted", "seconds=0.0": "pending"}
    assert load_result(tmp_path / "stopped" / record.points[0].folder).status == "interrupted"


def test_workers_run_side_by_side_and_one_that_dies_does_not_end_the_grid(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "axes: {seconds: [600.0, 12.0, 0.0]}\nlimits: {cell_seconds: 200}\n")
    folder = tmp_path / "out"
    # the worker that runs the first point is killed as the kernel's OOM killer would do it
    with ThreadPoolExecutor(1) as beside:
        victim = beside.submit(_kill_worker_of, folder, "600.0")
        record = run_sweep(plan, folder, Options(jobs=2, html=False, progress=False))
        assert victim.result() > 0
    # its neighbour goes on, and its place is filled again
    assert statuses(record) == {"seconds=600.0": "failed", "seconds=12.0": "complete", "seconds=0.0": "complete"}
    assert [point.error.kind for point in record.points if point.error] == ["WorkerDied"]


def _kill_worker_of(folder: Path, seconds: str) -> int:
    wait_until(lambda: any(seconds in path.name for path in running_points(folder)))
    [place] = [path for path in running_points(folder) if seconds in path.name]
    pid = int(place.name.split(".")[-2].partition("-")[0])
    os.kill(pid, signal.SIGKILL)
    return pid


def test_an_interrupted_pool_closes_its_runs(tmp_path: Path) -> None:
    plan_of(tmp_path, "label: pool\naxes: {seconds: [600.0, 601.0, 0.0]}\nlimits: {cell_seconds: 200}\n")
    process = start_sweep(tmp_path, "--jobs", "2")
    try:
        wait_until(lambda: len(running_points(tmp_path / "pool")) == 2, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.communicate()
    assert statuses(load_sweep(tmp_path / "pool")) == {
        "seconds=600.0": "interrupted", "seconds=601.0": "interrupted", "seconds=0.0": "pending",
    }  # fmt: skip


def test_workers_end_with_a_killed_sweep(tmp_path: Path) -> None:
    plan_of(tmp_path, "label: orphans\naxes: {seconds: [600.0, 601.0]}\nlimits: {cell_seconds: 200}\n")
    process = start_sweep(tmp_path, "--jobs", "2")
    try:
        wait_until(lambda: len(running_points(tmp_path / "orphans")) == 2, process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 4
    finally:
        process.kill()
        process.communicate()
    _, alive = psutil.wait_procs(children, timeout=45)
    assert [child.cmdline() for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


# ---- the engine


def test_a_longer_grid_keeps_what_is_there(tmp_path: Path, quick: Quick) -> None:
    run_sweep(plan_of(tmp_path, "axes: {size_gb: [48, 300]}"), tmp_path / "out", QUIET)
    more = plan_of(tmp_path, "axes: {size_gb: [24, 48, 300, 1000]}")
    record = run_sweep(more, tmp_path / "out", Options(resume=True, html=False, progress=False))
    assert [run["size_gb"] for run in quick.ran] == [48, 300, 24, 1000]
    assert [point.reused for point in record.points] == [False, True, True, False]


def test_nothing_to_resume_is_a_beginning(tmp_path: Path, quick: Quick) -> None:
    record = run_sweep(plan_of(tmp_path, ""), tmp_path / "out", Options(resume=True, html=False, progress=False))
    assert [point.status for point in record.points] == ["complete"]
    assert len(quick.ran) == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, quick: Quick) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years")
    with pytest.raises(UsageError, match="not a sweep folder"):
        run_sweep(plan_of(tmp_path, ""), tmp_path / "out", QUIET)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "thesis.txt"]
    assert not quick.ran


def test_a_full_disk_stops_the_grid_and_resume_goes_on(tmp_path: Path, quick: Quick) -> None:
    plan = plan_of(tmp_path, "axes: {size_gb: [48, 300]}")
    quick.failing = lambda given: HostError("no space left") if given["size_gb"] == 300 else None
    with pytest.raises(HostError, match="no space"):
        run_sweep(plan, tmp_path / "out", QUIET)
    assert statuses(load_sweep(tmp_path / "out")) == {"size_gb=48": "complete", "size_gb=300": "pending"}
    quick.failing = lambda _given: None
    run_sweep(plan, tmp_path / "out", Options(resume=True, html=False, progress=False))
    assert [run["size_gb"] for run in quick.ran] == [48, 300]


def test_a_point_that_cannot_be_tried_is_recorded(tmp_path: Path, quick: Quick) -> None:
    plan = plan_of(tmp_path, "axes: {size_gb: [48, 300]}")
    quick.failing = lambda given: InputError("the notebook is gone") if given["size_gb"] == 48 else None
    record = run_sweep(plan, tmp_path / "out", QUIET)
    assert statuses(record) == {"size_gb=48": "failed", "size_gb=300": "complete"}
    assert record.points[0].error is not None
    assert "InputError: the notebook is gone" in record.points[0].error.traceback


def test_what_the_grid_wants_and_no_run_has_is_said_and_loses_nothing(
    tmp_path: Path, quick: Quick, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(
        tmp_path,
        "label: x\naxes: {size_gb: [13, 48, 300]}\n"
        "compare: {baseline: size_gb=13, objective: output_token_per_s, metrics: [output_tokens_per_s, nope]}",
    )
    command = ["sweep", str(plan.grid.path), "--output", str(tmp_path), "--no-images"]
    assert main(command) == 1
    shown = capsys.readouterr().out
    assert "2 settings against size_gb=48" in shown
    assert "baseline size_gb=13 is in no complete run and was left aside" in shown
    assert "objective output_token_per_s is in no complete run and was left aside; did you mean output_tok" in shown
    assert "figure nope is in no complete run" in shown
    assert (tmp_path / "x" / "comparison.html").is_file()
    assert main(["compare", str(tmp_path / "x")]) == 0
    assert "baseline size_gb=13 is in no complete run" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "x"), "--baseline", "size_gb=13"]) == 2


def test_the_report_says_how_to_go_on(
    tmp_path: Path, quick: Quick, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my grids").mkdir()
    shutil.copy(NOTEBOOKS / "varying.ipynb", "my grids/mine.ipynb")
    Path("my grids/g.yaml").write_text("notebook: mine.ipynb\naxes: {size_gb: [48]}\n")
    assert main(["sweep", "my grids/g.yaml", "--output", "out", "--label", "other", "--no-images"]) == 0
    command = re.findall(r"```text\nhicache-lab (.*)\n```", Path("out/other/comparison.md").read_text())[-1]
    assert main([*shlex.split(command), "--no-images"]) == 0
    assert "1 of 1 points complete (1 from before)" in capsys.readouterr().out
    assert len(quick.ran) == 1


def test_two_sweeps_are_told_apart_by_their_folders(
    tmp_path: Path, quick: Quick, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(tmp_path, "label: x\naxes: {size_gb: [48]}\n")
    for night in ("monday", "tuesday"):
        run_sweep(plan, tmp_path / night / "x", QUIET)
    assert main(["compare", str(tmp_path / "monday" / "x"), str(tmp_path / "tuesday" / "x"), "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert [(one["label"], one["runs"]) for one in settings] == [
        ("monday/x: size_gb=48", 1),
        ("tuesday/x: size_gb=48", 1),
    ]


def test_a_notebook_that_changes_meanwhile_is_not_taken_for_the_planned_one(tmp_path: Path, quick: Quick) -> None:
    notebook = tmp_path / "mine.ipynb"
    notebook.write_bytes((NOTEBOOKS / "varying.ipynb").read_bytes())
    (tmp_path / "grid.yaml").write_text("notebook: mine.ipynb")
    plan = make_plan(load_grid(tmp_path / "grid.yaml"))
    notebook.write_bytes(notebook.read_bytes() + b"\n")
    record = run_sweep(plan, tmp_path / "out", QUIET)
    assert record.points[0].error is not None
    assert record.points[0].error.kind == "NotebookChanged"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "x"}, "expected .schema."),
        ({"schema_version": 9}, "reads version 1"),
        ({"points": [{}]}, "another form"),
        ({"points": "status"}, "status 'fine' is none of"),
        ({"points": "folder"}, "lies outside the sweep"),
    ],
)
def test_a_record_of_another_form_is_refused(
    tmp_path: Path, quick: Quick, change: dict[str, Any], message: str
) -> None:
    run_sweep(plan_of(tmp_path, ""), tmp_path / "out", QUIET)
    raw = json.loads((tmp_path / "out" / "sweep.json").read_text())
    if change.get("points") == "status":
        raw["points"][0]["status"] = "fine"
    elif change.get("points") == "folder":
        raw["points"][0]["folder"] = "../../etc"
    else:
        raw |= change
    (tmp_path / "out" / "sweep.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=message):
        load_sweep(tmp_path / "out")


def test_repeats_are_compared_as_one_setting(tmp_path: Path, quick: Quick) -> None:
    plan = plan_of(tmp_path, "axes: {size_gb: [48, 300]}\nrepeats: 3\nrepeat_parameter: seed")
    run_sweep(plan, tmp_path / "out", QUIET)
    found = collect([str(tmp_path / "out")])
    assert [one.label for one in found.observations] == ["size_gb=48"] * 3 + ["size_gb=300"] * 3
    assert [one.values["output_tokens_per_s"].value for one in found.observations] == [600, 601, 602] * 2


# ---- servers

LINE = (
    f"PYTHONPATH={STAND_IN} STAND_IN_NOTE='two words' {sys.executable} -m sglang.launch_server --model-path kimi-k2.5 "
    "--tp-size 8 --port {port} --enable-hierarchical-cache --hicache-size {hicache_size}"
)
HOST = HostMemory.stated(total_bytes=449 * GB, available_bytes=445 * GB)


def server_plan(tmp_path: Path, axes: str, more: str = "", between: str = "flush") -> Plan:
    server = (
        f"server:\n  launch: >-\n    {LINE}\n  sglang_version: 0.5.8\n  ready_seconds: 60\n  between_runs: {between}\n"
    )
    return plan_of(
        tmp_path, f"{server}  facts: {{device_tokens: 116000}}\naxes: {{hicache_size: {axes}}}\n{more}", host=HOST
    )


def test_a_launch_line_is_started_used_and_stopped(tmp_path: Path) -> None:
    plan = server_plan(tmp_path, "[48, 300]", "repeats: 2\n")
    record = run_sweep(plan, tmp_path / "out", QUIET)
    assert [(point.label, point.status) for point in record.points] == [
        ("hicache_size=48", "complete"),
        ("hicache_size=48", "complete"),
        ("hicache_size=300", "skipped"),
        ("hicache_size=300", "skipped"),
    ]
    assert record.points[2].decision.verdict == "OOM_RISK"
    one, two = (load_result(tmp_path / "out" / point.folder) for point in record.points[:2])
    assert "--hicache-size 48" in one.value("server_arguments")
    assert one.value("server_note") == "two words"
    # one server for both runs, emptied between them
    assert one.value("server_pid") == two.value("server_pid")
    assert (one.value("server_flushes"), two.value("server_flushes")) == (0, 1)
    assert not psutil.pid_exists(one.value("server_pid"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".lock", "grid.yaml", "points", "servers", "sweep.json",
    ]  # fmt: skip
    reasons = dict(collect([str(tmp_path / "out")]).left_out)
    assert reasons["hicache_size=300"].startswith("skipped: OOM_RISK")


def test_a_server_that_does_not_start_is_its_points_failure(tmp_path: Path, quick: Quick) -> None:
    record = run_sweep(server_plan(tmp_path, "[13, 48]"), tmp_path / "out", QUIET)
    assert statuses(record) == {"hicache_size=13": "failed", "hicache_size=48": "complete"}
    error = record.points[0].error
    assert error is not None
    assert error.kind == "ServerError"
    assert "ValueError: thirteen is not served here" in error.message
    assert len(quick.ran) == 1


def test_restart_gives_every_run_a_server_of_its_own(tmp_path: Path, quick: Quick) -> None:
    started: list[str] = []
    quick.failing = lambda given: started.append(given["base_url"])  # type: ignore[func-returns-value]
    run_sweep(server_plan(tmp_path, "[48]", "repeats: 2\n", between="restart"), tmp_path / "out", QUIET)
    assert len(started) == 2
    assert len(list((tmp_path / "out" / "servers").glob("*.log"))) == 2


def test_a_server_left_by_a_killed_sweep_is_stopped(tmp_path: Path, quick: Quick) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    try:
        ours = asdict(ProcessId.of(left.pid))
        (folder / "server.json").write_text(json.dumps(ours))
        (tmp_path / "other").mkdir()
        # the number of a process that is not ours any more
        earlier = ours | {"pid": stranger.pid, "start_ticks": ours["start_ticks"] - 3600}
        (tmp_path / "other" / "server.json").write_text(json.dumps(earlier))
        from hicache_lab.sweeps.servers import ServerHost

        side = server_plan(tmp_path, "[48]").grid.server
        assert side is not None
        for name in ("out", "other"):
            with ServerHost(side, tmp_path / name):
                assert not (tmp_path / name / "server.json").exists()
        left.wait(timeout=10)
        assert stranger.poll() is None
    finally:
        for process in (left, stranger):
            process.kill()
            process.wait()


@pytest.fixture
def existing() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(STAND_IN)})
    try:
        from hicache_lab.serving.local import health

        wait_until(lambda: health(port) == 200)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("between", "flushes"), [("keep", 0), ("flush", 2)])
def test_an_existing_server_is_flushed_only_when_asked(
    tmp_path: Path, quick: Quick, existing: str, between: str, flushes: int
) -> None:
    from urllib.request import urlopen

    text = f"server: {{base_url: '{existing}', between_runs: {between}}}\naxes: {{size_gb: [48, 300]}}"
    record = run_sweep(plan_of(tmp_path, text), tmp_path / "out", QUIET)
    assert set(statuses(record).values()) == {"complete"}
    assert {run["base_url"] for run in quick.ran} == {existing}
    with urlopen(f"{existing}/server") as reply:
        assert json.load(reply)["flushes"] == flushes


def test_a_server_that_is_not_there_is_said_before_the_first_point(tmp_path: Path, quick: Quick) -> None:
    plan = plan_of(tmp_path, "server: {base_url: http://127.0.0.1:9}\naxes: {size_gb: [48, 300]}")
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
        run_sweep(plan, tmp_path / "out", QUIET)
    assert not quick.ran


def test_runs_against_a_server_are_made_one_by_one(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "server: {base_url: http://127.0.0.1:9}")
    with pytest.raises(UsageError, match="one after the other"):
        run_sweep(plan, tmp_path / "out", Options(jobs=2, limits=Limits()))
