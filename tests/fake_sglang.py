"""A scripted HTTP/1.1 server on loopback, able to misbehave in every way a real one does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures" / "server"


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        return json.loads(self.body)


@dataclass
class Answer:
    """What to send.

    ``body`` may be several parts, sent ``pause_s`` apart; ``then`` is how it ends: "close" keeps HTTP's
    manners, "cut" drops the connection before the announced end, "reset" sends RST, "hang" sends nothing.
    """

    status: int = 200
    body: bytes | list[bytes] = b""
    headers: dict[str, str] = field(default_factory=dict)
    pause_s: float = 0.0
    then: str = "close"


Route = Answer | Callable[[Seen], Answer | Awaitable[Answer]]


class FakeSglang:
    """Routes by path; unknown paths answer 404 as SGLang does."""

    def __init__(self, routes: dict[str, Route]) -> None:
        self.routes = routes
        self.seen: list[Seen] = []
        self.url = ""
        self.tasks: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            await self._converse(reader, writer)
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ", 2)
                pairs = [line.split(": ", 1) for line in head[1:] if line]
                headers = {name.lower(): value for name, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                request = Seen(method, path, headers, body)
                self.seen.append(request)
                route = self.routes.get(path, Answer(404, b'{"detail":"Not Found"}'))
                answer = route(request) if callable(route) else route
                if isinstance(answer, Awaitable):
                    answer = await answer
                if not await self._send(answer, writer):
                    break

    async def _send(self, answer: Answer, writer: asyncio.StreamWriter) -> bool:
        if answer.then == "hang":
            await asyncio.sleep(30)
            return False
        if answer.then == "reset" and not answer.body:
            writer.transport.abort()
            return False
        parts = answer.body if isinstance(answer.body, list) else [answer.body]
        lines = [f"HTTP/1.1 {answer.status} X", "Transfer-Encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        for part in parts:
            if part:
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(answer.pause_s)
        if answer.then == "reset":
            writer.transport.abort()
            return False
        if answer.then == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


@contextlib.asynccontextmanager
async def fake_sglang(routes: dict[str, Route]) -> AsyncIterator[FakeSglang]:
    fake = FakeSglang(routes)
    server = await asyncio.start_server(fake._serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
        for task in fake.tasks:
            task.cancel()
        await asyncio.gather(*fake.tasks, return_exceptions=True)
        await server.wait_closed()


def recorded(name: str, file: str) -> bytes:
    return (FIXTURES / name / file).read_bytes()


def recorded_routes(release: str) -> dict[str, Route]:
    """A real server's answers, tp 1."""
    name = f"{release}-llama-tp1"
    return {
        "/health": Answer(),
        "/server_info": Answer(body=recorded(name, "server_info.json")),
        "/model_info": Answer(body=recorded(name, "model_info.json")),
        "/v1/models": Answer(body=recorded(name, "v1_models.json")),
        "/metrics": Answer(body=recorded(name, "metrics.txt")),
    }


def json_answer(data: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(data).encode())
