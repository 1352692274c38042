"""An asynchronous client for one SGLang server.

Reads are retried, prompts never are. The API key is named by an environment variable and goes into the
``Authorization`` header only: errors are built outside the failing call, so no traceback reaches a frame
that holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from hicache_lab.base.errors import ServerError, UsageError
from hicache_lab.serving.client.info import Probe, ServerInfo, read_architectures, read_server_info
from hicache_lab.serving.client.metrics import MetricsSnapshot, parse_metrics
from hicache_lab.serving.client.problems import Failure, Response, checked_key, checked_url, refused, unreachable
from hicache_lab.serving.client.stream import GenerateRequest, RawStream, Reply, read_stream
from hicache_lab.serving.client.untrusted import read_json

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
STALL_SECONDS = 300.0
_TELLING_BYTES = 8
_RETRY_AFTER_SECONDS = (0.2, 0.8)
_RETRIED = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT})


def _note_the_sending() -> aiohttp.TraceConfig:
    """Calls back when a body goes out: with many prompts at once each waits in this process until its turn comes."""
    import aiohttp

    async def body_goes_out(_session: object, context: Any, _chunk: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx["sending"]()

    tracing = aiohttp.TraceConfig()
    tracing.on_request_chunk_sent.append(body_goes_out)
    return tracing


_JSON = {"Content-Type": "application/json"}


class SglangClient:
    """One server; use it as ``async with SglangClient(url) as client``.

    Args:
        base_url: ``http://host:port``, also ``https`` and a path prefix; no credentials in it.
        api_key_env: name of the environment variable that holds the API key, or empty.
        read_seconds: limit of a whole read request.
        stall_seconds: a generating request fails when nothing arrives for so long.
        ca_file: certificate authority for a private TLS certificate; verification is always on.
        environ: where the key is looked up.

    Raises:
        UsageError: a malformed URL, or the variable is not set.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key_env: str = "",
        read_seconds: float = READ_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        ca_file: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.base_url = checked_url(base_url)
        self.api_key_env = api_key_env
        self._environ = environ
        self._key()  # a missing variable is said at once
        self._read_seconds, self._stall_seconds, self._ca_file = read_seconds, stall_seconds, ca_file
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"SglangClient({self.base_url!r}, api_key_env={self.api_key_env!r})"

    async def __aenter__(self) -> SglangClient:
        import aiohttp

        needed = self._ca_file or self.base_url.startswith("https:")
        try:
            # loading the system's authorities takes longer than a request: only where they are used
            tls = ssl.create_default_context(cafile=self._ca_file) if needed else True
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"ca_file: {self._ca_file!r} is not a readable PEM file ({error})") from None
        key = self._key()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=True,
            trace_configs=[_note_the_sending()],
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---- reads

    async def health(self) -> int:
        """The status of /health: 200 ready, 503 while it warms up or is overloaded, which is no error.

        Raises:
            ServerError: nothing listens, or it does not answer in time.
        """
        return (await self._get("/health")).status

    async def require_loaded(self) -> None:
        """Refuse a server that still loads its model.

        Raises:
            ServerError: 503 from /health, or as ``health``.
        """
        if await self.health() == HTTPStatus.SERVICE_UNAVAILABLE:
            raise ServerError(f"{self.base_url} is still loading or overloaded (503 from /health); try again later")

    async def server_info(self) -> ServerInfo:
        """Ask /server_info, or /get_server_info of releases before 0.5.6.

        Raises:
            ServerError: unreachable, still loading, not SGLang, 401.
        """
        return read_server_info(await self._json("/server_info", "/get_server_info"))

    async def architectures(self) -> tuple[str, ...]:
        """Ask /model_info for the model's architectures, or /get_model_info of older releases.

        Raises:
            ServerError: as ``server_info``.
        """
        return read_architectures(await self._json("/model_info", "/get_model_info"))

    async def metrics(self) -> MetricsSnapshot:
        """Scrape /metrics.

        Raises:
            ServerError: metrics are off (404), or not SGLang's.
        """
        text = await self.scrape()
        try:
            return parse_metrics(text)
        except ServerError as error:
            raise ServerError(f"{self.base_url}: {error}") from None

    async def scrape(self) -> str:
        """/metrics as text; reading it takes 10 ms and more, which can wait until after a load.

        Raises:
            ServerError: metrics are off (404), or the server is gone.
        """
        response = await self._get("/metrics")
        if response.status == HTTPStatus.NOT_FOUND:
            raise ServerError(f"{self.base_url}/metrics: metrics are off; restart the server with --enable-metrics")
        self._check("/metrics", response)
        return response.body.decode(errors="replace")

    async def probe(self) -> Probe:
        """Everything the server tells, in one go.

        Raises:
            ServerError: not reachable, not ready, or not SGLang.
        """
        await self.require_loaded()
        server, architectures = await self.server_info(), await self.architectures()
        try:
            return Probe(server, architectures, await self.metrics(), None)
        except ServerError as error:
            return Probe(server, architectures, None, str(error))

    # ---- changes

    async def flush_cache(self) -> str:
        """Empty the server's cache. Only ever called because the user asked for it.

        Raises:
            ServerError: it refused, e.g. because requests are running.
        """
        response = await self._request("POST", "/flush_cache")
        self._check("/flush_cache", response)
        return response.body.decode(errors="replace").strip()

    # ---- prompts

    async def stream(self, request: GenerateRequest) -> Reply:
        """Answer one prompt as a stream; the reply carries times.

        Raises:
            ServerError: refused (context too long, wrong model, 401 …), broken off, or not in time.
        """
        reply = read_stream(await self.collect(request), request.api)
        if reply.error:
            raise ServerError(f"{self.base_url}{request.path}: {reply.error}")
        return reply

    async def collect(self, request: GenerateRequest, *, clock: Callable[[], float] = time.perf_counter) -> RawStream:
        """Answer one prompt as raw bytes with arrival times; whatever goes wrong is said in the result.

        Cancellation keeps nothing; a broken connection keeps what had arrived.
        """
        import aiohttp

        # encoding is the client's work and must not count as the server's time
        body = json.dumps(request.body()).encode()
        chunks: list[tuple[float, bytes]] = []
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._stall_seconds)
        session = self._open()
        error: str | None = None
        sending = [clock()]
        try:
            async with session.post(
                self.base_url + request.path,
                data=body,
                headers=_JSON,
                timeout=timeout,
                allow_redirects=False,
                trace_request_ctx={"sending": lambda: sending.append(clock())},
            ) as response:
                if response.status == HTTPStatus.OK:
                    async for chunk in response.content.iter_any():
                        chunks.append((clock(), chunk))
                else:
                    server = response.headers.get("Server", "")
                    answer = self._redacted(await response.read())
                    error = refused(Response(response.status, answer, server), self.api_key_env)
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            error = self._failure(failure, self._stall_seconds).text
        return RawStream(sending[-1], self._without_key(chunks), error)

    # ---- transport

    def _key(self) -> str:
        return checked_key(self.api_key_env, self._environ)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise UsageError("SglangClient: use it inside 'async with SglangClient(...) as client:'")
        return self._session

    async def _json(self, *paths: str) -> Any:
        """The JSON of the first path that the server knows."""
        for path in paths:
            response = await self._get(path)
            if response.status in {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED} and path != paths[-1]:
                continue
            self._check(path, response)
            with contextlib.suppress(ValueError):
                return read_json(response.body)
        start = response.body[:80].decode(errors="replace")
        raise ServerError(
            f"{self.base_url}{path}: not an SGLang server, or a truncated answer: "
            f"{len(response.body)} bytes that are not JSON: {start!r}"
        )

    async def _get(self, path: str) -> Response:
        """A read, repeated after a reset, a timeout or a gateway's complaint."""
        for pause in _RETRY_AFTER_SECONDS:
            answer = await self._try("GET", path)
            if isinstance(answer, Response) and answer.status not in _RETRIED:
                return answer
            if isinstance(answer, Failure) and not answer.transient:
                break
            await asyncio.sleep(pause)
        return await self._request("GET", path)

    async def _request(self, method: str, path: str) -> Response:
        answer = await self._try(method, path)
        if isinstance(answer, Failure):
            raise ServerError(f"{self.base_url}{path}: {answer.text}")
        return answer

    async def _try(self, method: str, path: str) -> Response | Failure:
        """One request. A failure is a value: no traceback may hold the frames that sent the key."""
        import aiohttp

        session = self._open()
        try:
            async with session.request(
                method,
                self.base_url + path,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._read_seconds, sock_connect=CONNECT_SECONDS),
            ) as response:
                data = self._redacted(await response.read(), answer=response.status == HTTPStatus.OK)
                return Response(response.status, data, response.headers.get("Server", ""))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self._failure(error, self._read_seconds)

    def _failure(self, error: Exception, limit: float) -> Failure:
        failure = unreachable(error, self.base_url, limit)
        return replace(failure, text=self._redacted(failure.text.encode(errors="replace")).decode())

    def _check(self, path: str, response: Response) -> None:
        if response.status != HTTPStatus.OK:
            raise ServerError(f"{self.base_url}{path}: {refused(response, self.api_key_env)}")

    def _redacted(self, text: bytes, *, answer: bool = False) -> bytes:
        """A server may echo what it was sent; stars of the key's length keep an answer's chunks in place.

        A key as short as a word of the protocol ("token", "1") stays in an answer, which would not be readable without.
        """
        key = self._key().encode()
        return text if not key or (answer and len(key) < _TELLING_BYTES) else text.replace(key, b"*" * len(key))

    def _without_key(self, chunks: Sequence[tuple[float, bytes]]) -> tuple[tuple[float, bytes], ...]:
        """Chunks of a stream with the key starred out, also where it is cut in two."""
        body = b"".join(chunk for _, chunk in chunks) if self.api_key_env else b""
        starred = self._redacted(body, answer=b'"error"' not in body)
        if starred == body:
            return tuple(chunks)
        ends = list(accumulate(len(chunk) for _, chunk in chunks))
        parts = pairwise([0, *ends])
        return tuple((arrived, starred[start:end]) for (arrived, _), (start, end) in zip(chunks, parts, strict=True))
