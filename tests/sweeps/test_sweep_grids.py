"""A grid means what it says, every point is checked before anything runs, and unsafe servers are never launched."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.units import GB
from hicache_lab.cli import main
from hicache_lab.host import HostMemory
from hicache_lab.sweeps import Grid, load_grid, make_plan
from hicache_lab.sweeps.reading import read_yaml
from hicache_lab.sweeps.server_side import fill_in, split_environment

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "varying.ipynb"
INCIDENT_HOST = HostMemory.stated(total_bytes=449 * GB, available_bytes=445 * GB)
LINE = (
    "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp-size 8 --port {port} "
    "--enable-hierarchical-cache --hicache-size {hicache_size} --hicache-ratio {hicache_ratio}"
)


def grid_of(tmp_path: Path, text: str) -> Grid:
    path = tmp_path / "grid.yaml"
    path.write_text(text if "notebook:" in text else f"notebook: {NOTEBOOK}\n{text}")
    return load_grid(path)


def test_axes_multiply_and_zipped_names_change_together(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        "axes:\n  - size_gb: [48, 300]\n  - {seed: [1, 2, 3], seconds: [0.1, 0.2, null]}\n",
    )
    assert [label for label, _ in grid.combinations()] == [
        "size_gb=48, seed=1 seconds=0.1",
        "size_gb=48, seed=2 seconds=0.2",
        "size_gb=48, seed=3",
        "size_gb=300, seed=1 seconds=0.1",
        "size_gb=300, seed=2 seconds=0.2",
        "size_gb=300, seed=3",
    ]
    assert grid.combinations()[4][1] == {"size_gb": 300, "seed": 2, "seconds": 0.2}


def test_ranges_include_their_end_and_are_exact(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path, "axes: {seconds: {from: 0.1, to: 0.5, step: 0.1}, size_gb: {from: 300, to: 48, step: -126}}"
    )
    assert [row[0] for row in grid.axes[0].rows] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert [row[0] for row in grid.axes[1].rows] == [300, 174, 48]
    assert all(isinstance(row[0], int) for row in grid.axes[1].rows)


@settings(max_examples=25, deadline=None)
@given(start=st.integers(-50, 50), count=st.integers(1, 30), step=st.integers(1, 9))
def test_a_range_has_every_step(tmp_path_factory: pytest.TempPathFactory, start: int, count: int, step: int) -> None:
    folder = tmp_path_factory.mktemp("grid")
    end = start + (count - 1) * step
    grid = grid_of(folder, f"axes: {{size_gb: {{from: {start}, to: {end}, step: {step}}}}}")
    assert [row[0] for row in grid.axes[0].rows] == [start + n * step for n in range(count)]


def test_values_may_have_names(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "axes:\n  - size_gb: [{label: off, value: 0}, {label: ratio 1.5, value: 48}, 300]\n")
    assert [label for label, _ in grid.combinations()] == ["off", "ratio 1.5", "size_gb=300"]


def test_yaml_says_what_it_looks_like(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: off\nb: 1e3\nc: 12:30\nd: 1_000\ne: 010\nf: true\ng: ~\nh: -2.5\ni: .inf\nj: no\n")
    assert read_yaml(path)[0] == {
        "a": "off", "b": 1000.0, "c": "12:30", "d": 1000, "e": 10, "f": True, "g": None, "h": -2.5, "i": float("inf"),
        "j": "no",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"x\.yaml:3: 'a' is there twice"),
        ("a: [1, 2", r"x\.yaml:1: "),
        ("- 1", "expected a mapping"),
        ("", "got nothing"),
        ("a: !!python/object/apply:os.system ['true']", r"x\.yaml:1: could not determine a constructor"),
        ("a: \x00", "not YAML|special characters"),
    ],
)
def test_what_is_not_a_grid_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_grid(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axis: {}", "axis: not known here; did you mean axes"),
        ("notebook: 7", "notebook: expected an .ipynb"),
        ("label: a/b", "label: expected letters"),
        ("repeats: 0", "repeats: expected a whole number"),
        ("repeats: true", "repeats: expected a whole number"),
        ("axes: 3", "axes: expected a list"),
        ("axes: [3]", "axes: expected `- name: values`"),
        ("axes: {size_gb: []}", "axes: size_gb: expected a list of values"),
        ("axes: {size_gb: 48}", "axes: size_gb: expected a list of values"),
        ("axes: {size_gb: {from: 1}}", "axes: size_gb: expected {from"),
        ("axes: {size_gb: {from: 1, to: 3, step: -1}}", "a step that leads"),
        ("axes: {size_gb: {from: 1, to: 3, stpe: 1}}", "did you mean step"),
        ("axes: {size_gb: {from: 1, to: 1e9}}", "at most 1,000 steps"),
        ("axes: [{size_gb: [1, 2], seed: [1]}]", "size_gb has 2, seed has 1"),
        ("axes: {size_gb: [48, 48]}", "size_gb=48 is there twice"),
        ("axes: [{size_gb: [1]}, {size_gb: [2]}]", "size_gb: in axes and in another axis"),
        ("axes: {size_gb: [1]}\nparameters: {size_gb: 2}", "in axes and in parameters"),
        ("axes: {size_gb: {from: 1, to: 600}, seed: [1, 2]}", "1,200 points, more than 1,000"),
        ("limits: {cell_seconds: 0}", "limits: cell_seconds: expected a number above 0"),
        ("limits: {cell_seconds: .nan}", "limits: cell_seconds: expected a number above 0"),
        ("limits: {run_seconds: .inf}", "limits: run_seconds: expected a number above 0"),
        ("limits: {points: 1.5}", "limits: points: expected a whole number"),
        ("limits: {cell_second: 3}", "did you mean cell_seconds"),
        ("compare: {metrics: ttft}", "compare: metrics: expected a list"),
        ("server: {}", "server: expected one of base_url, launch and cpu"),
        ("server: {base_url: http://127.0.0.1:1, cpu: {}}", "got str 'base_url, cpu'"),
        ("server: {base_url: ftp://x}", "base_url: expected http"),
        ("server: {cpu: {release: 9.9}}", "server: cpu: release: expected 0.5.10 or 0.5.23"),
        ("server: {launch: x, sglang_version: 0.5.8, facts: {host_ram: 449GB}}", "whose memory is measured"),
        ("server: {launch: x, sglang_version: 0.5.8, facts: {device_token: 1}}", "did you mean device_tokens"),
        ("server: {launch: 'a \"b', sglang_version: 0.5.8}", "quotes do not match"),
        ("server: {launch: x}", "server: sglang_version: expected a text"),
        ("server: {launch: x, sglang_version: 0.5.8, between_runs: wipe}", "expected keep or flush or restart"),
    ],
)
def test_every_key_is_checked(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grid_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: {size_bg: [48]}", "size_bg: neither a parameter of varying.ipynb.*did you mean size_gb"),
        ("parameters: {sede: 1}", "did you mean seed"),
        ("parameters: {zzzz: 1}", "placeholder} of the server. Parameters: size_gb"),
        ("axes: {seconds: [2, 2.0]}", "seconds=2, seconds=2.0: the same point twice"),
        ("axes: {seed: [1, 2]}\nrepeats: 2\nrepeat_parameter: seed", "repeat_parameter: seed is an axis"),
        (
            "axes:\n - size_gb: [{label: a, value: 1}, {label: 'a, b', value: 2}]\n"
            " - seed: [{label: 'b, c', value: 1}, {label: c, value: 2}]",
            "'a, b, c' names 2 different settings",
        ),
        ("axes: {size_gb: [48, 300]}\ncompare: {baseline: size_gb=47}", "'size_gb=47'; did you mean size_gb=48"),
        ("axes: {size_gb: [48, 4.5]}", "size_gb=4.5: parameter size_gb: expected int, got float"),
        ("axes: {size_gb: ['48']}", "expected int, got str '48'"),
        ("axes: {size_gb: [off]}", "expected int, got str 'off'"),
        ("repeats: 2\nrepeat_parameter: seconds", "no int parameter 'seconds'"),
        ("axes: {size_gb: [{label: a, value: 1}, {label: b, value: 1}]}", "a, b: the same point twice"),
        ("server: {base_url: http://127.0.0.1:1}\nparameters: {base_url: x}", "given by `server:`"),
        (
            "server: {launch: 'python -m sglang.launch_server --model-path x --port {port} --tp {tp_szie}', "
            "sglang_version: 0.5.8}\nparameters: {tp_size: 8}",
            "tp_size: neither a parameter.*did you mean tp_szie",
        ),
        (
            "server: {launch: 'python -m sglang.launch_server --model-path x --port {port} --tp {tp_size}', "
            "sglang_version: 0.5.8}",
            r"server: \{tp_size\} has no value",
        ),
    ],
)
def test_names_and_types_are_refused_before_anything_runs(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(grid_of(tmp_path, text))


def test_a_server_needs_a_notebook_that_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(f"notebook: {NOTEBOOK.with_name('good.ipynb')}\nserver: {{base_url: http://127.0.0.1:1}}")
    with pytest.raises(UsageError, match="no parameter base_url"):
        make_plan(load_grid(path))


def test_repeats_raise_the_seed_and_keep_the_label(tmp_path: Path) -> None:
    plan = make_plan(
        grid_of(tmp_path, "axes: {size_gb: [48, 300]}\nrepeats: 3\nrepeat_parameter: seed\nparameters: {seed: 7}")
    )
    assert [(p.label, p.repeat, p.parameters["seed"]) for p in plan.points[:4]] == [
        ("size_gb=48", 0, 7),
        ("size_gb=48", 1, 8),
        ("size_gb=48", 2, 9),
        ("size_gb=300", 0, 7),
    ]
    assert len({point.folder for point in plan.points}) == 6


def test_a_point_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folders(text: str) -> list[str]:
        return [point.folder for point in make_plan(grid_of(tmp_path, text)).points]

    before = folders("axes: {size_gb: [48, 300]}")
    assert folders("axes: {size_gb: [300, 100, 48]}")[::2] == before[::-1]
    # a value that is given and equals the default is the same run
    assert folders("axes: {size_gb: [48, 300]}\nparameters: {seed: 0}") == before
    assert not set(folders("axes: {size_gb: [48, 300]}\nparameters: {seed: 1}")) & set(before)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("one")
    named = folders(f"parameters: {{trace: {trace}}}")
    trace.write_text("two")
    assert folders(f"parameters: {{trace: {trace}}}") != named
    monkeypatch.setattr("hicache_lab.__version__", "99")
    assert not set(folders("axes: {size_gb: [48, 300]}")) & set(before)


def test_templates_are_words_and_never_a_shell() -> None:
    values = {"size": 48, "ratio": None, "more": "--page-size 64 --tag 'a b'", "evil": "1; rm -rf $HOME", "on": True}
    assert fill_in("x --hicache-size {size} --hicache-ratio {ratio} {more} --log-{on}", values) == (
        "x", "--hicache-size", "48", "--page-size", "64", "--tag", "a b", "--log-true",
    )  # fmt: skip
    assert fill_in("x --tag=v{size} --hicache-ratio={ratio} --a 'say {evil}'", values) == (
        "x", "--tag=v48", "--a", "say 1; rm -rf $HOME",
    )  # fmt: skip
    assert fill_in("""x --json '{"a": {"b": 1}}' {port}""", {}) == ("x", "--json", '{"a": {"b": 1}}', "{port}")
    assert split_environment(("A=1", "B=", "x", "C=2")) == ({"A": "1", "B": ""}, ("x", "C=2"))


def incident_grid(tmp_path: Path, axes: str, version: str = "0.5.8", facts: str = "{device_tokens: 116000}") -> Grid:
    return grid_of(
        tmp_path,
        f"server:\n  launch: >-\n    {LINE}\n  sglang_version: {version}\n  facts: {facts}\naxes:\n  - {axes}\n",
    )


def test_points_that_risk_the_host_are_skipped_with_the_arithmetic(tmp_path: Path) -> None:
    grid = incident_grid(tmp_path, "{hicache_size: [48, 300, null, null], hicache_ratio: [null, null, 2.5, 0.5]}")
    plan = make_plan(grid, host=INCIDENT_HOST)
    decided = {point.label: point.decision for point in plan.points}
    assert {point.label: (point.status == "pending", point.decision.verdict) for point in plan.points} == {
        "hicache_size=48": (True, "FITS"),
        "hicache_size=300": (False, "OOM_RISK"),
        "hicache_ratio=2.5": (True, "FITS"),
        "hicache_ratio=0.5": (False, "ASSERT"),
    }
    assert "8 ranks × 300.00 GB = 2,400 GB" in decided["hicache_size=300"].reason
    assert decided["hicache_size=300"].host_bytes == 8 * 4_269_126 * 70_272
    assert all(point.status == "pending" for point in make_plan(grid, host=INCIDENT_HOST, allow_unsafe=True).points)


def test_a_refusal_is_foretold_with_its_text(tmp_path: Path) -> None:
    grid = incident_grid(tmp_path, "{hicache_size: [300], hicache_ratio: [null]}", version="0.5.19")
    [point] = make_plan(grid, host=INCIDENT_HOST).points
    assert (point.status == "pending", point.decision.verdict) == (False, "REFUSED")
    assert "54.28" in point.decision.reason


def test_a_missing_fact_is_not_taken_for_safe(tmp_path: Path) -> None:
    grid = incident_grid(tmp_path, "{hicache_size: [null], hicache_ratio: [2.0]}", facts="{}")
    [point] = make_plan(grid, host=INCIDENT_HOST).points
    assert (point.status == "pending", point.decision.verdict) == (False, "UNKNOWN")
    assert "server: facts:` takes device_tokens" in point.decision.reason


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--host 0.0.0.0 --port {port}", "expected 127.0.0.1"),
        ("", "expected --port"),
        ("--port {port} --api-key abc", "--api-key: the line is recorded"),
    ],
)
def test_a_launch_stays_on_this_machine_and_holds_no_key(tmp_path: Path, line: str, message: str) -> None:
    grid = grid_of(
        tmp_path,
        f"server: {{sglang_version: 0.5.8, launch: 'python -m sglang.launch_server --model-path kimi-k2.5 {line}'}}",
    )
    with pytest.raises(UsageError, match=message):
        make_plan(grid, host=INCIDENT_HOST)


def test_a_token_in_the_environment_of_a_line_is_refused(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        f"server: {{sglang_version: 0.5.8, launch: 'HF_TOKEN=abc {LINE.split(' --tp', maxsplit=1)[0]} --port 1'}}",
    )
    with pytest.raises(UsageError, match="HF_TOKEN: the line is recorded"):
        make_plan(grid, host=INCIDENT_HOST)


def test_the_cpu_server_is_judged_by_its_own_model(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        "server: {cpu: {release: 0.5.23, flags: '{tier}'}}\n"
        "axes:\n"
        "  - tier: [{label: off, value: ''}, {label: ratio 4, value: --enable-hierarchical-cache --hicache-ratio 4},\n"
        "           {label: size 900, value: --enable-hierarchical-cache --hicache-size 900}]\n",
    )
    host = HostMemory.stated(total_bytes=64 * GB, available_bytes=60 * GB)
    plan = make_plan(grid, host=host)
    assert [(p.label, p.status == "pending", p.decision.verdict) for p in plan.points] == [
        ("off", True, "FITS"),
        ("ratio 4", True, "FITS"),
        ("size 900", False, "REFUSED"),
    ]
    # 8,193 tokens (8,192 and a page of one) of 4 layers × 2 heads × 16 × 2 (K and V) × 2 bytes
    assert plan.points[1].decision.host_bytes == 8193 * 4 * 2 * 16 * 2 * 2


def test_points_of_one_server_stand_together_unless_it_is_restarted(tmp_path: Path) -> None:
    text = (
        "server: {{cpu: {{release: 0.5.23, flags: '--page-size {{page}}'}}, between_runs: {between}}}\n"
        "axes: [{{seed: [1, 2]}}, {{page: [1, 16]}}]\nrepeats: 2\n"
    )
    together = make_plan(grid_of(tmp_path, text.format(between="flush"))).points
    assert [point.settings["page"] for point in together] == [1, 1, 1, 1, 16, 16, 16, 16]
    apart = make_plan(grid_of(tmp_path, text.format(between="restart"))).points
    assert [point.repeat for point in apart] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_check_shows_every_point_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = incident_grid(tmp_path, "{hicache_size: [48, 300], hicache_ratio: [null, null]}")
    command = ["sweep", str(grid.path), "--check", "--output", str(tmp_path / "out")]
    assert main([*command, "--host-ram", "449GB", "--available", "445GB"]) == 3
    shown = capsys.readouterr().out
    assert "run   hicache_size=48  FITS" in shown
    assert "skip  hicache_size=300  OOM_RISK" in shown
    assert main([*command, "--json", "--host-ram", "4490GB"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["verdict"] for point in points] == ["FITS", "FITS"]
    assert main(["sweep", str(grid.path), "--host-ram", "4490GB"]) == 2
    assert "only with --check" in capsys.readouterr().err
    assert main([*command, "--label", "../elsewhere"]) == 2
    assert "--label: expected letters" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
