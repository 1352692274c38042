"""Prompts and conversations as JSONL (or one JSON array), as token ids or as text.

Text needs a tokenizer for exact block borders. Without one, ``CHARS_PER_TOKEN`` characters stand for a token: shared
prefixes stay exact to a block, token counts become estimates, and the trace says so.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.traffic.traces import files
from hicache_lab.traffic.traces.files import Skips
from hicache_lab.traffic.traces.times import arrivals, seconds
from hicache_lab.traffic.traces.trace import Trace

CHARS_PER_TOKEN = 4
_PAGE_TOKENS = 64
_TOKEN_KEYS = ("input_ids", "prompt_token_ids", "token_ids")
_OUTPUT_KEYS = ("output", "completion", "response", "output_ids", "output_token_ids")
_TIME_KEYS = ("timestamp", "arrival_time", "time")
PROMPT_KEYS = {*_TOKEN_KEYS, "prompt", "text", "messages", "conversations", "conversation", "turns"}

_ESCAPED_BYTE = re.compile(r"\\x[89a-f][0-9a-f]")  # as ``files.lines`` keeps what is not UTF-8

Tokenizer = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Request:
    """One request as read: token ids, or text still to be tokenized; ``arrival`` in seconds."""

    prompt: str | list[int]
    output: str | list[int]
    arrival: float | None = None


def character_tokenizer() -> Tokenizer:
    """Cuts text into pieces of some characters: keeps prefixes, not token counts."""
    pieces: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        cuts = range(0, len(text), CHARS_PER_TOKEN)
        return [pieces.setdefault(text[i : i + CHARS_PER_TOKEN], len(pieces)) for i in cuts]

    return encode


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load ``tokenizer.json`` of a Hugging Face model folder (needs the optional ``tokenizers`` package).

    Raises:
        UsageError: no such file, not a tokenizer, or the package is missing.
    """
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise UsageError(f"--tokenizer: {file} is not there; give a model folder that holds tokenizer.json")
    try:
        tokenizers = import_module("tokenizers")
    except ImportError:
        raise UsageError('--tokenizer: needs the optional package; pip install "hicache-lab[tokenizer]"') from None
    try:
        loaded = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the package raises bare Exceptions for a bad file
        raise UsageError(f"--tokenizer: {file} is not a tokenizer.json ({error})") from None

    def encode(text: str) -> list[int]:
        return list(loaded.encode(text, add_special_tokens=False).ids)

    return encode


def read_prompts(
    path: Path,
    *,
    block_tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
    sessions_at_once: int = 8,
    skip_bad: bool = False,
) -> Trace:
    """Read prompts (``prompt``, ``messages``, ``input_ids``) and whole conversations (``conversations``).

    A record with ``messages`` is one request: a last assistant message is its output. A record with
    ``conversations`` (ShareGPT) is a session: one request for each assistant turn. Sessions carry no times, so their
    turns are interleaved, ``sessions_at_once`` at a time.

    Args:
        path: JSONL or one JSON array; plain, gzip or zstandard.
        block_tokens: the page size the prompts are cut into; None: 64.
        tokenizer: text → token ids; None: characters stand in (an estimate).
        sessions_at_once: how many conversations run side by side.
        skip_bad: count bad records instead of stopping at the first.
    """
    skips = Skips(skip_bad)
    sessions = list(_sessions(path, skips))
    notes = []
    if any(len(session) > 1 for session in sessions):
        notes.append(f"conversations carry no times: turns interleaved over {sessions_at_once} sessions at once")
    requests = interleave(sessions, sessions_at_once)
    return tokenized(
        requests,
        path,
        block_tokens=block_tokens,
        tokenizer=tokenizer,
        skips=skips,
        notes=notes,
    )


def tokenized(
    requests: Sequence[Request],
    path: Path,
    *,
    block_tokens: int | None,
    tokenizer: Tokenizer | None,
    skips: Skips,
    notes: Sequence[str],
) -> Trace:
    """Turn requests into a trace."""
    block_tokens = block_tokens or _PAGE_TOKENS
    if not requests:
        left_out = f" ({sum(skips.counts.values())} records left out)" if skips.counts else ""
        raise InputError(f"{path}: holds no request with a prompt{left_out}")
    remarks = list(notes)
    encode = tokenizer
    if encode is None and any(isinstance(part, str) and part for r in requests for part in (r.prompt, r.output)):
        encode = character_tokenizer()
        remarks.append(
            f"estimated: {CHARS_PER_TOKEN} characters stand for a token (no tokenizer given); "
            "shared prefixes are exact to a block, token counts are not"
        )

    def ids(request: Request) -> tuple[Sequence[int], Sequence[int]]:
        prompt, output = request.prompt, request.output
        if isinstance(prompt, str) and isinstance(output, str) and encode is not None:
            # together, as the next turn will send them: a piece across the border must not differ
            border = len(encode(prompt))
            both = encode(prompt + output)
            return both[:border], both[border:]
        return _encoded(prompt, encode), _encoded(output, encode)

    remarks += skips.notes()
    arrival_s, timing = arrivals([request.arrival for request in requests])
    trace = Trace.from_tokens(
        map(ids, requests),
        block_tokens=block_tokens,
        arrival_s=arrival_s,
        origin=f"measured: {path.name}",
        skipped=skips.counts,
        notes=(*remarks, *timing),
    )
    if trace.references:
        return trace
    short = f"no prompt fills a whole block of {block_tokens} tokens; --block-tokens takes smaller ones"
    return replace(trace, notes=(*trace.notes, short))


def _encoded(part: str | list[int], encode: Tokenizer | None) -> Sequence[int]:
    if isinstance(part, list):
        return part
    return encode(part) if encode is not None else []


def interleave(sessions: Sequence[list[Request]], at_once: int) -> list[Request]:
    """Take turns round-robin over ``at_once`` sessions; a finished session gives its place to the next."""
    if at_once < 1:
        raise UsageError(f"--sessions-at-once: expected at least 1, got {at_once}")
    waiting = iter(sessions)
    active = deque(iter(session) for session in islice(waiting, at_once))
    ordered: list[Request] = []
    while active:
        turns = active.popleft()
        turn = next(turns, None)
        while turn is None and (following := next(waiting, None)) is not None:
            turns = iter(following)
            turn = next(turns, None)
        if turn is not None:
            ordered.append(turn)
            active.append(turns)
    return ordered


def _sessions(path: Path, skips: Skips) -> Iterator[list[Request]]:
    for where, record in _records(path):
        try:
            if isinstance(record, ValueError):
                raise record
            yield session_of(record)
        except ValueError as error:
            skips.bad("record", where, error)


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, decoded record or the ValueError it raised) of JSONL, or of one JSON array."""
    stream = files.lines(path)
    first = next(stream, None)
    if first is not None and first[1].lstrip().startswith("["):
        try:
            array = files.decode_json(files.all_of(path))
        except ValueError as error:
            raise InputError(f"{path}: not one JSON array: {error}") from None
        yield from ((f"{path} record {index}", record) for index, record in enumerate(array, 1))
        return
    for number, text in (first, *stream) if first is not None else ():
        try:
            yield f"{path}:{number}", files.decode_json(text)
        except ValueError as error:
            odd = "; it holds bytes that are not UTF-8" if _ESCAPED_BYTE.search(text) else ""
            yield f"{path}:{number}", ValueError(f"{error}{odd}")


def session_of(record: Any) -> list[Request]:
    """The requests of one record, in order.

    Raises:
        ValueError: the record holds no prompt in a known form.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with a prompt, got {type(record).__name__}")
    turns = record.get("conversations") or record.get("conversation") or record.get("turns")
    if isinstance(turns, list) and turns:
        return _turns(turns)
    record = record["body"] if isinstance(record.get("body"), dict) else record  # OpenAI's batch files
    arrival = next((seconds(str(record[key])) for key in _TIME_KEYS if record.get(key) is not None), None)
    messages = record.get("messages")
    if isinstance(messages, list) and messages:
        rendered = [_message(message) for message in messages]
        if record.get("tools"):  # every chat template puts them before the conversation
            rendered.insert(0, ("tools", _canonical(record["tools"])))
        answered = rendered[-1][0] in _ASSISTANTS and len(rendered) > 1
        role, output = rendered.pop() if answered else ("assistant", "")
        return [Request("".join(_render(*said) for said in rendered) + _render(role, ""), output, arrival)]
    for key in (*_TOKEN_KEYS, "prompt", "text"):
        if key in record:
            prompt = _text_or_ids(record[key], key)
            if not prompt:
                raise ValueError(f"{key} is empty")
            answer = next((record[name] for name in _OUTPUT_KEYS if record.get(name)), "")
            return [Request(prompt, _text_or_ids(answer, "output"), arrival)]
    raise ValueError(f"no prompt: expected one of {', '.join(sorted(PROMPT_KEYS))}")


_ASSISTANTS = {"assistant", "gpt", "chatgpt", "bard", "model"}


def _turns(turns: Iterable[Any]) -> list[Request]:
    history = ""
    requests = []
    for turn in turns:
        role, text = _message(turn)
        if role in _ASSISTANTS and history:
            requests.append(Request(history + _render(role, ""), text))
        history += _render(role, text)
    if not requests:
        raise ValueError("a conversation without an assistant turn after a prompt")
    return requests


def _message(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"expected a message object, got {type(message).__name__}")
    role = str(message.get("role") or message.get("from") or "user")
    content = message.get("content") if "content" in message else message.get("value")
    if isinstance(content, list):  # OpenAI content parts; only their text takes part in a prefix here
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if content is not None and not isinstance(content, str):
        raise ValueError(f"expected a message's content as text, got {type(content).__name__}")
    calls = _canonical(message["tool_calls"]) if message.get("tool_calls") else ""
    return role, (content or "") + calls


def _canonical(value: Any) -> str:
    """Text for what a chat template would render its own way: equal values give equal text, so prefixes hold."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _render(role: str, text: str) -> str:
    return f"<|{role}|>{text}"


def _text_or_ids(value: Any, name: str) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        return value
    raise ValueError(f"expected {name} as text or as a list of token ids, got {type(value).__name__}")
