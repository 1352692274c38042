"""What people paste → ``LaunchConfig``: find the SGLang launch in it and read its options as argparse would."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from hicache_lab.errors import InputError, UsageError
from hicache_lab.launch.config import (
    FIELD_TYPES,
    Container,
    LaunchConfig,
    LaunchSource,
    Token,
    Value,
    flag_of,
)
from hicache_lab.launch.flags import NEGATIVE_NUMBER, Flag, release, resolve
from hicache_lab.launch.shell import ASSIGNMENT, Command, Word, clean_paste, read_commands
from hicache_lab.launch.wrappers import docker_run, dockerfile_words, looks_like_document, read_documents
from hicache_lab.units import GB, GIB, KB, KIB, MB, MIB, TB, TIB

_MODULES = re.compile(r"sglang\.launch_server|sglang_router\.launch_server|dynamo\.sglang(\.\w+)*")
_OTHER_ENGINES = re.compile(
    r"vllm(\.\S*)?|trtllm-serve|tensorrt_llm\S*|lmdeploy|text-generation-launcher|llama-server|lmcache\S*|"
    r"dynamo\.(vllm|trtllm)\S*|tritonserver|ollama"
)
_SECRET_FLAG = re.compile(r"--(?:\w+-)*(?:api-key|password|secret|token|watermark-key(?:-\w+)?)")
_SECRET_ENV = re.compile(r"\w*(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)", re.IGNORECASE)
# not needed to size anything: an unresolved variable here is noted, not an error
_UNSIZED = {"host", "port", "node_rank"}
_SI = {"k": KB, "M": MB, "G": GB, "T": TB, "Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": TIB}


@dataclass
class _Found:
    """A launch in a paste: the words before its options, and its options."""

    before: list[Word]
    options: list[Word]
    is_serve: bool
    is_multiline: bool = False
    container: Container | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class _Reader:
    version: Version | None
    values: dict[str, Any] = field(default_factory=dict)
    other: list[tuple[str, Value]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parse_launch(
    text: str | Sequence[str],
    *,
    sglang_version: str | None = None,
    base_dir: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> LaunchConfig:
    """Read the one SGLang launch in a paste.

    Args:
        text: shell text, a docker or Kubernetes wrapping of it, or a list of words.
        sglang_version: the release, if known: abbreviations are then read as that release reads them.
        base_dir: where a ``--config FILE`` with a relative path is looked up; None leaves the file unread.
        variables: values of shell variables that the paste itself does not set.

    Returns:
        What was given; what was not given is None.

    Raises:
        UsageError: no SGLang launch, several different ones, or an option the server would not understand.
        InputError: the ``--config`` file is missing or not a YAML mapping.
    """
    found = parse_launches(text, sglang_version=sglang_version, base_dir=base_dir, variables=variables)
    distinct = list(dict.fromkeys(found))
    if len(distinct) > 1:
        lines = "; ".join(f"{i}: {_short(one)}" for i, one in enumerate(distinct, 1))
        raise UsageError(
            f"{len(distinct)} different SGLang launches in this text; give one of them ({lines})"
        )
    return distinct[0]


def _short(config: LaunchConfig) -> str:
    return " ".join(f"{flag_of(name)} {value}" for name, value in list(config.given())[:4])[:100]


def parse_launches(
    text: str | Sequence[str],
    *,
    sglang_version: str | None = None,
    base_dir: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[LaunchConfig, ...]:
    """Read every SGLang launch in a paste (prefill and decode servers of one manifest, for instance).

    Args and errors are those of ``parse_launch``, without the limit to one launch.
    """
    version = None if sglang_version is None else release(sglang_version)
    known = dict(variables or {})
    if isinstance(text, str):
        cleaned, notes = clean_paste(text)
        found = _in_document(cleaned, known) if looks_like_document(cleaned) else _in_shell(cleaned, known)
        if not found and (words := dockerfile_words(cleaned)):
            found = _in_words([Word(word, shlex.quote(word)) for word in words], known)
    else:
        notes = []
        found = _in_words([Word(word, shlex.quote(word)) for word in text], known)
    if not found:
        raise UsageError(_nothing_found(text if isinstance(text, str) else shlex.join(text)))
    return tuple(
        replace(_read(one, version, base_dir, notes), sglang_version=sglang_version) for one in found
    )


def _nothing_found(text: str) -> str:
    for word in re.split(r"[\s\"'\[\],]+", text):
        if _OTHER_ENGINES.fullmatch(word.rpartition("/")[2]):
            return f"this launches {word[:60]}, not SGLang; only SGLang launches are in scope here"
    return (
        "no SGLang launch found; expected 'python -m sglang.launch_server …' or 'sglang serve MODEL …', "
        "bare or inside docker, compose, Kubernetes or sh -c"
    )


def _launch_end(words: Sequence[Word]) -> tuple[int, bool] | None:
    """Where the launch's options begin, and whether the launch is ``sglang serve``."""
    for index, word in enumerate(words):
        before = words[index - 1].text if index else ""
        name = word.text.rpartition("/")[2]
        if _MODULES.fullmatch(word.text) and before in {"-m", "-um"}:
            return index + 1, False
        if word.text.endswith("sglang/launch_server.py"):
            return index + 1, False
        if name == "serve" and before.rpartition("/")[2] == "sglang":
            return index + 1, True
    return None


def _in_words(
    words: Sequence[Word], variables: Mapping[str, str], *, is_multiline: bool = False
) -> list[_Found]:
    end = _launch_end(words)
    if end is not None:
        at, is_serve = end
        before = list(words[:at])
        one = _Found(before, list(words[at:]), is_serve, is_multiline, docker_run([w.text for w in before]))
        one.env = _assignments(before)
        return [one]
    for index, word in enumerate(words):
        # sh -c '…', ssh host '…': a command inside one word
        if "sglang" in word.text and re.search(r"\s", word.text):
            inner = _in_shell(word.text, variables)
            outside = words[:index]
            for one in inner:
                one.container = one.container or docker_run([w.text for w in outside])
                one.env = _assignments(outside) | one.env
            if inner:
                return inner
    return []


def _assignments(words: Sequence[Word]) -> dict[str, str]:
    """``A=1`` before the launch and docker's ``-e A=1``, ``--env=A=1``."""
    found = {}
    for word in words:
        text = word.text.removeprefix("--env=")
        match = ASSIGNMENT.fullmatch(text.removeprefix("-e") if text.startswith("-e") else text)
        if match is not None:
            found[match[1]] = match[2]
    return found


def _in_shell(text: str, variables: Mapping[str, str]) -> list[_Found]:
    commands = read_commands(text, variables)
    exported: dict[str, str] = {}
    found: list[_Found] = []
    for number, command in enumerate(commands):
        if command.words[0].text == "export":
            exported |= _assignments(command.words)
        for one in _in_words(command.words, variables, is_multiline=command.is_multiline):
            if one.container is None:
                one.env = exported | one.env
            if one.options and number + 1 < len(commands):
                _check_torn(commands[number + 1])
            found.append(one)
    return found


def _check_torn(following: Command) -> None:
    """An option at the start of the next command: a comment or a lost backslash has cut the launch in two."""
    if following.words[0].text.startswith("--"):
        raise UsageError(
            f"line {following.line}: {following.words[0].text} stands alone: the line above it ends the command "
            "(a comment or a missing backslash), so the server never sees it; join the lines or delete it"
        )


def _in_document(text: str, variables: Mapping[str, str]) -> list[_Found]:
    found = []
    for wrapped in read_documents(text):
        known = {**variables, **dict(wrapped.env)}
        if wrapped.shell is not None:
            inner = _in_shell(wrapped.shell + "\n", known)
        else:
            inner = _in_words([_kubernetes_word(word, known) for word in wrapped.words], known)
        if not inner and wrapped.words and "sglang" in (wrapped.container.image or ""):
            inner = _bare_arguments(wrapped.words)
        for one in inner:
            one.container = one.container or wrapped.container
            one.env = dict(wrapped.env) | one.env
        found += inner
    return found


def _kubernetes_word(text: str, variables: Mapping[str, str]) -> Word:
    """Kubernetes replaces ``$(NAME)`` in command and args, and nothing else."""
    missing = []

    def value(match: re.Match[str]) -> str:
        if match[1] not in variables:
            missing.append(match[1])
        return variables.get(match[1], match[0])

    expanded = re.sub(r"\$\(([A-Za-z_]\w*)\)", value, text)
    return Word(expanded, shlex.quote(expanded), tuple(missing))


def _bare_arguments(words: Sequence[str]) -> list[_Found]:
    """Arguments of an image whose entrypoint is the launch."""
    if not words[0].startswith("--model"):
        return []
    program = [Word(w, w) for w in ("python", "-m", "sglang.launch_server")]
    return [_Found(program, [Word(w, shlex.quote(w)) for w in words], False)]


def _read(
    found: _Found, version: Version | None, base_dir: Path | None, notes: Sequence[str]
) -> LaunchConfig:
    reader = _Reader(version, notes=list(notes))
    _read_options(reader, found.options, is_serve=found.is_serve)
    _merge_config_file(reader, base_dir)
    env = tuple((name, _hidden_env(name, value)) for name, value in found.env.items())
    source = LaunchSource("command", _prefix(found.before), tuple(reader.tokens), env, found.is_multiline)
    return LaunchConfig(
        **reader.values,
        other=tuple(reader.other),
        env=env,
        container=found.container,
        notes=tuple(dict.fromkeys(reader.notes)),
        source=source,
    )


def _hidden_env(name: str, value: str) -> str:
    return f"${name}" if value and _SECRET_ENV.fullmatch(name) else value


def _prefix(words: Sequence[Word]) -> str:
    parts = []
    for word in words:
        head, text = ("--env=", word.text[6:]) if word.text.startswith("--env=") else ("", word.text)
        match = ASSIGNMENT.fullmatch(text)
        hidden = match is not None and bool(match[2]) and _SECRET_ENV.fullmatch(match[1])
        parts.append(f'{head}{match[1]}="${match[1]}"' if match is not None and hidden else _kept_text(word))
    return " ".join(parts)


def _kept_text(word: Word) -> str:
    """The word as typed, unless a variable in it was replaced by its value."""
    return word.raw if word.unresolved or "$" not in word.raw or "$" in word.text else shlex.quote(word.text)


def _is_option(word: Word) -> bool:
    return word.text.startswith("-") and len(word.text) > 1 and not re.fullmatch(NEGATIVE_NUMBER, word.text)


def _read_options(reader: _Reader, words: Sequence[Word], *, is_serve: bool) -> None:
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_option(word):
            _positional(reader, word, is_serve=is_serve)
            continue
        spelling, equals, inline = word.text.partition("=")
        resolved = resolve(spelling, reader.version) if spelling != "--" else None
        flag = resolved.flag if resolved else None
        taken: list[Word] = []
        if not equals:
            taken = _values(words, at, flag)
            at += len(taken)
        values = (inline,) if equals else tuple(value.text for value in taken)
        if resolved and resolved.note:
            reader.notes.append(resolved.note)
        raw = " ".join([_kept_text(word), *(_kept_text(value) for value in taken)])
        unresolved = [name for one in (word, *taken) for name in one.unresolved]
        _option(reader, spelling, flag, values, raw, unresolved, has_inline=bool(equals))


def _values(words: Sequence[Word], at: int, flag: Flag | None) -> list[Word]:
    """The words after an option that belong to it."""
    end = at
    while end < len(words) and not _is_option(words[end]):
        end += 1
    most = {"0": 0, "1": 1, "?": 1}.get(flag.arity if flag else "+", end - at)
    return list(words[at : min(end, at + most)])


def _positional(reader: _Reader, word: Word, *, is_serve: bool) -> None:
    if re.match(r"[\u2012-\u2015\u2212]", word.text):
        raise UsageError(f"{word.text!r} starts with a typographic dash; write two hyphens (--)")
    if is_serve and "model" not in reader.values:
        if word.unresolved:
            raise _unknown_variable("the model", word.unresolved[0], word.text)
        reader.values["model"] = word.text
        reader.tokens.append(Token("", "--model-path", (word.text,), _kept_text(word)))
        return
    if word.unresolved:
        raise _unknown_variable("the options", word.unresolved[0], word.text)
    last = reader.tokens[-1].spelling if reader.tokens else "the launch"
    raise UsageError(f"{word.text!r} after {last} belongs to no option; the server refuses to start with it")


def _unknown_variable(where: str, name: str, text: str) -> UsageError:
    return UsageError(
        f"{where}: {text} uses {name}, which this text does not set; "
        f"put its value in its place or {name}=VALUE before the launch"
    )


def _option(
    reader: _Reader,
    spelling: str,
    flag: Flag | None,
    values: tuple[str, ...],
    raw: str,
    unresolved: Sequence[str],
    *,
    has_inline: bool,
) -> None:
    name = flag.name if flag else spelling
    if flag is not None and flag.arity == "0" and has_inline:
        raise UsageError(f"{spelling}={values[0]}: {name} is a switch and takes no value; write {name} alone")
    if flag is not None and flag.arity == "1" and not values:
        raise UsageError(f"{spelling}: expected a value, got nothing")
    target = flag.field if flag else None
    if target is None:
        _keep(reader, spelling, name, values, raw)
        return
    if unresolved:
        if target not in _UNSIZED:
            raise _unknown_variable(spelling, unresolved[0], values[-1] if values else spelling)
        reader.notes.append(
            f"{spelling}: {values[0] if values else ''} is not known; it is not needed for sizing"
        )
        _keep(reader, spelling, name, values, raw)
        return
    if target in reader.values and values:
        reader.notes.append(f"{name} is given more than once; the server takes the last")
    reader.values[target] = typed_value(target, values[0] if values else None, spelling)
    reader.tokens.append(Token(spelling, name, values, raw))


def _keep(reader: _Reader, spelling: str, name: str, values: tuple[str, ...], raw: str) -> None:
    if values and _SECRET_FLAG.fullmatch(name):
        variable = name.removeprefix("--").replace("-", "_").upper()
        if values != (f"${variable}",):
            reader.notes.append(f"{name}: its value is not kept; the line reads it from ${variable}")
        values, raw = (f"${variable}",), f'{spelling} "${variable}"'
    value: Value = values[0] if len(values) == 1 else values or None
    reader.other.append((name, value))
    reader.tokens.append(Token(spelling, name, values, raw))


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
    if kind == "bool":
        return True
    if text is None:
        raise UsageError(f"{flag}: expected a value, got nothing")
    if kind == "str":
        return text
    if target == "hicache_size":
        return _size_gb(text, flag)
    number = _integer(text, target) if kind == "int" else _number(text)
    if number is None:
        expected = "a whole number" if kind == "int" else "a number"
        raise UsageError(f"{flag}: expected {expected}, got {text!r}")
    return number


def _integer(text: str, target: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)", text.strip())
    if match is None or target not in {"max_total_tokens", "context_length"}:
        return None
    if "i" in match[2]:
        return int(match[1]) * _SI[match[2]] if match[1].isdigit() else None
    whole, _, decimals = match[1].partition(".")
    return int(whole + decimals) * _SI[match[2]] // 10 ** len(decimals)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _size_gb(text: str, flag: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        number = _number(text)
    if number is None:
        raise UsageError(
            f"{flag}: expected a whole number of GB (1e9 bytes) per rank without a unit, got {text!r}; "
            f"for example {flag} 48"
        )
    return number


def _merge_config_file(reader: _Reader, base_dir: Path | None) -> None:
    """Options of ``--config FILE``: the command line wins (ConfigArgumentMerger puts the file's options first)."""
    names = [value for name, value in reader.other if name == "--config"]
    if not names:
        return
    if len(names) > 1:
        raise UsageError("--config: given more than once; the server accepts one file")
    name = str(names[0])
    if base_dir is None:
        reader.notes.append(f"--config {name} was not read: what it sets is not known here")
        return
    inner = _Reader(reader.version)
    for key, value in _config_mapping(base_dir / name).items():
        _config_entry(inner, str(key), value)
    given = {token.name for token in reader.tokens}
    reader.values = {**inner.values, **reader.values}
    reader.other = [entry for entry in inner.other if entry[0] not in given] + reader.other
    reader.tokens = [replace(token, from_file=True) for token in inner.tokens] + reader.tokens
    reader.notes += [f"{name}: {note}" for note in inner.notes]


def _config_mapping(path: Path) -> dict[Any, Any]:
    if path.suffix.lower() not in {".yaml", ".yml"}:
        raise InputError(f"--config {path.name}: the server only takes .yaml or .yml")
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


def _config_entry(reader: _Reader, key: str, value: Any) -> None:
    spelling = "--" + key
    flag = resolve(spelling, reader.version).flag
    if isinstance(value, bool) and (flag is None or flag.arity == "0"):
        texts = () if value else None
    elif isinstance(value, list):
        texts = tuple(str(item) for item in value) or None
    else:
        texts = (json.dumps(value) if isinstance(value, dict | bool) else str(value),)
    if texts is None:
        return
    raw = shlex.join([spelling, *texts])
    _option(reader, spelling, flag, texts, raw, (), has_inline=False)
