"""SGLang's own request logs (``--log-requests``), in both of its formats.

Text: ``Finish: obj=GenerateReqInput(…, text='…', input_ids=[…], …), out={…, 'output_ids': […], 'meta_info': {…}}``.
JSON (``--log-requests-format json``): ``{"timestamp": …, "event": "request.finished", "obj": {…}, "out": {…}}``.
Read from sglang 0.5.10 and 0.5.23, ``srt/utils/request_logger.py``: levels 0 and 1 log no content, level 2 cuts
every text and list at 2,048, level 3 keeps all. Prefix information therefore needs level 3.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.traffic.traces import files
from hicache_lab.traffic.traces.files import Skips
from hicache_lab.traffic.traces.prompts import Request, Tokenizer, tokenized
from hicache_lab.traffic.traces.times import arrivals, seconds
from hicache_lab.traffic.traces.trace import MOST_EXACT, Trace

FINISHED = "Finish: obj="
_INPUT_IDS = re.compile(r"\binput_ids=\[([0-9, ]*)\](?! \.\.\. )")
_OUTPUT_IDS = re.compile(r"'output_ids': \[([0-9, ]*)\](?! \.\.\. )")
_TEXT = re.compile(r"\btext=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")(?! \.\.\. )")
_BORDER = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|, out=")
_COUNT = {name: re.compile(rf"'{name}': (\d+)") for name in ("prompt_tokens", "completion_tokens")}
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
    finished_s: float | None
    cut: bool


def read_request_log(
    path: Path, *, block_tokens: int | None = None, tokenizer: Tokenizer | None = None, skip_bad: bool = False
) -> Trace:
    """Read finished requests; they are in the order of their end, as the log is.

    Requests whose prompt the log left out or cut are counted as skipped; when that is all of them, what is left is a
    trace of lengths, which says so.
    """
    skips = Skips(skip_bad)
    complete: list[LoggedRequest] = []
    bare: list[LoggedRequest] = []
    for number, line in files.lines(path):
        try:
            entry = _entry(line)
        except ValueError as error:
            skips.bad("line", f"{path}:{number}", error)
            continue
        if entry is None:
            continue
        if entry.prompt:
            complete.append(entry)
        else:
            bare.append(entry)
            skips.add(_TOO_LONG if entry.cut else _NO_CONTENT, f"{path}:{number}")
    if not complete and bare:
        arrival_s, timing = arrivals([entry.finished_s for entry in bare])
        return Trace.lengths_only(
            [entry.prompt_tokens for entry in bare],
            [entry.completion_tokens for entry in bare],
            arrival_s=arrival_s,
            origin=f"measured: {path.name}",
            skipped=skips.counts,
            notes=(_TOO_LONG if bare[0].cut else _NO_CONTENT, *timing),
        )
    if not complete and not skips.counts:
        raise InputError(
            f"{path}: holds no finished request; a server logs them with --log-requests --log-requests-level 3"
        )
    requests = [Request(entry.prompt or "", entry.output, entry.finished_s) for entry in complete]
    notes = ("requests are in the order of their end, with the time of their end",)
    return tokenized(
        requests,
        path,
        block_tokens=block_tokens,
        tokenizer=tokenizer,
        skips=skips,
        notes=notes,
    )


def _entry(line: str) -> LoggedRequest | None:
    """A finished request, or None for any other line.

    Raises:
        ValueError: what is wrong with a finished request.
    """
    if FINISHED in line:
        return _from_text(line)
    start = line.find('{"timestamp"')
    if start >= 0 and '"request.finished"' in line:
        return _from_json(files.decode_json(line[start:]))
    return None


def _halves(line: str) -> tuple[str, str]:
    """What was asked and what was answered; a prompt may hold ``, out=`` as well, so quoted text is stepped over."""
    border = next((found.start() for found in _BORDER.finditer(line) if found[0] == ", out="), -1)
    return (line[:border], line[border:]) if border >= 0 else (line, line)


def _from_text(line: str) -> LoggedRequest:
    asked, answered = _halves(line)
    facts = answered.rpartition("'meta_info': ")[2]
    counts = {name: int(found[1]) if (found := pattern.search(facts)) else None for name, pattern in _COUNT.items()}
    if counts["prompt_tokens"] is None:
        raise ValueError("a finished request without prompt_tokens")
    prompt: str | list[int] | None = None
    text = _TEXT.search(asked)
    # behind the text: a prompt may quote anything, a list of ids as well
    ids = _INPUT_IDS.search(asked, text.end() if text else 0)
    if ids:
        prompt = _ids(ids[1])
    elif text:
        try:
            prompt = ast.literal_eval(text[1])  # a single quoted literal: the pattern admits nothing else
        except (SyntaxError, ValueError):
            raise ValueError("a prompt that is not a quoted text") from None
    output = _OUTPUT_IDS.search(answered)
    stamp = _STAMP.search(line)
    return LoggedRequest(
        prompt=prompt,
        output=_ids(output[1]) if output else [],
        prompt_tokens=_count(counts, "prompt_tokens"),
        completion_tokens=_count(counts, "completion_tokens"),
        finished_s=seconds(stamp[1]) if stamp else None,
        cut="input_ids=[" in asked or "text='" in asked or 'text="' in asked,
    )


def _from_json(record: Any) -> LoggedRequest:
    obj, out = record.get("obj"), record.get("out")
    if not isinstance(obj, dict) or not isinstance(out, dict) or not isinstance(out.get("meta_info"), dict):
        raise ValueError("a finished request without obj, out and meta_info")
    meta = out["meta_info"]
    ids, text = obj.get("input_ids"), obj.get("text")
    cut = (isinstance(ids, list) and "..." in ids) or (isinstance(text, str) and len(text) == 2051)
    prompt: str | list[int] | None = None
    if isinstance(ids, list) and ids and all(isinstance(x, int) for x in ids):
        prompt = ids
    elif isinstance(text, str) and text and not cut:
        prompt = text
    output = out.get("output_ids")
    if meta.get("prompt_tokens") is None:
        raise ValueError("expected prompt_tokens, a whole number, got None")
    return LoggedRequest(
        prompt=prompt,
        output=output if isinstance(output, list) and all(isinstance(x, int) for x in output) else [],
        prompt_tokens=_count(meta, "prompt_tokens"),
        completion_tokens=_count(meta, "completion_tokens"),
        finished_s=seconds(str(record.get("timestamp", ""))),
        cut=cut,
    )


def _count(meta: Mapping[str, Any], name: str) -> int:
    """A number of tokens; 0 where there is none."""
    value = 0 if meta.get(name) is None else meta[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_EXACT:
        raise ValueError(f"expected {name}, a whole number, got {value!r}")
    return value


def _ids(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]
