"""Flags → ``LaunchConfig`` without a command line around them, and a configuration with some flags changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.sglang.launch.config import FIELD_TYPES, FLAG_FIELDS, LaunchConfig, LaunchSource, flag_of
from hicache_lab.sglang.launch.flags import known_flags
from hicache_lab.sglang.launch.options import merge_config_file, read_options, typed_value
from hicache_lab.sglang.launch.shell import plain_words
from hicache_lab.sglang.releases import parse_version

# one way to size the host pool replaces the other
_RIVALS = {"hicache_size": "hicache_ratio", "hicache_ratio": "hicache_size"}


def launch_from_flags(
    argv: Sequence[str] = (), *, sglang_version: str | None = None, base_dir: Path | None = None, **fields: Any
) -> LaunchConfig:
    """The launch that these flags make, read as the server's own argparse reads them.

    Args:
        argv: options and values as on a command line, without the program: ``["--tp", "8", "--hicache-size=48"]``.
        sglang_version: the release, if known: abbreviations are then read as that release reads them.
        base_dir: where a ``--config FILE`` with a relative path is looked up; None leaves the file unread.
        **fields: further flags by the name of their field, e.g. ``model="m", tp_size=8``; they win over ``argv``.

    Raises:
        UsageError: an option or a value that the server would not understand.
        InputError: the ``--config`` file is missing or not a YAML mapping.
    """
    options = read_options(
        plain_words(argv), None if sglang_version is None else parse_version(sglang_version), is_serve=False
    )
    merge_config_file(options, base_dir)
    config = LaunchConfig(
        **options.values,
        sglang_version=sglang_version,
        other=tuple(options.other),
        notes=tuple(dict.fromkeys(options.notes)),
        source=LaunchSource("command", options=tuple(options.typed)),
    )
    return changed(config, fields) if fields else config


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
