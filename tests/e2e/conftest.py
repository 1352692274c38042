"""Real servers for the end-to-end tests; every test below this folder carries the marker ``server``."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_lab.serving import cpu_server

HERE = Path(__file__).parent
_number = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.server)


@contextlib.contextmanager
def running(release: str, *flags: str, **options) -> Iterator[cpu_server.Server]:
    """A server for the length of a block, stopped whatever happens."""
    name = options.pop("name", f"e2e-{os.getpid()}-{next(_number)}")
    server = cpu_server.start(cpu_server.Launch(release=release, name=name, flags=flags, **options))
    try:
        yield server
    finally:
        stopped = cpu_server.stop(name)
        assert stopped.how in {"TERM", "KILL", "gone"}
        assert not server.alive
    shutil.rmtree(server.log_path.parent)  # a failed test leaves its log


@pytest.fixture(scope="module", params=cpu_server.RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each release that runs here."""
    return request.param


@pytest.fixture(scope="module")
def server(release: str) -> Iterator[cpu_server.Server]:
    """tp 1, ratio 4 over 2,048 device tokens."""
    with running(release) as started:
        yield started
