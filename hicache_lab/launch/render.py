"""``LaunchConfig`` → the launch line to copy: as pasted where nothing changed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from hicache_lab.errors import UsageError
from hicache_lab.launch.command import typed_value
from hicache_lab.launch.config import (
    FIELD_TYPES,
    FLAG_FIELDS,
    LaunchConfig,
    LaunchSource,
    Token,
    Value,
    flag_of,
)
from hicache_lab.launch.flags import known_flags

_PROGRAM = "python -m sglang.launch_server"
# one way to size the host pool replaces the other
_RIVALS = {"hicache_size": "hicache_ratio", "hicache_ratio": "hicache_size"}


def changed(config: LaunchConfig, changes: Mapping[str, Any]) -> LaunchConfig:
    """The configuration with some flags set or (None) taken away; a size replaces a ratio and the reverse.

    Args:
        config: the launch.
        changes: field or option name → value, e.g. ``{"hicache_size": 48}`` or ``{"--page-size": 64}``.

    Raises:
        UsageError: a name that is no flag of ``LaunchConfig``, or a value of the wrong type.
    """
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        known = known_flags().get(name)
        field = (known.field if known else None) or name
        if field not in FLAG_FIELDS:
            close = get_close_matches(field, FLAG_FIELDS, n=1)
            raise UsageError(f"{name}: no flag of a launch{f'; did you mean {close[0]}?' if close else ''}")
        fields[field] = _checked(field, value)
    for field, rival in _RIVALS.items():
        if fields.get(field) is not None and rival not in fields:
            fields[rival] = None
    return replace(config, **fields)


def _checked(field: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        if isinstance(value, bool) and FIELD_TYPES[field] != "bool":
            raise UsageError(f"{flag_of(field)}: expected a value, got {value}")
        return value or None
    if FIELD_TYPES[field] == "bool":
        raise UsageError(f"{flag_of(field)}: expected True, False or None, got {value!r}")
    return typed_value(field, str(value), flag_of(field))


def render(
    config: LaunchConfig, *, changes: Mapping[str, Any] | None = None, multiline: bool | None = None
) -> str:
    """The launch line of a configuration, quoted for a shell.

    Tokens that were pasted keep their spelling, quotes and order; what differs is changed in place, what is new
    comes last. Options that came from a ``--config`` file appear only where they were changed.

    Args:
        config: the launch.
        changes: flags to set or take away first (see ``changed``).
        multiline: one option a line; None keeps the paste's way.

    Raises:
        UsageError: a change that names no flag or has the wrong type.
    """
    target = changed(config, changes) if changes else config
    source = target.source or LaunchSource("fields")
    parts = [*_kept(target, source), *_added(target, source)]
    spread = source.is_multiline if multiline is None else multiline
    return (" \\\n  " if spread else " ").join([_prefix(target, source), *parts])


def _prefix(config: LaunchConfig, source: LaunchSource) -> str:
    prefix = source.prefix or _PROGRAM
    typed = set(shlex.split(prefix)) if source.prefix else set()
    missing = [
        f"{name}={_quoted(value)}"
        for name, value in config.env
        if config.container is None and not {f"{name}={value}", f"{name}=${name}"} & typed
    ]
    return " ".join([*missing, prefix])


def _quoted(text: str) -> str:
    """Quoted for a shell; a value that stands for a secret stays a variable."""
    return f'"{text}"' if text.startswith("$") and text[1:].isidentifier() else shlex.quote(text)


def _value_of(token: Token) -> Value:
    return token.values[0] if len(token.values) == 1 else token.values or None


def _kept(config: LaunchConfig, source: LaunchSource) -> list[str]:
    """The pasted tokens that still hold, changed in place where the value differs."""
    parts = []
    rest = list(config.other)
    final = {_field(token): token for token in source.tokens if _field(token)}
    for token in source.tokens:
        field = _field(token)
        if token.from_file:
            continue
        if field is None:
            entry = (token.name, _value_of(token))
            if entry in rest:
                rest.remove(entry)
                parts.append(token.raw)
            continue
        value = getattr(config, field)
        if value is None or (token is not final[field] and _parsed(final[field], field) != value):
            continue
        parts.append(
            token.raw
            if _parsed(token, field) == value or token is not final[field]
            else _spelled(token.spelling, value)
        )
    return parts


def _field(token: Token) -> str | None:
    flag = known_flags().get(token.name)
    # a flag whose value was an unknown variable is kept as it is
    return None if flag is None or any(v.startswith("$") for v in token.values) else flag.field


def _parsed(token: Token, field: str) -> Any:
    return typed_value(field, token.values[0] if token.values else None, token.spelling)


def _spelled(spelling: str, value: Any) -> str:
    text = "" if value is True else _quoted(str(value))
    return f"{spelling} {text}".strip()


def _added(config: LaunchConfig, source: LaunchSource) -> list[str]:
    typed = {_field(token): token for token in source.tokens}
    parts = []
    for field, value in config.given():
        token = typed.get(field)
        if token is None or (token.from_file and _parsed(token, field) != value):
            parts.append(_spelled(flag_of(field), value))
    pasted = [(token.name, _value_of(token)) for token in source.tokens if _field(token) is None]
    if source.kind == "server_args":
        return parts
    for entry in config.other:
        if entry in pasted:
            pasted.remove(entry)
        else:
            name, value = entry
            values = () if value is None else (value,) if isinstance(value, str) else value
            parts.append(" ".join([name, *(_quoted(one) for one in values)]))
    return parts
