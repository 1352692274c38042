"""Write constraints.txt: the versions installed here of all that pyproject.toml needs, directly or not."""

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HEAD = """\
# The tested set (Python 3.11, Linux). make installs with it; pyproject.toml states the supported ranges.
# Written by `make constraints` from what .venv holds; run `make test` before committing it.
"""


def main() -> None:
    """Walk the requirements from pyproject.toml through the installed packages' own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]
    waiting, seen, pins = [Requirement(line) for line in stated], set(), {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        package = metadata.distribution(name)
        pins[name] = package.version
        for line in package.requires or []:
            needed = Requirement(line)
            wanted = ["", *requirement.extras]
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in wanted):
                waiting.append(needed)
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    (ROOT / "constraints.txt").write_text(HEAD + "".join(lines))
    print(f"constraints.txt: {len(lines)} packages")


if __name__ == "__main__":
    main()
