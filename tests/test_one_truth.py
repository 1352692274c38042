"""The release's own check is asked of ``sizing.guard``: nothing else knows its reserve, its divisor or the ranks."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hicache_lab"
# what a release does and who counts with it; sglang/source reads the same rules out of a release's own files
HOME = ("sglang/releases.py", "sglang/source/", "sglang/launch/", "sizing/")
SECOND_TRUTH = re.compile(
    r"guard_divides_by_ranks"  # ask Budget.divides, divides_since() or read_free_amount()
    r"|RESERVE_BYTES|\b10 \* GIB|\b10 GiB|\b10\.0 \* GIB"  # ask Budget, beyond_reserve_bytes() or RESERVE_TEXT
    r"|//.*nnodes|//.*\bnodes\b|tp_size.*\*.*pp_size"  # ask LaunchConfig: ranks_per_host, processes_per_host
)
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}


def second_truths(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines() if SECOND_TRUTH.search(line)]


@pytest.mark.parametrize("name", sorted(name for name in MODULES if not name.startswith(HOME)))
def test_the_release_s_check_is_asked_of_one_place(name: str) -> None:
    found = second_truths(MODULES[name])
    assert not found, f"{name}: ask hicache_lab.sizing.guard or LaunchConfig instead: {found}"
