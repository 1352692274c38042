"""Imports point down only, and importing the package stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hicache_lab"
# top to bottom; docs/structures.md is this table
WINGS = "cli sweeps views runs serving race forensics traffic preflight sizing sglang host base".split()
HEIGHT = {wing: -depth for depth, wing in enumerate(WINGS)}
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE]


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


NAMES = {dotted(path) for path in MODULES}


def imported(path: Path) -> set[str]:
    """Modules of this package that a module names in its imports, wherever in it they stand."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hicache_lab"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in NAMES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("hicache_lab.")}
    return found - {"hicache_lab"}


def wing(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = wing(dotted(path))
    assert here in HEIGHT, f"{here} is no wing: add it to WINGS and to docs/structures.md"
    for other in map(wing, imported(path)):
        assert HEIGHT[other] <= HEIGHT[here], f"{dotted(path)} imports {other}, which stands above {here}"


def door_names(path: Path) -> set[str]:
    """What a module takes from the package itself, wings and version aside: functions of the door."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ("hicache_lab", "hicache_lab.api"):
            found |= {alias.name for alias in node.names}
    return found - ({*WINGS, "__version__"} - {"preflight"})


def test_only_one_module_of_the_wings_looks_up_to_the_door() -> None:
    """Records ask ``base.display`` for their tables and figures; nothing else in the wings knows the door."""
    assert [dotted(path) for path in MODULES if door_names(path)] == ["hicache_lab.base.display"]


def rooms(parent: str) -> dict[str, set[str]]:
    """The modules and folders directly in a wing or a folder, each with its neighbours that it imports."""
    inside = {name for name in NAMES if name.startswith(parent + ".")}
    depth = parent.count(".") + 2

    def room(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    arrows: dict[str, set[str]] = {}
    for path in MODULES:
        name = dotted(path)
        if name in inside:
            targets = {room(other) for other in imported(path) if other in inside}
            arrows.setdefault(room(name), set()).update(targets - {room(name)})
    return arrows


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """One circle among the arrows, or nothing."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        found = next((c for other in sorted(arrows.get(name, ())) if (c := walk(other, [*path, name]))), [])
        done.add(name)
        return found

    return next((found for name in sorted(arrows) if (found := walk(name, []))), [])


FOLDERS = sorted({"hicache_lab"} | {dotted(path) for path in MODULES if path.name == "__init__.py"})


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_circle_in_a_folder(folder: str) -> None:
    assert circle(rooms(folder)) == []


def test_a_circle_would_be_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_importing_the_package_is_light() -> None:
    heavy = ["plotly", "ipywidgets", "papermill", "numba", "pandas"]
    code = f"import sys, hicache_lab, hicache_lab.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
