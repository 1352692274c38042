"""An event loop of its own, for callers that have none, or have one already (Jupyter)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on the event loop of a new thread.

    Ctrl-C cancels the work and returns what it then returns.
    """
    loop = asyncio.new_event_loop()
    outcome: list[Callable[[], T]] = []
    ended = threading.Event()
    task = loop.create_task(work)

    def run() -> None:
        try:
            value = loop.run_until_complete(task)
            outcome.append(lambda: value)
        except asyncio.CancelledError:
            outcome.append(lambda: _raise(KeyboardInterrupt()))
        except Exception as error:  # noqa: BLE001 - handed to the waiting thread, which raises it
            failure = error
            outcome.append(lambda: _raise(failure))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            ended.set()

    threading.Thread(target=run, name="hicache-lab load", daemon=True).start()
    # Thread.join may return early after a KeyboardInterrupt (CPython 3.11), an event does not
    while not ended.is_set():
        try:
            ended.wait(0.5)
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
    return outcome[0]()


def _raise(error: BaseException) -> Any:
    raise error
