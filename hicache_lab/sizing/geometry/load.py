"""``load_geometry``: a name, a config.json or an inline geometry → ``ModelGeometry``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.sizing.geometry.build import build
from hicache_lab.sizing.geometry.config import checkpoint_kv_dtype
from hicache_lab.sizing.geometry.shapes import ModelGeometry
from hicache_lab.sizing.models import find, is_known

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
        UsageError: no model, or a key given by hand that says nothing about its caches.
    """
    given = dict(overrides or {})
    if isinstance(model, Mapping):
        inline = "kind" in model and "architectures" not in model
        origin, confidence = ("inline geometry", "inline") if inline else ("config", "config file")
        return build(model, given, name=_name(model) or "model", origin=origin, confidence=confidence)
    if not isinstance(model, str | Path) or not str(model).strip():
        got = f"got {type(model).__name__}" if not isinstance(model, str) else "got nothing"
        raise UsageError(f"--model: expected a catalogue name, a config.json or a geometry, {got}")
    path = _existing(model)
    if path is not None:
        config = read_config(path)
        geometry = build(
            config,
            given,
            name=_name(config, ("name", "_name_or_path")) or _folder_name(path),
            origin=str(path),
            confidence="config file",
            source=(str(path),),
        )
        # ModelOpt puts this file beside a config.json
        beside = path.with_name("hf_quant_config.json")
        if geometry.checkpoint_kv_dtype is None and beside.is_file():
            beside_dtype = checkpoint_kv_dtype(read_config(beside).get("quantization"))
            return replace(geometry, checkpoint_kv_dtype=beside_dtype)
        return geometry
    entry = find(str(model))
    geometry = build(
        entry.config,
        given,
        name=entry.name,
        origin=f"catalogue entry {entry.name}",
        confidence=entry.confidence,
        source=entry.source,
        notes=(entry.notes,) if entry.notes else (),
    )
    return replace(geometry, checkpoint_kv_dtype="fp8_e4m3") if entry.asks_fp8_kv(str(model)) else geometry


def _name(config: Mapping[str, Any], keys: tuple[str, ...] = ("name", "_name_or_path", "model_type")) -> str:
    """What a config calls its model; untrusted text."""
    names = (config.get(key) for key in keys)
    return next((name[:200] for name in names if isinstance(name, str) and name), "")


def _folder_name(path: Path) -> str:
    """The model's name by its folder; in the hub's cache that is models--org--name/snapshots/<commit>."""
    folder = path.absolute().parent
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


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
        raise InputError(f"{path}: expected a JSON object, got {type(config).__name__}; give a model's config.json")
    return config
