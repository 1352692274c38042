"""A streaming server that sends tokens on a known schedule and logs what it really did.

usage: schedule_server.py --port P --ttft-ms 100 --itl-ms 20 --tokens 64 --log truth.jsonl

Speaks just enough of SGLang for a load generator: POST /generate, /v1/completions and /v1/chat/completions
stream; GET answers a small JSON. The schedule is absolute (no late token delays the next), on loopback;
one thread, raw asyncio. What a client reports can be judged against the log, which has the times of the same
machine's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: keep-alive\r\n\r\n"
)
PROMPT_TOKENS = 64


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(data: Any) -> bytes:
    """One server-sent event as a chunk."""
    return chunk(b"data: " + json.dumps(data).encode() + b"\n\n")


def native(tokens: int) -> list[bytes]:
    """/generate repeats the text so far, as SGLang does."""
    return [
        event(
            {
                "text": " w" * (i + 1),
                "output_ids": list(range(i + 1)),
                "meta_info": {
                    "prompt_tokens": PROMPT_TOKENS,
                    "completion_tokens": i + 1,
                    "cached_tokens": 0,
                    "finish_reason": {"type": "length"} if i == tokens - 1 else None,
                },
            }
        )
        for i in range(tokens)
    ]


def openai(tokens: int, *, chat: bool) -> list[bytes]:
    """The OpenAI-style endpoints send what is new; the last event carries the usage."""

    def choice(text: str, reason: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        return {"index": 0, **body, "finish_reason": reason}

    kind = "chat.completion.chunk" if chat else "text_completion"
    frame = {"id": "x", "object": kind, "created": 1, "model": "schedule"}
    events = [event({**frame, "choices": [choice(f" w{i}", None)]}) for i in range(tokens)]
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": PROMPT_TOKENS + tokens,
    }
    end = [choice("", "length")]
    events[-1] += event({**frame, "choices": end}) + event({**frame, "choices": [], "usage": usage})
    return events


class Stream(asyncio.Protocol):
    """One connection, kept alive; every POST starts a stream."""

    def __init__(self, settings: argparse.Namespace, log: TextIO | None) -> None:
        self._ttft_s, self._itl_s = settings.ttft_ms / 1e3, settings.itl_ms / 1e3
        self._events: dict[bytes, list[bytes]] = settings.events
        self._log = log
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take whole requests out of the buffer."""
        received = time.perf_counter()
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = 0
            if (at := head.find(b"content-length:")) >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            method, path = head.split(b" ", 2)[:2]
            if method == b"post" and path in self._events:
                self._stream(self._events[path], received)
            else:
                self._answer(path)

    def _answer(self, path: bytes) -> None:
        body = json.dumps(
            {
                "model_path": "schedule",
                "tokenizer_path": "schedule",
                "is_generation": True,
                "version": "0.0.0",
                "data": [{"id": "schedule", "object": "model"}],
                "internal_states": [{}],
            }
        ).encode()
        if path.startswith(b"/metrics"):
            body = b"sglang:num_running_reqs 0\n"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    def _stream(self, events: list[bytes], received: float) -> None:
        loop = asyncio.get_running_loop()
        base = loop.time() - (time.perf_counter() - received)
        sent: list[float] = []
        self._transport.write(HEAD)

        def send(number: int) -> None:
            if self._transport.is_closing():
                return
            sent.append(loop.time() - base)
            last = number == len(events) - 1
            self._transport.write(events[number] + (chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n" if last else b""))
            if not last:
                loop.call_at(base + self._ttft_s + (number + 1) * self._itl_s, send, number + 1)
            elif self._log is not None:
                self._log.write(json.dumps({"received_s": received, "sent_s": sent}) + "\n")

        loop.call_at(base + self._ttft_s, send, 0)


async def serve(settings: argparse.Namespace, ready: Callable[[int], None] = lambda _port: None) -> None:
    """Serve until cancelled; the log is flushed twice a second."""
    log = Path(settings.log).open("w") if settings.log else None  # noqa: SIM115 - closed below
    settings.events = {
        b"/generate": native(settings.tokens),
        b"/v1/completions": openai(settings.tokens, chat=False),
        b"/v1/chat/completions": openai(settings.tokens, chat=True),
    }
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(settings, log), "127.0.0.1", settings.port, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    print(port, flush=True)
    ready(port)
    try:
        while True:
            await asyncio.sleep(0.5)
            if log is not None:
                log.flush()
    finally:
        server.close()
        if log is not None:
            log.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed on the first line")
    parser.add_argument("--ttft-ms", type=float, default=100.0)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--log", help="JSON lines of received_s and sent_s (seconds after it) a request")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
