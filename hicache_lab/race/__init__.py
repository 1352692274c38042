"""The incident again: as deterministic arithmetic, or with real processes and the kernel's OOM killer."""

from hicache_lab.race.model import RaceMap, memory_at, race_map, simulate
from hicache_lab.race.physical import enact
from hicache_lab.race.scenario import Guard, RankStory, Replay, Sample, Story, story_of_release

__all__ = [
    "Guard",
    "RaceMap",
    "RankStory",
    "Replay",
    "Sample",
    "Story",
    "enact",
    "memory_at",
    "race_map",
    "simulate",
    "story_of_release",
]
