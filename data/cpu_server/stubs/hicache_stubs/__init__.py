"""Stubs for what an unmodified SGLang imports but a machine without a GPU does not have.

Two import hooks: ``absent`` answers for packages that are not installed (their names import, their kernels
raise when called); ``patches`` adjusts a few modules right after they were imported. No result is ever made
up: what cannot be done without a GPU raises.
"""

import sys

from .absent import AbsentPackages
from .patches import PATCHES, PatchAfterImport


def install() -> None:
    """Put both hooks on the import path; a package that is really installed wins over its stub."""
    if not any(isinstance(finder, AbsentPackages) for finder in sys.meta_path):
        sys.meta_path.append(AbsentPackages())
        sys.meta_path.insert(0, PatchAfterImport(PATCHES))
