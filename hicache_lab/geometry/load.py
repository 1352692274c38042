"""``load_geometry``: a name, a config.json or an inline geometry → ``ModelGeometry``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_lab.errors import InputError, UnknownFact
from hicache_lab.geometry.build import build
from hicache_lab.geometry.shapes import ModelGeometry
from hicache_lab.models import find, is_known

MAX_CONFIG_BYTES = 16 * 2**20


def load_geometry(
    model: str | Path | Mapping[str, Any], *, overrides: Mapping[str, Any] | None = None
) -> ModelGeometry:
    """What a model keeps per token.

    Args:
        model: a catalogue name, hub id or alias; the path of a config.json or of a folder with one; or a
            mapping, either a Hugging Face config or an inline geometry ({"kind": "mla",
            "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}).
        overrides: explicit facts that beat the file, and that an unknown architecture needs ("kind" first).

    Returns:
        The geometry; ``assumed`` and ``confidence`` say how far it is known.

    Raises:
        UnknownFact: the name or the architecture is not known, or a fact is missing; nothing is guessed.
        InputError: the file or a value in it is not what it should be.
    """
    given = dict(overrides or {})
    if isinstance(model, Mapping):
        inline = "kind" in model and "architectures" not in model
        origin = "inline geometry" if inline else "config"
        return build(
            model, given, name=_name(model), origin=origin, confidence="inline" if inline else "config file"
        )
    if not str(model).strip():
        raise UnknownFact("--model: no model given; give a catalogue name, a config.json or a geometry")
    path = _existing(model)
    if path is not None:
        config = read_config(path)
        return build(
            config,
            given,
            name=_name(config, path.resolve().parent.name),
            origin=str(path),
            confidence="config file",
            source=(str(path),),
        )
    entry = find(str(model))
    return build(
        entry.config,
        given,
        name=entry.name,
        origin=f"catalogue entry {entry.name}",
        confidence=entry.confidence,
        source=entry.source,
        notes=(entry.notes,) if entry.notes else (),
    )


def _name(config: Mapping[str, Any], fallback: str = "model") -> str:
    """What a config calls its model; untrusted text."""
    names = (config.get(key) for key in ("name", "_name_or_path", "model_type"))
    return next((name[:200] for name in names if isinstance(name, str) and name), fallback)


def _existing(model: str | Path) -> Path | None:
    """The config.json a text points to, if such a file exists; a name is never opened otherwise."""
    try:
        path = Path(model).expanduser()
        folder = path.is_dir()
        if folder:
            path = path / "config.json"
        if path.is_file():
            return path
    except (OSError, ValueError, RuntimeError):
        return None
    if is_known(str(model)):
        return None
    if folder or isinstance(model, Path) or str(model).endswith(".json"):
        raise InputError(
            f"{str(path)[:300]}: no such file; give a config.json, a folder that has one, or a model's name"
        )
    return None


def read_config(path: Path) -> Mapping[str, Any]:
    """Read a config.json; ``Infinity`` and ``NaN`` are accepted, as transformers writes them."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes; expected a model's config.json")
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); expected a model's config.json") from error
    if not isinstance(config, dict):
        raise InputError(
            f"{path}: expected a JSON object, got {type(config).__name__}; give a model's config.json"
        )
    return config
