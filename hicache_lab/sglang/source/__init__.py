"""Read an SGLang source tree by its syntax: where host memory is sized and checked, and which rules that follows."""

from hicache_lab.sglang.source.facts import Constructor, Fact
from hicache_lab.sglang.source.reader import MEANING, Difference, Era, Reading, eras, read_helpers, read_source
from hicache_lab.sglang.source.tree import Line, Tree, installed_tree, open_tree, tree_from

__all__ = [
    "MEANING",
    "Constructor",
    "Difference",
    "Era",
    "Fact",
    "Line",
    "Reading",
    "Tree",
    "eras",
    "installed_tree",
    "open_tree",
    "read_helpers",
    "read_source",
    "tree_from",
]
