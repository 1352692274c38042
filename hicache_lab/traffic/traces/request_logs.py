"""SGLang's own request logs (``--log-requests``), in both of its formats.

Text: ``Finish: obj=GenerateReqInput(…, text='…', input_ids=[…], …), out={…, 'output_ids': […], 'meta_info': {…}}``.
JSON (``--log-requests-format json``): ``{"timestamp": …, "event": "request.finished", "obj": {…}, "out": {…}}``.
Read from sglang 0.5.10 and 0.5.23, ``srt/utils/request_logger.py``: levels 0 and 1 log no content, level 2 cuts
every text and list at 2,048, level 3 keeps all. Prefix information therefore needs level 3.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.traffic.traces import files
from hicache_lab.traffic.traces.hashed import Skips
from hicache_lab.traffic.traces.prompts import Request, Tokenizer, tokenized
from hicache_lab.traffic.traces.times import arrivals, seconds
from hicache_lab.traffic.traces.trace import Trace

FINISHED = "Finish: obj="
_INPUT_IDS = re.compile(r"\binput_ids=\[([0-9, ]*)\](?! \.\.\. )")
_OUTPUT_IDS = re.compile(r"'output_ids': \[([0-9, ]*)\](?! \.\.\. )")
_TEXT = re.compile(r"\btext=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")(?! \.\.\. )")
_BORDER = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|, out=")
_COUNT = {name: re.compile(rf"'{name}': (\d+)") for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?)")
_TOO_LONG = "prompt cut by the log (level 2 keeps 2,048); log with --log-requests-level 3"
_NO_CONTENT = "no prompt in the log (level 0 or 1); log with --log-requests-level 3"


@dataclass(frozen=True)
class LoggedRequest:
    """A finished request of the log."""

    prompt: str | list[int] | None
    output: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    finished_s: float | None
    cut: bool


def read_request_log(
    path: Path, *, block_tokens: int = 64, tokenizer: Tokenizer | None = None, skip_bad: bool = False
) -> Trace:
    """Read finished requests; they are in the order of their end, as the log is.

    Requests whose prompt the log left out or cut are counted as skipped; when that is all of them, what is left is a
    trace of lengths, which says so.
    """
    skips = Skips()
    whole: list[LoggedRequest] = []
    bare: list[LoggedRequest] = []
    for number, line in files.lines(path):
        entry = _entry(line)
        if entry is None:
            continue
        if isinstance(entry, str):
            if not skip_bad:
                raise InputError(
                    f"{path}:{number}: {entry}; fix the line, or leave bad lines out with --skip-bad-lines"
                )
            skips.add("bad line", f"{path}:{number}: {entry}")
        elif entry.prompt:
            whole.append(entry)
        else:
            bare.append(entry)
            skips.add(_TOO_LONG if entry.cut else _NO_CONTENT, f"{path}:{number}")
    if not whole and bare:
        arrival_s, timing = arrivals([entry.finished_s for entry in bare])
        return Trace.lengths_only(
            [entry.prompt_tokens for entry in bare],
            [entry.completion_tokens for entry in bare],
            arrival_s=arrival_s,
            origin=f"measured: {path.name}",
            skipped=skips.counts,
            notes=(_TOO_LONG if bare[0].cut else _NO_CONTENT, *timing),
        )
    if not whole and not skips.counts:
        raise InputError(
            f"{path}: holds no finished request; a server logs them with --log-requests --log-requests-level 3"
        )
    requests = [Request(entry.prompt or "", entry.output, entry.finished_s) for entry in whole]
    notes = ("requests are in the order of their end, with the time of their end",)
    return tokenized(
        requests,
        path,
        block_tokens=block_tokens,
        tokenizer=tokenizer,
        skips=skips,
        notes=notes,
    )


def _entry(line: str) -> LoggedRequest | str | None:
    """A finished request, what is wrong with it, or None for any other line."""
    if FINISHED in line:
        return _from_text(line)
    start = line.find('{"timestamp"')
    if start >= 0 and '"request.finished"' in line:
        try:
            record = json.loads(line[start:])
        except ValueError as error:
            return f"not JSON ({error})"
        return _from_json(record)
    return None


def _halves(line: str) -> tuple[str, str]:
    """What was asked and what was answered; a prompt may hold ``, out=`` as well, so quoted text is stepped over."""
    border = next((found.start() for found in _BORDER.finditer(line) if found[0] == ", out="), -1)
    return (line[:border], line[border:]) if border >= 0 else (line, line)


def _from_text(line: str) -> LoggedRequest | str:
    asked, answered = _halves(line)
    facts = answered.rpartition("'meta_info': ")[2]
    counts = {name: pattern.search(facts) for name, pattern in _COUNT.items()}
    tokens, completed = counts["prompt_tokens"], counts["completion_tokens"]
    if tokens is None:
        return "a finished request without prompt_tokens"
    prompt: str | list[int] | None = None
    text = _TEXT.search(asked)
    # behind the text: a prompt may quote anything, a list of ids as well
    ids = _INPUT_IDS.search(asked, text.end() if text else 0)
    if ids:
        prompt = _numbers(ids[1])
    elif text:
        try:
            prompt = ast.literal_eval(text[1])  # a single quoted literal: the pattern admits nothing else
        except (SyntaxError, ValueError):
            return "a prompt that is not a quoted text"
    output = _OUTPUT_IDS.search(answered)
    cached = counts["cached_tokens"]
    stamp = _STAMP.search(line)
    return LoggedRequest(
        prompt=prompt,
        output=_numbers(output[1]) if output else [],
        prompt_tokens=int(tokens[1]),
        completion_tokens=int(completed[1]) if completed else 0,
        cached_tokens=int(cached[1]) if cached else None,
        finished_s=seconds(stamp[1]) if stamp else None,
        cut="input_ids=[" in asked or "text='" in asked or 'text="' in asked,
    )


def _from_json(record: Any) -> LoggedRequest | str:
    obj, out = record.get("obj"), record.get("out")
    if not isinstance(obj, dict) or not isinstance(out, dict) or not isinstance(out.get("meta_info"), dict):
        return "a finished request without obj, out and meta_info"
    meta = out["meta_info"]
    ids, text = obj.get("input_ids"), obj.get("text")
    cut = (isinstance(ids, list) and "..." in ids) or (isinstance(text, str) and len(text) == 2051)
    prompt: str | list[int] | None = None
    if isinstance(ids, list) and ids and all(isinstance(x, int) for x in ids):
        prompt = ids
    elif isinstance(text, str) and text and not cut:
        prompt = text
    produced = out.get("output_ids")
    usable = [x for x in produced if isinstance(x, int)] if isinstance(produced, list) else []
    if not _is_count(meta.get("prompt_tokens")):
        return f"expected prompt_tokens, a whole number, got {meta.get('prompt_tokens')!r}"
    if meta.get("completion_tokens") is not None and not _is_count(meta["completion_tokens"]):
        return f"expected completion_tokens, a whole number, got {meta['completion_tokens']!r}"
    return LoggedRequest(
        prompt=prompt,
        output=usable if isinstance(produced, list) and len(usable) == len(produced) else [],
        prompt_tokens=meta["prompt_tokens"],
        completion_tokens=meta.get("completion_tokens") or 0,
        cached_tokens=meta.get("cached_tokens"),
        finished_s=seconds(str(record.get("timestamp", ""))),
        cut=cut,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]
