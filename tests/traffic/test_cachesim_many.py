from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache_lab.traffic.cachesim import ReplaySettings, WritePolicy, curves, replays
from hicache_lab.traffic.traces import Workload

WORKLOADS = [Workload(generator="multi_turn", parameters=(("sessions", 40), ("seed", seed))) for seed in range(3)]
POINTS = [
    ReplaySettings(20_000, host, page_size=64, write_policy=policy)
    for host in (0, 40_000)
    for policy in (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK)
]


def test_threads_give_what_one_after_another_gives() -> None:
    with ThreadPoolExecutor(2) as pool:
        parallel = {load: curve.ceiling for load, curve in curves(WORKLOADS, executor=pool)}
    assert parallel == {load: curve.ceiling for load, curve in curves(WORKLOADS)}


def test_results_come_one_by_one() -> None:
    first, _ = next(replays(WORKLOADS[0], POINTS))
    assert first == POINTS[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_dask_cluster_of_processes_gives_the_same(tmp_path: Path) -> None:
    from dask.config import set as configured
    from distributed import Client, LocalCluster

    expected = {point: result.cached_tokens.tolist() for point, result in replays(WORKLOADS[0], POINTS)}
    with (
        configured({"temporary_directory": str(tmp_path), "distributed.worker.daemon": True}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        executor = client.get_executor()
        found = {
            point: result.cached_tokens.tolist() for point, result in replays(WORKLOADS[0], POINTS, executor=executor)
        }
        ceilings = {load: curve.ceiling for load, curve in curves(WORKLOADS, executor=executor)}
        assert len(client.scheduler_info()["workers"]) == 2
    assert found == expected
    assert ceilings == {load: curve.ceiling for load, curve in curves(WORKLOADS)}
