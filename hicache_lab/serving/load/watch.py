"""The server's counters over time, scraped beside a load and read after it."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from hicache_lab.base.errors import ServerError
from hicache_lab.serving.client import SglangClient, parse_metrics
from hicache_lab.serving.client.untrusted import whole
from hicache_lab.serving.load.results import ServerSample

PERIOD_SECONDS = 1.0


class Watcher:
    """Scrapes /metrics once a period; a scrape that fails is a sample too."""

    def __init__(
        self,
        client: SglangClient,
        *,
        processes_per_replica: int,
        period_s: float = PERIOD_SECONDS,
    ) -> None:
        self._client, self._processes, self._period_s = client, processes_per_replica, period_s
        self.start = time.perf_counter()  # sample times are given after it
        # parsing a scrape takes 10 ms and more, which would delay time stamps: only the text is kept
        self._scrapes: list[tuple[float, str, str | None]] = []

    async def run(self) -> None:
        """Scrape until cancelled."""
        while True:
            await self.once()
            await asyncio.sleep(self._period_s)

    async def once(self) -> None:
        """Scrape now."""
        at = time.perf_counter()
        try:
            text = await self._client.scrape()
        except ServerError as error:
            self._scrapes.append((at, "", str(error)))
        else:
            self._scrapes.append((at, text, None))

    def samples(self) -> tuple[ServerSample, ...]:
        """Everything scraped, read."""
        return tuple(self._sample(*scrape) for scrape in self._scrapes)

    def _sample(self, at: float, text: str, missing: str | None) -> ServerSample:
        at_s = at - self.start
        if missing is not None:
            return ServerSample(at_s, missing=missing)
        try:
            snapshot = parse_metrics(text)
        except ServerError as error:
            return ServerSample(at_s, missing=str(error))
        cached = snapshot.cached
        return ServerSample(
            at_s,
            host_used_tokens=snapshot.host_used_tokens,
            device_used_share=snapshot.gauge("token_usage"),
            running=whole(snapshot.gauge("num_running_reqs")),
            waiting=whole(snapshot.gauge("num_queue_reqs")),
            cached_device=cached.device if cached else None,
            cached_host=cached.host if cached else None,
            cached_storage=cached.storage if cached else None,
            prompt_tokens=whole(snapshot.counter("prompt_tokens_total")),
            evicted_tokens=whole(snapshot.logical("evicted_tokens_total", self._processes)),
            loaded_back_tokens=whole(snapshot.logical("load_back_tokens_total", self._processes)),
        )


def went_backwards(samples: tuple[ServerSample, ...]) -> bool:
    """Whether a counter fell: the server was restarted while it was watched."""
    counted = [sample.prompt_tokens for sample in samples if sample.prompt_tokens is not None]
    return any(later < earlier for earlier, later in pairwise(counted))
