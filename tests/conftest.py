"""What every test folder shares; its presence puts ``tests/`` on the path, where the fakes and references lie."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def browser_or_skip() -> str:
    """The path of a chromium. A machine without one skips the test with the reason; in CI that is a failure."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((path for name in names if (path := shutil.which(name))), None)
    if path is not None:
        return path
    if os.environ.get("CI") == "true":
        pytest.fail("CI needs a browser: apt-get install chromium")
    pytest.skip("no chromium on this machine (apt-get install chromium): what a browser draws is untested here")
