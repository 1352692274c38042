"""No command prints a credential that stands in what it reads."""

import json
from pathlib import Path

import pytest

from hicache_lab.cli import main
from hicache_lab.sglang.launch import parse_launch, parse_server_args, render_launch

EXTRA = {"tp_lcm_size": 8, "access_token": "sesame-1", "redis": {"password": "sesame-2"}}
ARGUMENTS = {
    "model_path": "moonshotai/Kimi-K2.5",
    "tp_size": 8,
    "hicache_size": 48,
    "hicache_storage_backend_extra_config": json.dumps(EXTRA),
    "watermark_key": "sesame-3",
    "admin_api_key": "sesame-4",
    "ssl_keyfile_password": "sesame-5",
}
DUMPS = [
    f"ServerArgs({', '.join(f'{name}={value!r}' for name, value in ARGUMENTS.items())})",
    repr(ARGUMENTS),
    json.dumps(ARGUMENTS),
]


@pytest.mark.parametrize("dump", DUMPS)
@pytest.mark.parametrize("command", ["parse", "diagnose"])
def test_parse_and_diagnose(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, dump: str) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"[2026-01-02 03:04:05] server_args={dump}\n[2026-01-02 03:04:06 TP0] Load weight begin.\n")
    for words in ([], ["--json"]):
        assert main([command, str(log), *words]) in (0, 3, 4)
        printed = "".join(capsys.readouterr())
        assert "sesame" not in printed
        if words and command == "parse":
            assert "***" in printed and "tp_lcm_size" in printed


@pytest.mark.parametrize("dump", DUMPS)
def test_a_dump_as_a_launch(dump: str) -> None:
    assert "sesame" not in repr(parse_server_args(f"server_args={dump}"))


def test_a_launch_line_keeps_the_rest_of_its_extra_config() -> None:
    line = (
        "python -m sglang.launch_server --model-path m --watermark-key sesame-3 "
        f"--hicache-storage-backend-extra-config '{json.dumps(EXTRA)}'"
    )
    config = parse_launch(line)
    assert "sesame" not in repr(config) and "sesame" not in render_launch(config)
    assert '"tp_lcm_size": 8, "access_token": "***"' in render_launch(config)
    assert any("is not kept" in note for note in config.notes)
