"""The incident again: as deterministic arithmetic, or with real processes and the kernel's OOM killer."""

from hicache_lab.race.model import RaceMap, race_map, simulate
from hicache_lab.race.physical import run_physical
from hicache_lab.race.scenario import (
    RaceResult,
    RaceSample,
    RankResult,
    Scenario,
    scenario_of_answer,
    scenario_of_release,
)

__all__ = [
    "RaceMap",
    "RaceResult",
    "RaceSample",
    "RankResult",
    "Scenario",
    "race_map",
    "run_physical",
    "scenario_of_answer",
    "scenario_of_release",
    "simulate",
]
