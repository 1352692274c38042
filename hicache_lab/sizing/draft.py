"""What speculative decoding adds to a rank's host memory: which draft layers there are and where they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import ReleaseRules
from hicache_lab.sizing.geometry import ModelGeometry
from hicache_lab.sizing.kv import option

# NEXTN is SGLang's other name for EAGLE; these use the model's own MTP layers when no other draft is named
_MTP_ALGORITHMS = frozenset({"EAGLE", "NEXTN"})
# n-gram lookup has no draft model; frozen-KV MTP reads the target's rows
_WITHOUT_POOL = frozenset({"NGRAM", "LOOKAHEAD", "FROZEN_KV_MTP", "UNO"})
# three MTP modules in the config, none in the server: only a separate EAGLE3 draft is loaded for these
_WITHOUT_MTP_CLASS = ("MiniMaxM2",)


@dataclass(frozen=True)
class Draft:
    """How the draft is kept on the host.

    Attributes:
        place: ``none``; ``packed`` behind the target's layers in its pool; ``sidecar`` in a pool of its own.
        layers: draft layers that are mirrored.
        model: a separate draft model; None where the layers are the target's own MTP layers.
        missing: what had to be known of the draft and was not.
    """

    place: Literal["none", "packed", "sidecar"] = "none"
    layers: int = 0
    model: ModelGeometry | None = None
    missing: str | None = None

    @property
    def packed_layers(self) -> int:
        """Layers packed behind the target's."""
        return self.layers if self.place == "packed" else 0


def _own_layers(config: LaunchConfig, geometry: ModelGeometry, rules: ReleaseRules) -> int:
    """MTP layers of the model that end up on the host: one draft runner has one pool entry, whatever the config says.

    Source: 0.5.11–0.5.17 get_draft_kv_pool (the first runner only); 0.5.18+ _build_hicache_draft_plan (all of them:
    --enable-multi-layer-eagle makes one a step).
    """
    if geometry.inner_architecture.startswith(_WITHOUT_MTP_CLASS) or not geometry.draft_layers:
        return 0
    if geometry.confidence == "inline":
        return geometry.draft_layers
    several = rules.draft == "packed" and option(config, "enable-multi-layer-eagle") is not None
    return (config.speculative_num_steps or 1) if several else 1


def plan_draft(
    config: LaunchConfig, geometry: ModelGeometry, rules: ReleaseRules, model: ModelGeometry | None = None
) -> Draft:
    """Where this launch keeps its draft on the host.

    Args:
        config: the launch flags.
        geometry: the target; an inline one that states ``draft_layers`` runs with them unless told otherwise.
        rules: until 0.5.10 no draft is mirrored; until 0.5.17 it has a pool of its own; from 0.5.18 on MTP layers
            (EAGLE, not EAGLE3) are packed behind the target's.
        model: the separate draft model, where it is known.

    Source: 0.5.11 managers/scheduler.py _maybe_register_hicache_draft; 0.5.18+ speculative/base_spec_worker.py.
    """
    algorithm = (config.speculative_algorithm or "").upper() or None
    if rules.draft == "none" or algorithm in _WITHOUT_POOL:
        return Draft()
    if model is not None:
        if geometry.kind == "dsv4":
            return Draft(missing=f"the draft model {model.name} of a DeepSeek-V4 server is not counted")
        return Draft("sidecar", model.count("full", "swa"), model)
    if algorithm is None and not (geometry.confidence == "inline" and geometry.draft_layers > 0):
        return Draft()
    layers = _own_layers(config, geometry, rules) if algorithm is None or algorithm in _MTP_ALGORITHMS else 0
    if layers:
        return Draft("packed" if rules.draft == "packed" else "sidecar", layers)
    return Draft(
        missing=(
            f"--speculative-algorithm {algorithm}: its draft model is mirrored too, in a pool with as many tokens as "
            "the target's that comes on top; give --draft-model (a name or a config.json) to count it"
        )
    )
