"""The incident's before and after as a sweep on the real server: what no device holds is found on the host."""

from pathlib import Path

import pytest

from hicache_lab.base.resources import data_dir
from hicache_lab.cli import main
from hicache_lab.serving import cpu_server
from hicache_lab.sweeps import collect, compare_collection, load_sweep

GRID = data_dir() / "sweeps" / "before-after" / "grid.yaml"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    # the shipped grid, once through instead of three times
    (folder / "grid.yaml").write_text(GRID.read_text().replace("repeats: 3", "repeats: 1"))
    command = ["sweep", str(folder / "grid.yaml"), "--output", str(folder), "--no-html", "--no-images"]
    # size 300 is refused by preflight, as the server would refuse it
    assert main(command) == 3
    return folder / "before-after"


def test_the_shipped_grid_runs_and_stops_its_servers(swept: Path) -> None:
    sweep = load_sweep(swept)
    assert {point.label: point.status for point in sweep.points} == {
        "HiCache off": "complete",
        "ratio 1.5": "complete",
        "ratio 2": "complete",
        "ratio 4": "complete",
        "size 1": "complete",
        "size 300": "skipped",
    }
    assert "Not enough host memory available. Requesting 300.00 GB" in sweep.points[-1].decision.reason
    assert not [server for server in cpu_server.status() if server.name.startswith("sweep-")]


def test_hits_move_to_the_host_as_the_simulator_said(swept: Path) -> None:
    compared = compare_collection(collect([str(swept)]))
    hits = {one.label: one.cells["hit_share"].median for one in compared.settings}
    # a host tier that holds less than all that comes back is scanned in a circle, and holds nothing when it is asked
    assert max(hits["HiCache off"], hits["ratio 1.5"]) < 0.001
    assert 0.3 < hits["ratio 2"] < hits["ratio 4"] - 0.2
    assert hits["ratio 4"] == pytest.approx(hits["size 1"], abs=0.001)
    pairs = {(pair.setting, pair.name): pair for pair in compared.pairs}
    for label in ("ratio 1.5", "ratio 2", "ratio 4", "size 1"):
        for name in ("host_tokens", "device_hit_tokens", "host_hit_tokens"):
            assert pairs[label, name].difference == 0, (label, name)
