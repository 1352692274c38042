"""The project's own files agree with each other."""

import re
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STATED = [
    Requirement(line)
    for line in [
        *PROJECT["dependencies"],
        *(x for extra in PROJECT["optional-dependencies"].values() for x in extra),
    ]
]
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if re.match(r"[a-z0-9-]+==", line)
)
# where conda-forge's name is not PyPI's
CONDA_NAMES = {"python-kaleido": "kaleido", "playwright-python": "playwright"}


def test_conda_environment_states_the_same_packages_and_ranges() -> None:
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = {}
    for requirement in (Requirement(line) for line in lines if isinstance(line, str)):
        conda[canonicalize_name(CONDA_NAMES.get(requirement.name, requirement.name))] = str(requirement.specifier)
    assert conda.pop("python") == PROJECT["requires-python"]
    assert conda.pop("pip") == ""
    assert conda == {canonicalize_name(one.name): str(one.specifier) for one in STATED}
    assert {"pip": ["--editable ."]} in lines


@pytest.mark.parametrize("requirement", STATED, ids=str)
def test_the_pinned_set_is_within_the_ranges(requirement: Requirement) -> None:
    assert requirement.specifier.contains(Version(PINS[canonicalize_name(requirement.name)]))


def test_every_direct_import_is_a_stated_dependency() -> None:
    names = {"yaml": "pyyaml", "prometheus_client": "prometheus-client", "IPython": "ipywidgets"}
    names |= {"choreographer": "kaleido"}  # kaleido's own browser control
    stated = {canonicalize_name(one.name) for one in STATED}
    found = {}
    for path in (ROOT / "hicache_lab").rglob("*.py"):
        for module in re.findall(r"^\s*(?:from|import) ([A-Za-z_]\w*)", path.read_text(), re.MULTILINE):
            found[module] = path
    for module, path in found.items():
        if module not in sys.stdlib_module_names | {"hicache_lab"}:
            assert canonicalize_name(names.get(module, module)) in stated, f"{path} imports {module}"


def test_every_command_of_the_makefile_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert {"lab", "test", "jupyter", "bench", "e2e"} <= targets
    assert "sudo" not in makefile
    assert "apt" not in makefile.split()


def test_pre_commit_runs_what_make_test_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format", "mypy", "nbstripout", "codespell"}


def test_make_lab_runs_every_notebook() -> None:
    pattern = re.search(r"wildcard ([^)]+)\)", (ROOT / "Makefile").read_text())
    assert pattern is not None
    notebooks = {path.name for path in ROOT.glob("notebooks/*.ipynb")}
    assert {path.name for path in ROOT.glob(pattern[1])} == notebooks
    # and the next one, whatever its number
    assert fnmatch("notebooks/19_next.ipynb", pattern[1])
