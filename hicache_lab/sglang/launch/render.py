"""A configuration with some flags changed, and the launch line to copy: as pasted where nothing changed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.sglang.launch.config import (
    FIELD_TYPES,
    FLAG_FIELDS,
    LaunchConfig,
    LaunchSource,
    TypedOption,
    flag_of,
    inherits_environment,
)
from hicache_lab.sglang.launch.flags import known_flags
from hicache_lab.sglang.launch.options import typed_value

_PROGRAM = "python -m sglang.launch_server"
_LINE = " \\\n  "
# one way to size the host pool replaces the other
_RIVALS = {"hicache_size": "hicache_ratio", "hicache_ratio": "hicache_size"}


def changed(config: LaunchConfig, changes: Mapping[str, Any]) -> LaunchConfig:
    """The configuration with some flags set or (None) taken away; a size replaces a ratio and the reverse.

    Args:
        config: the launch.
        changes: field or option name → value, e.g. ``{"hicache_size": 48}`` or ``{"--page-size": 64}``.

    Raises:
        UsageError: a name that is not a flag of ``LaunchConfig``, or a value of the wrong type.
    """
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        known = known_flags().get(name)
        field = (known.field if known else None) or name
        if field not in FLAG_FIELDS:
            close = get_close_matches(field, FLAG_FIELDS, n=1)
            raise UsageError(f"{name}: not a flag of a launch{f'; did you mean {close[0]}?' if close else ''}")
        fields[field] = _checked(field, value)
    for field, rival in _RIVALS.items():
        if fields.get(field) is not None and rival not in fields:
            fields[rival] = None
    return replace(config, **fields)


def _checked(field: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        if isinstance(value, bool) and FIELD_TYPES[field] is not bool:
            raise UsageError(f"{flag_of(field)}: expected a value, got {value}")
        return value or None
    if FIELD_TYPES[field] is bool:
        raise UsageError(f"{flag_of(field)}: expected True, False or None, got {value!r}")
    return typed_value(field, str(value), flag_of(field))


def render_launch(
    config: LaunchConfig, *, changes: Mapping[str, Any] | None = None, multiline: bool | None = None
) -> str:
    """The launch line of a configuration, quoted for a shell.

    Tokens that were pasted keep their spelling, quotes, order and line breaks; what differs is changed in
    place, what is new comes last. Options that came from a ``--config`` file appear only where they were
    changed; of a server_args dump only the fields of ``LaunchConfig`` appear.

    Args:
        config: the launch.
        changes: flags to set or take away first (see ``changed``).
        multiline: True puts each option on a line of its own, False all on one; None keeps the paste's way.

    Raises:
        UsageError: a change that does not name a flag or has the wrong type.
    """
    target = changed(config, changes) if changes else config
    source = target.source or LaunchSource("fields")
    kept = _kept(target, source)
    lead = kept[-1][0] if kept else " "
    parts = [*kept, *((lead, text) for text in _added(target, source))]
    if multiline is not None:
        parts = [(_LINE if multiline else " ", text) for _, text in parts]
    line = _prefix(target, source) + "".join(lead + text for lead, text in parts)
    return re.sub(r" \\\n\s*", " ", line) if multiline is False else line


def _prefix(config: LaunchConfig, source: LaunchSource) -> str:
    if not source.prefix:
        return " ".join([*(f"{name}={_quoted(value)}" for name, value in config.env), _PROGRAM])
    if not inherits_environment(config.container):
        return source.prefix
    typed = {word.partition("=")[0] for word in shlex.split(source.prefix) if "=" in word}
    exported = [f"{name}={_quoted(value)}" for name, value in config.env if name not in typed]
    return " ".join([*exported, source.prefix])


def _quoted(text: str) -> str:
    """Quoted for a shell; a variable that stands for a secret stays one."""
    return f'"{text}"' if text.startswith("$") and text[1:].isidentifier() else shlex.quote(text)


def _kept(config: LaunchConfig, source: LaunchSource) -> list[tuple[str, str]]:
    """The pasted tokens that still hold, as (lead, text), changed in place where the value differs."""
    parts = []
    rest = list(config.other)
    last = {token.field: token for token in source.options if not token.from_file}
    for token in source.options:
        if token.from_file:
            continue
        if token.field is None:
            entry = (token.name, token.value)
            if entry in rest:
                rest.remove(entry)
                parts.append((token.lead, token.raw))
            continue
        value = getattr(config, token.field)
        if value is None or value is False:
            continue
        if _parsed(last[token.field]) == value:
            parts.append((token.lead, token.raw))
        elif token is last[token.field]:
            joint = "=" if token.raw.startswith(token.spelling + "=") else " "
            parts.append((token.lead, _spelled(token.spelling, value, joint)))
    return parts


def _parsed(token: TypedOption) -> Any:
    assert token.field is not None
    return typed_value(token.field, token.values[0] if token.values else None, token.spelling)


def _spelled(spelling: str, value: Any, joint: str = " ") -> str:
    if value is True:
        return spelling
    text = shlex.quote(str(value))
    # argparse takes a value such as -1e+16 for an option
    joint = "=" if text.startswith("-") else joint
    # the model of "sglang serve MODEL" has no option before it
    return f"{spelling}{joint}{text}" if spelling else text


def _added(config: LaunchConfig, source: LaunchSource) -> list[str]:
    """What the paste does not hold: new flags, and new options without a field."""
    typed = {token.field: token for token in source.options}
    parts = []
    for field, value in config.given():
        token = typed.get(field)
        if value is not False and (token is None or (token.from_file and _parsed(token) != value)):
            parts.append(_spelled(flag_of(field), value))
    if source.kind == "server_args":
        return parts
    pasted = [(token.name, token.value) for token in source.options if token.field is None]
    for entry in config.other:
        if entry in pasted:
            pasted.remove(entry)
        else:
            name, value = entry
            values = () if value is None else (value,) if isinstance(value, str) else value
            parts.append(" ".join([name, *(_quoted(one) for one in values)]))
    return parts
