from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

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


def test_processes_give_the_same() -> None:
    expected = {point: result.cached_tokens.tolist() for point, result in replays(WORKLOADS[0], POINTS)}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        results = {
            point: result.cached_tokens.tolist() for point, result in replays(WORKLOADS[0], POINTS, executor=executor)
        }
        ceilings = {load: curve.ceiling for load, curve in curves(WORKLOADS, executor=executor)}
    assert results == expected
    assert ceilings == {load: curve.ceiling for load, curve in curves(WORKLOADS)}
