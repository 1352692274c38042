"""Options as argparse reads them: names, abbreviations, how many values, types, and ``--config`` files."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.secrets import is_secret, redact
from hicache_lab.base.units import KUBERNETES_SUFFIXES
from hicache_lab.sglang.launch.config import FIELD_TYPES, TypedOption, Value
from hicache_lab.sglang.launch.flags import Flag, resolve
from hicache_lab.sglang.launch.shell import ShellWord, plain_words

# what argparse takes for a negative number, and therefore for a value
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
# not needed to size anything: an unknown variable in one of these is noted, not an error
_UNSIZED = {"host", "port", "node_rank"}


@dataclass
class OptionReading:
    """The options of one launch: field values, other options, and the tokens they came from."""

    version: Version | None
    values: dict[str, Any] = field(default_factory=dict)
    other: list[tuple[str, Value]] = field(default_factory=list)
    typed: list[TypedOption] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_options(words: Sequence[ShellWord], version: Version | None, *, is_serve: bool) -> OptionReading:
    """Read the words after the launch.

    Args:
        words: options and values.
        version: the release, if known; abbreviations depend on it.
        is_serve: ``sglang serve``, whose first plain word is the model.

    Raises:
        UsageError: a word or a value that the server would refuse, or a variable without a value.
    """
    options = OptionReading(version)
    at = 0
    while at < len(words):
        word = words[at]
        if not _is_option(word):
            _positional(options, word, is_serve=is_serve)
            at += 1
            continue
        spelling, equals, _ = word.text.partition("=")
        if not spelling.startswith("--") and spelling != "-h":
            raise UsageError(f"{spelling}: the server knows no option with one hyphen; write -{spelling}")
        resolved = resolve(spelling, version)
        taken = [] if equals else _values(words, at + 1, resolved.flag.arity(version) if resolved.flag else "+")
        if resolved.note:
            options.notes.append(resolved.note)
        _option(options, resolved.flag, word, taken)
        at += 1 + len(taken)
    return options


def _is_option(word: ShellWord) -> bool:
    return word.text.startswith("-") and len(word.text) > 1 and not _NEGATIVE_NUMBER.fullmatch(word.text)


def _values(words: Sequence[ShellWord], at: int, arity: str) -> list[ShellWord]:
    """The words after an option that belong to it."""
    end = at
    while end < len(words) and not _is_option(words[end]):
        end += 1
    most = {"0": 0, "1": 1, "?": 1}.get(arity, end - at)
    return list(words[at : min(end, at + most)])


def _positional(options: OptionReading, word: ShellWord, *, is_serve: bool) -> None:
    if re.match(r"[\u2012-\u2015\u2212]", word.text):
        raise UsageError(f"{word.text!r} starts with a typographic dash; write two hyphens (--)")
    if word.unresolved:
        raise _unknown_variable("the launch", word)
    if is_serve and "model" not in options.values:
        options.values["model"] = word.text
        options.typed.append(TypedOption("", "--model-path", (word.text,), word.raw, word.lead, "model"))
        return
    last = options.typed[-1].spelling if options.typed else "the launch"
    if word.raw.startswith("\\ "):
        raise UsageError(f"after {last}: a backslash before a blank does not continue the line; delete the blank")
    raise UsageError(f"{word.text!r} after {last} belongs to no option; the server refuses to start with it")


def _unknown_variable(where: str, word: ShellWord) -> UsageError:
    name = word.unresolved[0]
    return UsageError(
        f"{where}: {word.text} uses {name}, to which this text gives no value; write the value in its place"
        + (f" or {name}=VALUE on a line before" if name.isidentifier() else "")
    )


def _option(options: OptionReading, flag: Flag | None, word: ShellWord, taken: Sequence[ShellWord]) -> None:
    spelling, equals, inline = word.text.partition("=")
    values = (inline,) if equals else tuple(value.text for value in taken)
    raw = " ".join(one.raw for one in (word, *taken))
    name = flag.name if flag else spelling
    arity = flag.arity(options.version) if flag else "*"
    if arity == "0" and equals:
        raise UsageError(f"{spelling}={inline}: {name} is a switch and takes no value; write {name} alone")
    if arity in {"1", "+"} and not values:
        raise UsageError(f"{spelling}: expected a value, got nothing")
    target = flag.field if flag else None
    unknown = next((one for one in (word, *taken) if one.unresolved), None)
    if target is not None and unknown is not None:
        if target not in _UNSIZED:
            raise _unknown_variable(spelling, unknown)
        options.notes.append(f"{spelling}: {unknown.text} is not known and is kept; no size depends on it")
        target = None
    if target is None:
        _keep(options, TypedOption(spelling, name, values, raw, word.lead))
        return
    if target in options.values and values:
        options.notes.append(f"{name} is given more than once; the server takes the last")
    options.values[target] = typed_value(target, values[0] if values else None, spelling)
    options.typed.append(TypedOption(spelling, name, values, raw, word.lead, target))


def _keep(options: OptionReading, token: TypedOption) -> None:
    """An option without a field: kept in order, without the credentials that its value is or contains."""
    if token.values and is_secret(token.name):
        variable = "$" + token.name.removeprefix("--").replace("-", "_").upper()
        if token.values != (variable,):
            options.notes.append(f"{token.name}: its value is not kept; the line reads it from {variable}")
        token = replace(token, values=(variable,), raw=f'{token.spelling} "{variable}"')
    elif (values := tuple(redact(value) for value in token.values)) != token.values:
        options.notes.append(f"{token.name}: a credential in its value is not kept; put it back where the stars are")
        token = replace(token, values=values, raw=" ".join([token.spelling, *map(shlex.quote, values)]))
    options.other.append((token.name, token.value))
    options.typed.append(token)


def typed_value(target: str, text: str | None, flag: str) -> Any:
    """A field's value from its text.

    Args:
        target: the ``LaunchConfig`` field.
        text: the text after the option; None for a switch.
        flag: the option as typed, for the error.

    Raises:
        UsageError: not of the field's type; names the option, what was expected and what came.
    """
    kind = FIELD_TYPES[target]
    if kind is bool:
        return True
    if text is None:
        raise UsageError(f"{flag}: expected a value, got nothing")
    if kind is str:
        return text
    number: float | None = None
    with suppress(ValueError):
        if kind is int or target == "hicache_size":
            return int(text)
    if kind is int:
        number = _with_suffix(text) if target in {"max_total_tokens", "context_length"} else None
    else:
        with suppress(ValueError):
            number = float(text)
    if number is not None and math.isfinite(number):
        return number
    if target == "hicache_size":
        raise UsageError(
            f"{flag}: expected a whole number of GB (1e9 bytes) per rank without a unit, got {text!r}; "
            f"for example {flag} 48"
        )
    expected = "a whole number" if kind is int else "a finite number"
    hint = ", a variable that nothing has replaced" if re.search(r"\$\w|\$\{|%\w+%", text) else ""
    raise UsageError(f"{flag}: expected {expected}, got {text!r}{hint}")


def _with_suffix(text: str) -> int | None:
    """100k and 128Ki, which 0.5.10+ read for two options (utils/common.py:human_readable_int)."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?([kMGT]|[KMGT]i)", text.strip())
    if match is None or (match[2] and "i" in match[3]):
        return None
    decimals = match[2] or ""
    return int(match[1] + decimals) * KUBERNETES_SUFFIXES[match[3]] // int(10 ** len(decimals))


def merge_config_file(options: OptionReading, base_dir: Path | None) -> None:
    """Add what ``--config FILE`` sets; the command line wins, as in the server's ConfigArgumentMerger.

    Args:
        options: read so far; changed in place.
        base_dir: where a relative path is looked up; None leaves the file unread, with a note.

    Raises:
        UsageError: more than one file, or an option in it that the server would refuse.
        InputError: the file is missing or not a YAML mapping.
    """
    names = [value for name, value in options.other if name == "--config"]
    if not names:
        return
    if len(names) > 1:
        raise UsageError("--config: given more than once; the server accepts one file")
    name = str(names[0])
    if base_dir is None:
        options.notes.append(f"--config {name} was not read: what it sets is not known here")
        return
    inner = OptionReading(options.version)
    for key, value in _config_mapping(base_dir / name).items():
        _config_entry(inner, str(key), value)
    given = {token.name for token in options.typed}
    options.values = {**inner.values, **options.values}
    options.other = [entry for entry in inner.other if entry[0] not in given] + options.other
    options.typed = [replace(token, from_file=True) for token in inner.typed] + options.typed
    options.notes += [f"{name}: {note}" for note in inner.notes]


def _config_mapping(path: Path) -> dict[Any, Any]:
    if path.suffix.lower() not in {".yaml", ".yml"}:
        raise InputError(f"--config {path.name}: the server only takes .yaml or .yml")
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError(f"--config {path}{f':{mark.line + 1}' if mark else ''}: not YAML") from error
    if data is not None and not isinstance(data, dict):
        raise InputError(f"--config {path}: expected a mapping of options, got a {type(data).__name__}")
    return data or {}


def _config_entry(options: OptionReading, key: str, value: Any) -> None:
    """One entry as the server turns it into words: true is the bare option, false is nothing."""
    resolved = resolve("--" + key, options.version)
    if resolved.note:
        options.notes.append(resolved.note)
    is_switch = isinstance(value, bool) and (resolved.flag is None or resolved.flag.arity(options.version) == "0")
    if value == [] or (is_switch and not value):
        return
    if is_switch:
        texts = []
    elif isinstance(value, list):
        texts = [str(item) for item in value]
    else:
        texts = [json.dumps(value) if isinstance(value, dict | bool) else str(value)]
    word, *taken = plain_words(["--" + key, *texts])
    _option(options, resolved.flag, word, taken)
