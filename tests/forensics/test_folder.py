"""Files told apart by their content, whatever stands in their first lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_lab.cli import main


@pytest.mark.parametrize(
    "first_line",
    [
        "Loading shards:  10%|#   | 1/10\rLoading shards: 100%|####| 10/10",
        "time,total_bytes\rtime,total_bytes",
        '"' + "x" * 200_000,
        "MemTotal: " + "9" * 5000 + " kB",
        "time,total_bytes\n2026-01-01 00:00:00,1e308\n2026-01-01 00:00:01,nan",
        "{" * 3 + '"a":' + "[" * 100_000,
    ],
    ids=["progress bar", "old line ends", "endless cell", "huge number", "huge cell", "deep"],
)
def test_a_file_without_records_in_its_first_part_is_still_read(first_line: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    lines = "[2026-01-20 09:17:33 TP0] Decode batch, #running-req: 1, #token: 5, #queue-req: 0\n"
    path.write_text(f"{first_line}\n" + "noise\n" * 20_000 + lines, newline="")
    assert main(["parse", str(path)]) == 0
    assert main(["diagnose", str(tmp_path)]) == 0
