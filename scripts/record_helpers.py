"""Record how the helpers of a release's host-memory check stand: ``record_helpers.py 0.5.23=PATH_OR_WHEEL …``.

Run it once a release has been read and compared (`make conformance`): what it writes to ``data/guard_helpers.json`` is
what ``hicache-lab read-source`` takes for known from then on. Releases are given oldest first; only hashes are stored.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hicache_lab.base.files import atomic_write
from hicache_lab.base.resources import data_dir
from hicache_lab.sglang.releases import parse_version
from hicache_lab.sglang.source import open_tree, read_helpers


def main(arguments: list[str]) -> int:
    """Add the forms that are new; print them."""
    if not arguments or not all("=" in one for one in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    file = data_dir() / "guard_helpers.json"
    forms = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for release, path in (one.split("=", 1) for one in arguments):
        for name, hashes in read_helpers(open_tree(Path(path))).items():
            known = forms.setdefault(name, [])
            before = [form for form in known if parse_version(form["since"]) <= parse_version(release)]
            if not before or before[-1]["hashes"].split() != list(hashes):
                known.append({"since": release, "hashes": " ".join(hashes)})
                known.sort(key=lambda form: parse_version(form["since"]))
                print(f"{release}: {name}, {len(hashes)} rows")
    atomic_write(file, json.dumps(dict(sorted(forms.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
