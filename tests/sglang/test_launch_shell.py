"""Pasted text is read as a shell reads it."""

import pytest

from hicache_lab.sglang.launch import parse_launch, render_launch

CONTINUED = [
    "python -m sglang.launch_server \\\n  --model-path m \\\n  --tp 8 \\\n  --hicache-size 48",
    "python -m sglang.launch_server \\   \n  --model-path m \\ \n  --tp 8 \\\t\n  --hicache-size 48",
    "python -m sglang.launch_server `\n  --model-path m `\n  --tp 8 `\n  --hicache-size 48",
    "python -m sglang.launch_server ^\r\n  --model-path m ^\r\n  --tp 8 ^\r\n  --hicache-size 48",
    "$ python -m sglang.launch_server \\\n>   --model-path m \\\n> --tp 8 --hicache-size 48",
    "python -m sglang.launch_server --model-path m\u00a0--tp 8 --hicache-size=48",
    "TP=8\npython -m sglang.launch_server --model-path m --tp $TP --hicache-size ${SIZE:-48}",
    'A="--tp 8 --hicache-size 48"\npython -m sglang.launch_server --model-path m $A',
    'A=(--tp 8  # ranks\n  --model-path m)\nA+=(--hicache-size 48)\npython -m sglang.launch_server "${A[@]}"',
    "python -m sglang.launch_server --model-path 'm' --t\\p \"8\" --hicache-si\\\nze 48",
]


@pytest.mark.parametrize("text", CONTINUED)
def test_lines_quotes_and_variables_are_read_as_a_shell_reads_them(text: str) -> None:
    config = parse_launch(text)
    assert (config.model, config.tp_size, config.hicache_size) == ("m", 8, 48)
    assert len(list(config.given())) == 3


def test_a_blank_after_the_backslash_is_noted() -> None:
    assert "line 1: a blank after the backslash" in parse_launch(CONTINUED[1]).notes[0]
    assert parse_launch(CONTINUED[0]).notes == ()


def test_environment() -> None:
    text = "export SGLANG_X=1\nA=2 env B='3 4' python -m sglang.launch_server --model-path m"
    assert parse_launch(text).env == (("SGLANG_X", "1"), ("A", "2"), ("B", "3 4"))


RECIPE = """#!/usr/bin/env bash
set -euo pipefail
source "$(dirname "$0")/lib.sh"
TP=${TP:-8}
HICACHE_SIZE=$(( MEM_GB / TP ))
ARGS=(
  --enable-hierarchical-cache  # the tier
  --hicache-size 270
)
if [[ "$X" == "1" ]]; then
  ARGS+=(--page-size 64)
fi
python3 -m sglang.launch_server \\
    --model-path="$MODEL" --port="$PORT" --tp="$TP" "${ARGS[@]}" \\
    > "$SERVER_LOG" 2>&1 &
SERVER_PID=$!
"""


def test_a_recipe_script() -> None:
    config = parse_launch(RECIPE, variables={"MODEL": "m"})
    assert (config.model, config.tp_size, config.hicache_size, config.page_size) == ("m", 8, 270, 64)
    assert any(note.startswith("line 10: this text branches") for note in config.notes)
    assert render_launch(config, changes={"hicache_size": 48}, multiline=False) == (
        'python3 -m sglang.launch_server --model-path=m --port="$PORT" --tp=8 --enable-hierarchical-cache '
        "--hicache-size 48 --page-size 64"
    )
