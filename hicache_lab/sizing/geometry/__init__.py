"""What a model has to keep for every token: Hugging Face ``config.json`` → a frozen ``ModelGeometry``.

Only the model is described here. What a given SGLang release allocates for it (sliding-window pools by
architecture, which indexer keys are counted, how a draft is packed) is a rule of that release: ``releases``.

>>> from hicache_lab.sizing.geometry import load_geometry
>>> load_geometry("kimi-k2.5").latent
LatentShape(kv_lora_rank=512, qk_rope_head_dim=64)
"""

from hicache_lab.sizing.geometry.load import load_geometry
from hicache_lab.sizing.geometry.shapes import (
    LAYER_KINDS,
    CompressedShape,
    HeadShape,
    LatentShape,
    ModelGeometry,
    StateShape,
)

__all__ = [
    "LAYER_KINDS",
    "CompressedShape",
    "HeadShape",
    "LatentShape",
    "ModelGeometry",
    "StateShape",
    "load_geometry",
]
