"""Requests to SGLang's generating endpoints, and their answers: streams with arrival times.

While tokens arrive only their bytes and the time are kept; the stream is read afterwards, so that parsing
one answer does not delay the time stamp of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from hicache_lab.base.errors import UsageError
from hicache_lab.serving.client.metrics import CachedTokens
from hicache_lab.serving.client.untrusted import count, printable, read_json

Api = Literal["generate", "completions", "chat"]
PATHS: dict[Api, str] = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt and how to answer it.

    Attributes:
        prompt: text or token ids (ids only for ``generate`` and ``completions``).
        max_new_tokens: longest answer.
        api: which endpoint.
        model: the name sent to the OpenAI-style endpoints.
        history: chat only: ``(role, content)`` of the messages before the prompt.
        temperature: 0 is greedy.
        ignore_eos: answer with exactly ``max_new_tokens`` tokens.
    """

    prompt: str | tuple[int, ...]
    max_new_tokens: int
    api: Api = "generate"
    model: str = "default"
    temperature: float = 0.0
    ignore_eos: bool = True
    history: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.api not in PATHS:
            raise UsageError(f"api: expected generate, completions or chat, got {self.api!r}")
        if self.api == "chat" and not isinstance(self.prompt, str):
            raise UsageError("api: chat takes text, not token ids; use generate or completions for ids")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens: expected 1 or more, got {self.max_new_tokens}")

    @property
    def path(self) -> str:
        """The endpoint's path."""
        return PATHS[self.api]

    def body(self) -> dict[str, Any]:
        """The JSON body; answers are always streamed."""
        if self.api == "generate":
            field = "text" if isinstance(self.prompt, str) else "input_ids"
            sampling = {
                "temperature": self.temperature,
                "max_new_tokens": self.max_new_tokens,
                "ignore_eos": self.ignore_eos,
            }
            prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
            return {field: prompt, "sampling_params": sampling, "stream": True}
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.api == "chat":
            messages = (*self.history, ("user", self.prompt))
            body["messages"] = [{"role": role, "content": content} for role, content in messages]
        else:
            body["prompt"] = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return body


@dataclass(frozen=True)
class RawStream:
    """A streamed answer as it arrived.

    Attributes:
        sent_s: when the request was handed to the network, on the clock of ``chunks``.
        chunks: ``(arrival in seconds, bytes)``.
        error: why it ended early, or None.
    """

    sent_s: float
    chunks: tuple[tuple[float, bytes], ...]
    error: str | None = None


@dataclass(frozen=True)
class Reply:
    """A finished or broken answer.

    Attributes:
        text, output_ids: the answer; ids only from ``generate``.
        prompt_tokens, completion_tokens: as the server counts them; None if it did not get to tell.
        cached: prompt tokens found in a cache, by tier where the server tells; None if it does not tell at
            all (``--enable-cache-report`` off).
        ttft_s: sent until the first token; None without streaming.
        itl_s: gaps between arrivals of new tokens, a gap of n tokens counted as n equal ones.
        e2e_s: sent until the last byte; None without streaming.
        finish_reason: e.g. ``"length"``.
        error: why it is not complete, or None.
    """

    text: str
    output_ids: tuple[int, ...]
    prompt_tokens: int | None
    completion_tokens: int | None
    cached: CachedTokens | None
    ttft_s: float | None = None
    itl_s: tuple[float, ...] = ()
    e2e_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None


def read_stream(raw: RawStream, api: Api) -> Reply:
    """Read a streamed answer; a break is said in ``Reply.error``, and what arrived before it is kept."""
    answer = _Answer(api)
    arrivals: list[tuple[float, int]] = []  # when, and how many tokens there were then
    error, done = raw.error, False
    for arrived, event in _events(raw.chunks):
        if event == b"[DONE]":
            done = True
            continue
        try:
            data = read_json(event)
        except ValueError:
            error = error or f"malformed event in the stream: {event[:80]!r}"
            break
        if isinstance(data, dict) and "error" in data:
            text = error_text(data)
            error = error or prompt_too_long(text) or f"the server broke off: {text}"
            break
        if answer.add(data):
            arrivals.append((arrived, answer.tokens))
    if error is None and not done:
        error = "the stream ended without [DONE]" if raw.chunks else "the stream was empty"
    if error is None and answer.finish_reason == "abort":  # queue full, shutting down …, although the status was 200
        error = f"the server aborted the request: {answer.aborted_because or 'no details'}"
    if error is None and not arrivals and not answer.completion_tokens:
        error = "the stream ended without a single token"
    gaps: list[float] = []
    for (before, had), (now, have) in pairwise(arrivals):
        new = max(have - had, 1)
        gaps.extend([(now - before) / new] * new)
    return Reply(
        text="".join(answer.text),
        output_ids=answer.ids,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached=answer.cached,
        ttft_s=arrivals[0][0] - raw.sent_s if arrivals else None,
        itl_s=tuple(gaps),
        e2e_s=raw.chunks[-1][0] - raw.sent_s if raw.chunks else None,
        finish_reason=answer.finish_reason,
        error=error,
    )


def error_text(data: Any) -> str:
    """The message in an error answer: ``{"error": {"message": …}}``, ``{"detail": …}`` or plain."""
    for _ in range(3):
        if not isinstance(data, dict):
            break
        data = next((data[key] for key in ("error", "message", "detail") if data.get(key)), str(data))
    return printable(str(data))[:300]


def prompt_too_long(text: str) -> str | None:
    """That a prompt exceeds the context, said in a status or, by a server that streams, in its first event."""
    known = "context length" in text or "maximum allowed length" in text
    return f"the prompt is too long for the server: {text}" if known else None


def _events(chunks: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The ``data:`` events (WHATWG server-sent events), each with the arrival of its last chunk."""
    events, pending, data = [], b"", list[bytes]()
    for arrived, chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            text = line.rstrip(b"\r")
            if text.startswith(b"data:"):
                data.append(text[5:].removeprefix(b" "))
            elif not text and data:
                events.append((arrived, b"\n".join(data)))
                data = []
    if chunks and (data or pending.startswith(b"data:")):
        # an event without its blank line was cut off; keep it, so that it is reported as malformed
        rest = [*data, pending[5:].strip()] if pending.startswith(b"data:") else data
        events.append((chunks[-1][0], b"\n".join(rest)))
    return events


class _Answer:
    """An answer in the making."""

    def __init__(self, api: Api) -> None:
        self._api: Api = api
        self.tokens = 0
        self.text: list[str] = []
        self.ids: tuple[int, ...] = ()
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached: CachedTokens | None = None
        self.finish_reason: str | None = None
        self.aborted_because = ""

    def add(self, data: Any) -> bool:
        """Take in one event or a whole answer; True if it brought tokens."""
        if not isinstance(data, dict):
            return False
        return self._add_native(data) if self._api == "generate" else self._add_openai(data)

    def _add_native(self, data: dict[str, Any]) -> bool:
        meta = data.get("meta_info")
        if not isinstance(meta, dict):
            return False
        if isinstance(data.get("text"), str):
            self.text = [data["text"]]  # each event repeats the text so far
        ids = data.get("output_ids")
        if isinstance(ids, list) and all(count(number) is not None for number in ids):
            self.ids = tuple(ids)
        self.prompt_tokens = count(meta.get("prompt_tokens"))
        self.completion_tokens = count(meta.get("completion_tokens"))
        total = count(meta.get("cached_tokens"))
        self.cached = None if total is None else _by_tier(total, meta.get("cached_tokens_details"))
        reason = meta.get("finish_reason")
        if isinstance(reason, dict):
            self.finish_reason = str(reason.get("type"))
            self.aborted_because = error_text(reason) if reason.get("message") else ""
        before, self.tokens = self.tokens, self.completion_tokens or 0
        return self.tokens > before

    def _add_openai(self, data: dict[str, Any]) -> bool:
        usage = data.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = count(usage.get("prompt_tokens"))
            self.completion_tokens = count(usage.get("completion_tokens"))
            details = usage.get("prompt_tokens_details")
            total = count(details.get("cached_tokens")) if isinstance(details, dict) else None
            self.cached = None if total is None else CachedTokens(total)
        choices = data.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return False
        choice = choices[0]
        reason = choice.get("finish_reason")
        self.finish_reason = reason if isinstance(reason, str) else self.finish_reason
        part = choice.get("delta") or choice.get("message") or choice
        text = part.get("content") if isinstance(part, dict) and self._api == "chat" else choice.get("text")
        reasoning = part.get("reasoning_content") if isinstance(part, dict) else None
        if not text and not reasoning:
            return False
        self.text.append(f"{reasoning or ''}{text or ''}")
        self.tokens += 1
        return True


def _by_tier(total: int, details: Any) -> CachedTokens:
    if not isinstance(details, dict):
        # nothing cached: no release adds details then; otherwise the release does not tell the tier
        return CachedTokens(0, 0, 0) if total == 0 else CachedTokens(total)
    storage = [count(v) or 0 for name, v in details.items() if name.startswith("storage") and count(v) is not None]
    return CachedTokens(
        total, count(details.get("device")), count(details.get("host")), sum(storage) if storage else None
    )
