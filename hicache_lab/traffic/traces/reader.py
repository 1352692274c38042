"""One door for every trace file: look at its beginning, take the reader that knows it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.traffic.traces import files
from hicache_lab.traffic.traces.hashed import read_hashed
from hicache_lab.traffic.traces.lengths import (
    looks_like_lengths,
    read_bench_serving,
    read_lengths_csv,
    refuse_bench_multiturn,
)
from hicache_lab.traffic.traces.prompts import PROMPT_KEYS, Tokenizer, read_prompts
from hicache_lab.traffic.traces.request_logs import FINISHED, read_request_log
from hicache_lab.traffic.traces.trace import Trace


@dataclass(frozen=True)
class TraceFormat:
    """A kind of file.

    Attributes:
        what: for a list of the formats.
        read: its reader.
        takes: the options of ``read_trace`` that the reader knows.
        streamed: ``sampled_curve`` reads it piece by piece, so a file may be larger than the memory.
    """

    what: str
    read: Callable[..., Trace]
    takes: tuple[str, ...]
    streamed: bool = False


FORMATS = {
    "mooncake": TraceFormat(
        "JSONL with hash_ids (Mooncake, Qwen-Bailian, kvcache-simulator)",
        read_hashed,
        ("block_tokens", "skip_bad"),
        streamed=True,
    ),
    "prompts": TraceFormat(
        "JSONL or JSON with prompt, messages, conversations or token ids",
        read_prompts,
        ("block_tokens", "tokenizer", "sessions_at_once", "skip_bad"),
    ),
    "sglang-log": TraceFormat(
        "an SGLang log with --log-requests --log-requests-level 3",
        read_request_log,
        ("block_tokens", "tokenizer", "skip_bad"),
    ),
    "lengths-csv": TraceFormat(
        "CSV with prompt and output lengths (Azure, BurstGPT): no prefix information", read_lengths_csv, ("skip_bad",)
    ),
    "bench-serving": TraceFormat(
        "bench_serving's result file with --output-details: no prefix information", read_bench_serving, ("skip_bad",)
    ),
}
_LOOKED_AT = 400
READING = ("format", "block_tokens", "tokenizer", "sessions_at_once", "skip_bad")  # the options of ``read_trace``


def sniff(path: Path) -> str:
    """Name the format of a file by its first lines.

    Raises:
        InputError: none of the known formats.
    """
    beginning = list(islice(files.lines(path), _LOOKED_AT))
    if not beginning:
        raise InputError(f"{path}: is empty")
    first = beginning[0][1].strip()
    if looks_like_lengths(first):
        return "lengths-csv"
    if first.startswith("[") and not _is_stamped(first):
        return "prompts"
    # a first line may be broken or a remark: its reader reports it, the others tell which reader that is
    objects = [line for _, line in beginning if line.lstrip().startswith("{")]
    for find in (_json_format, _broken_format):
        for line in objects:
            kind_name = find(path, line)
            if kind_name:
                return kind_name
    if any(FINISHED in line or '"request.finished"' in line for _, line in beginning):
        return "sglang-log"
    known = "; ".join(f"{name}: {kind.what}" for name, kind in FORMATS.items())
    raise InputError(f"{path}: none of the known trace formats ({known}); name it with --format if it is one")


def _is_stamped(first: str) -> bool:
    return first[1:5].isdigit()


def _json_format(path: Path, first: str) -> str | None:
    try:
        record = files.decode_json(first)
    except ValueError:
        return None
    keys = set(record)
    if isinstance(record.get("body"), dict):
        keys |= set(record["body"])
    if "hash_ids" in keys:
        return "mooncake"
    if "summary" in keys and "tag" in keys:
        raise refuse_bench_multiturn(path)
    if "event" in keys or "obj" in keys:
        return "sglang-log"
    if "input_lens" in keys or {"request_throughput", "total_input_tokens"} <= keys:
        return "bench-serving"
    if keys & PROMPT_KEYS:
        return "prompts"
    return None


def _broken_format(_path: Path, line: str) -> str | None:
    """What a line that is no JSON names tells which reader must report it."""
    if '"hash_ids"' in line:
        return "mooncake"
    return "prompts" if any(f'"{key}"' in line for key in PROMPT_KEYS - {"text"}) else None


def read_trace(
    path: Path | str,
    *,
    format: str = "auto",
    block_tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
    sessions_at_once: int = 8,
    skip_bad: bool = False,
) -> Trace:
    """Read any trace file.

    Args:
        path: the file; plain, gzip or zstandard; "-" or a pipe is kept in a temporary file while it is read.
        format: one of ``FORMATS``, or "auto".
        block_tokens: tokens a block; None: the file's own, or a page of 64 tokens for prompts.
        tokenizer: for text prompts (``prompts.load_tokenizer``).
        sessions_at_once: for conversations without times.
        skip_bad: count bad records instead of stopping at the first.

    Raises:
        UsageError: an unknown format name, no such file.
        InputError: the file is not what it should be; names file and line.
    """
    if block_tokens is not None and block_tokens < 1:
        raise UsageError(f"--block-tokens: expected a whole number of at least 1, got {block_tokens}")
    options = {
        "block_tokens": block_tokens,
        "tokenizer": tokenizer,
        "sessions_at_once": sessions_at_once,
        "skip_bad": skip_bad,
    }
    with on_disk(Path(path)) as file:
        kind = format_of(file, format)
        trace = kind.read(file, **{name: options[name] for name in kind.takes})
    if file == Path(path):
        return trace
    name = stream_name(Path(path))
    notes = tuple(note.replace(str(file), name) for note in trace.notes)
    return replace(trace, origin=f"measured: {name}", notes=notes)


def format_of(path: Path, name: str = "auto") -> TraceFormat:
    """The format by its name, or (auto) by the file's first lines.

    Raises:
        UsageError: an unknown name.
        InputError: none of the known formats.
    """
    if name != "auto" and name not in FORMATS:
        raise UsageError(f"--format: expected auto or one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[sniff(path) if name == "auto" else name]


@contextmanager
def on_disk(path: Path) -> Iterator[Path]:
    """A stream cannot be looked at first and read then: it is kept in a file for that time. Files stay as they are.

    Raises:
        InputError: a stream that would take more than half of the room for temporary files.
    """
    if str(path) != "-" and not path.is_fifo() and not path.is_char_device():
        yield path
        return
    name = stream_name(path)
    if str(path) == "-" and sys.stdin is None:
        raise UsageError("standard input is closed; give a trace file")
    with tempfile.NamedTemporaryFile(prefix="hicache-lab-trace-") as copy:
        room = shutil.disk_usage(copy.name).free // 2
        try:
            with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as stream:
                while (block := stream.read(files.CHUNK_BYTES)) and room >= len(block):
                    room -= copy.write(block)
            copy.flush()
        except OSError as error:
            raise InputError(f"{name}: cannot be kept in {tempfile.gettempdir()} ({error.strerror})") from None
        if block:
            raise InputError(f"{name}: takes over half of the room in {tempfile.gettempdir()}; TMPDIR names another")
        try:
            yield Path(copy.name)
        except InputError as error:
            raise InputError(str(error).replace(copy.name, name)) from None


def stream_name(path: Path) -> str:
    """What a person calls it."""
    return "standard input" if str(path) == "-" else path.name
