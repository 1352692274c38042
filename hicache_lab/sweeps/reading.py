"""YAML read so that a grid means what it looks like.

PyYAML follows YAML 1.1: ``off`` becomes False, ``1e3`` a text, ``12:30`` the number 750, and a key that is there
twice silently wins. A sweep has settings called "off", so here the core schema of YAML 1.2 applies, and a repeated
key is refused with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hicache_lab.base.errors import InputError, UsageError, did_you_mean

MAX_BYTES = 1 << 20

# YAML 1.2.2, section 10.3.2 (core schema), without octal and hexadecimal integers
_CORE = (
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN)$"
        ),
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema and without repeated keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape


for _tag, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            key = str(key_node.value)
        if key in values:
            raise yaml.MarkedYAMLError(problem=f"{key!r} is there twice", problem_mark=key_node.start_mark)
        values[key] = loader.construct_object(value_node, deep=True)
    return values


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    # PyYAML would take a leading 0 for octal
    return int(str(loader.construct_scalar(node)).replace("_", ""))


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def read_yaml(path: Path) -> tuple[dict[str, Any], str]:
    """A YAML file that holds one mapping, and its text.

    Raises:
        InputError: no such file, larger than 1 MiB, not YAML (with the line), or not a mapping.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES} bytes; expected a grid written by hand")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    try:
        data = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(f"{where}: {getattr(error, 'problem', None) or 'not YAML'}") from error
    if not isinstance(data, dict):
        what = "nothing" if data is None else type(data).__name__
        raise InputError(f"{path}: expected a mapping with `notebook:` and `axes:`, got {what}")
    return data, text


def refuse(path: Path, key: str, expected: str, got: object) -> NoReturn:
    """Say which key of which file is not what it should be.

    Raises:
        UsageError: always.
    """
    what = "nothing" if got is None else f"{type(got).__name__} {got!r}"
    raise UsageError(f"{path}: {key}: expected {expected}, got {what}")


def mapping(path: Path, key: str, value: object) -> dict[str, Any]:
    """A mapping, or an empty one for nothing.

    Raises:
        UsageError: something else.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse(path, key, "name: value lines", value)
    return value


def check_keys(path: Path, where: str, raw: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a key that nobody reads: it would be a setting that silently does nothing.

    Raises:
        UsageError: names it, with a suggestion.
    """
    known = tuple(known)
    for key in raw:
        if key not in known:
            hint = did_you_mean(key, known, f"; known are {', '.join(known)}")
            raise UsageError(f"{path}: {where}{key}: not known here{hint}")
