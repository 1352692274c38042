"""Launches from flags alone, and configurations with some flags changed."""

from dataclasses import replace
from pathlib import Path

import pytest

from hicache_lab.base.errors import UsageError
from hicache_lab.sglang.launch import LaunchConfig, changed, launch_from_flags, parse_launch, render_launch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hicache_sise": 4}, "hicache_sise: not a flag of a launch; did you mean hicache_size?"),
        ({"hicache_size": "48GB"}, "--hicache-size: expected a whole number of GB"),
        ({"tp_size": 1.5}, "--tp-size: expected a whole number"),
        ({"hicache_size": True}, "--hicache-size: expected a value, got True"),
        ({"enable_hierarchical_cache": 1}, "expected True, False or None"),
        ({"other": ()}, "other: not a flag"),
    ],
)
def test_a_bad_change_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        render_launch(LaunchConfig(model="m"), changes=changes)


def test_changes_by_option_name() -> None:
    config = changed(LaunchConfig(model="m", hicache_ratio=2.0), {"--hicache-size": 48, "--enable-hicache": True})
    assert (config.hicache_size, config.hicache_ratio, config.enable_hierarchical_cache) == (48, None, True)
    both = changed(config, {"hicache_size": 4, "hicache_ratio": 2.0})
    assert (both.hicache_size, both.hicache_ratio) == (4, 2.0)
    assert changed(both, {"enable_hierarchical_cache": False}).enable_hierarchical_cache is None


@pytest.mark.parametrize(
    ("argv", "fields_", "expected"),
    [
        (["--tp", "8", "--hicache-size=48"], {}, LaunchConfig(tp_size=8, hicache_size=48, sglang_version="0.5.8")),
        (["--tp", "8"], {"model": "m", "tp_size": 4}, LaunchConfig("m", "0.5.8", tp_size=4)),
        ([], {"model": "m", "enable_hierarchical_cache": True}, parse_launch("sglang serve m --enable-hier")),
    ],
)
def test_a_launch_from_flags_alone(argv: list[str], fields_: dict[str, object], expected: LaunchConfig) -> None:
    config = launch_from_flags(argv, sglang_version="0.5.8", **fields_)
    assert config == replace(expected, sglang_version="0.5.8")
    assert parse_launch(render_launch(config), sglang_version="0.5.8") == config


@pytest.mark.parametrize("argv", [["--tp-size", "two"], ["8"], ["--page-size"], ["--dis", "1"], ["--tp-size", "$TP"]])
def test_flags_alone_are_checked_as_on_a_line(argv: list[str]) -> None:
    with pytest.raises(UsageError) as alone:
        launch_from_flags(argv)
    with pytest.raises(UsageError) as line:
        parse_launch(["python", "-m", "sglang.launch_server", *argv])
    assert str(alone.value) == str(line.value)


def test_config_file_of_flags_alone(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("tp-size: 4\n")
    assert launch_from_flags(["--config", "run.yaml"], base_dir=tmp_path).tp_size == 4
    assert "not read" in launch_from_flags(["--config", "run.yaml"]).notes[0]
