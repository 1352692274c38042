"""Imports point down only, and importing the package stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hicache_lab"
LAYERS = [
    {"units", "errors", "resources", "compiled", "machine_code"},
    {"geometry", "models", "releases", "host", "launch", "traces"},
    {"sizing", "resolution", "logs", "cachesim", "server"},
    {"preflight", "incident", "replay", "load", "source", "vectors"},
    {"casefile", "comparison", "figures", "hosttier", "payoff", "runs", "tables", "cpuserver", "serverrun"},
    {"widgets", "sweeps", "report"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def noun(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_nouns(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hicache_lab"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("hicache_lab.")}
    return found - {"__version__"}


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if noun(path) not in {"__init__", "__main__"}]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = noun(path)
    assert here in LEVEL, f"{here} has no layer: add it to LAYERS and to docs/structures.md"
    for other in imported_nouns(path) - {here}:
        assert LEVEL[other] <= LEVEL[here], f"{here} (L{LEVEL[here]}) imports {other} (L{LEVEL[other]})"
        # units and errors are the floor; elsewhere a neighbour may be used, but never both ways
        if LEVEL[other] == LEVEL[here] > 0:
            back = [p for p in MODULES if noun(p) == other and here in imported_nouns(p)]
            assert not back, f"{here} and {other} import each other"


def test_importing_the_package_is_light() -> None:
    heavy = ["plotly", "ipywidgets", "papermill", "numba", "pandas"]
    code = f"import sys, hicache_lab, hicache_lab.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
