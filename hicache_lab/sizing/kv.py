"""How one rank stores a token: KV dtype, row widths, heads, and which layers lie in a pool of their own."""

from __future__ import annotations

from hicache_lab.base.errors import UsageError
from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import ReleaseRules
from hicache_lab.sizing.geometry import ModelGeometry
from hicache_lab.sizing.geometry.shapes import ITEMSIZES
from hicache_lab.sizing.guard import LaunchFailure
from hicache_lab.sizing.rows import (
    indexer_bytes_per_layer,
    mha_bytes_per_token,
    mla_bytes_per_token,
    state_bytes_per_slot,
    store_bytes,
)

DSA_FP8_ROW_BYTES = 656
_LLAMA4_ONLY = frozenset({"Llama4ForConditionalGeneration"})
_WEIGHT_DTYPES = {
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
}


def option(config: LaunchConfig, *names: str) -> str | None:
    """The value of an option without a field of its own ("" when it takes none); None when it was not given."""
    for name, value in reversed(config.other):
        if name.lstrip("-").replace("_", "-") in names:
            return "" if value is None else str(value)
    return None


def environment(config: LaunchConfig, name: str) -> str | None:
    """A variable that was set with the launch; the last one counts."""
    return next((value for key, value in reversed(config.env) if key == name), None)


class KvRows:
    """Rows of one rank. ``assumed`` collects what was assumed on the way, in words."""

    def __init__(self, config: LaunchConfig, geometry: ModelGeometry, rules: ReleaseRules) -> None:
        self.config, self.geometry, self.rules = config, geometry, rules
        self.assumed: list[str] = []
        self.dtype = self._dtype()

    def _dtype(self) -> str:
        wanted, geometry = self.config.kv_cache_dtype or "auto", self.geometry
        if wanted != "auto":
            return wanted
        if geometry.kv_row_bytes is not None or geometry.kind == "dsv4":
            return "bf16"
        if geometry.checkpoint_kv_dtype is not None:
            asked = geometry.checkpoint_kv_dtype
            self.assumed.append(f"KV dtype auto follows the checkpoint's own {asked}; --kv-cache-dtype says otherwise")
            return asked
        if geometry.kind == "dsa":
            backend = "" if self.rules.dsa_fp8_on_blackwell == "flashmla" else " --dsa-decode-backend trtllm"
            self.assumed.append(
                "KV dtype auto is taken as bf16, as on Hopper; on Blackwell the server picks fp8 for DSA models: "
                f"give --kv-cache-dtype fp8_e4m3{backend} for it"
            )
            return "bf16"
        weights = _WEIGHT_DTYPES.get(self.config.dtype or "auto") or geometry.dtype
        if weights is None:
            self.assumed.append("KV dtype auto: the config names no dtype, bfloat16 is taken")
        return weights or "bf16"

    # -- which layers lie together --------------------------------------------------------------------------

    @property
    def architectures(self) -> set[str]:
        """The outer and the nested architecture, by which releases decide."""
        return {self.geometry.architecture, self.geometry.inner_architecture}

    @property
    def swa_pool(self) -> bool:
        """Whether this release keeps the sliding-window layers in a pool of their own, with the host tier on."""
        if "swa" not in self.geometry.layer_kinds or self.geometry.kind == "dsv4":
            return False
        config, rules, names = self.config, self.rules, self.architectures
        if option(config, "disable-hybrid-swa-memory") is not None or names & rules.swa_flat_with_hicache:
            return False
        if config.speculative_algorithm and names & rules.swa_flat_with_speculation:
            return False
        backends = (config.attention_backend, config.prefill_attention_backend, config.decode_attention_backend)
        if "trtllm_mha" in backends and names & rules.swa_flat_with_trtllm_mha:
            return False
        if rules.swa_needs_hybrid_ratio and names & _LLAMA4_ONLY and option(config, "hybrid-kvcache-ratio") is None:
            return False
        return bool(names & rules.swa_architectures)

    def full_layers(self, layers: tuple[str, ...]) -> int:
        """How many of these layers lie in the anchor pool."""
        kinds = ("full",) if self.swa_pool else ("full", "swa")
        return sum(kind in kinds for kind in layers)

    # -- bytes a token --------------------------------------------------------------------------------------

    def latent_or_given(self, model: ModelGeometry) -> bool:
        """Whether a model stores one row a token, not keys and values of heads."""
        return model.latent is not None or model.kv_row_bytes is not None

    def row(self, layers: int, model: ModelGeometry | None = None, *, is_draft: bool = False) -> int:
        """Bytes a token in the anchor's kind of pool, as the release's check counts it."""
        model = model or self.geometry
        if model.kv_row_bytes is not None:
            return mla_bytes_per_token(self.rules, layers=layers, row_elements=model.kv_row_bytes, itemsize=1)
        if model.latent is not None:
            elements, itemsize = model.latent.row_elements, store_bytes(self.dtype)
            if model.kind == "dsa" and itemsize == 1 and self._wide_rows(is_draft=is_draft):
                elements = DSA_FP8_ROW_BYTES
            return mla_bytes_per_token(self.rules, layers=layers, row_elements=elements, itemsize=itemsize)
        if model.full is None:
            raise LaunchFailure("UnknownFact", f"{model.name} has no full-attention layers to mirror")
        # one flat pool has the full layers' heads in every layer (0.5.8 model_runner_kv_cache_mixin.py)
        return self.head_row(model, "full", layers)

    def head_row(self, model: ModelGeometry, which: str, layers: int) -> int:
        """Keys and values of one token in ``layers`` layers of one kind ("full", "swa")."""
        shape = model.swa if which == "swa" and model.swa is not None else model.full
        assert shape is not None
        return mha_bytes_per_token(
            self.rules,
            layers=layers,
            kv_heads=shape.heads_per_rank(self.config.attn_tp_size),
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            itemsize=store_bytes(self.dtype),
        )

    @property
    def index_row(self) -> int:
        """One indexer key in one layer; 0 for a model without an indexer."""
        return indexer_bytes_per_layer(self.geometry.index_head_dim) if self.geometry.index_head_dim else 0

    def _wide_rows(self, *, is_draft: bool) -> bool:
        """Whether an fp8 DSA row has scales and a bf16 rope part (656 bytes) on the host, or is plain (576).

        Source: 0.5.9+ calculate_mla_kv_cache_dim; the trtllm backend keeps plain rows. 0.5.11 and the draft pools of
        0.5.11–0.5.17 do not hand the device's width to the host pool.
        """
        rules = self.rules
        if not rules.dsa_wide_rows or (is_draft and not rules.dsa_draft_like_device):
            return False
        phases = {"prefill", "decode"}
        if rules.dsa_backend_of_role and self.config.disaggregation_mode in phases:
            phases = {self.config.disaggregation_mode or ""}
        chosen = [option(self.config, f"dsa-{phase}-backend", f"nsa-{phase}-backend") for phase in sorted(phases)]
        if "trtllm" in chosen:
            return False
        if None in chosen and rules.dsa_fp8_on_blackwell == "trtllm":
            self.assumed.append(
                "fp8 rows of 656 bytes, as flashmla keeps them on Hopper; the trtllm backend, Blackwell's default, "
                "keeps 576: give --dsa-decode-backend trtllm (--nsa-decode-backend until 0.5.12) for it"
            )
        return True

    def state_slot(self, layers: int) -> int:
        """Bytes of one slot in ``layers`` linear layers on this rank; 0 for a model without a recurrent state.

        Raises:
            UsageError: a state dtype that no release knows, or heads that the ranks do not divide.

        Source: 0.5.9+ configs/mamba_utils.py mamba2_state_dtype; --mamba-ssm-dtype sets SGLANG_MAMBA_SSM_DTYPE.
        """
        shape, tp = self.geometry.state, self.config.attn_tp_size
        if shape is None or not layers:
            return 0
        ssm = option(self.config, "mamba-ssm-dtype") or environment(self.config, "SGLANG_MAMBA_SSM_DTYPE")
        conv = environment(self.config, "SGLANG_MAMBA_CONV_DTYPE")
        for name, dtype in (("--mamba-ssm-dtype", ssm), ("SGLANG_MAMBA_CONV_DTYPE", conv)):
            if dtype is not None and dtype not in ITEMSIZES:
                raise UsageError(f"{name}: expected one of {', '.join(ITEMSIZES)}, got {dtype!r}")
        return state_bytes_per_slot(
            layers=layers,
            conv_shapes=(shape.conv_shape(tp),),
            conv_itemsize=ITEMSIZES[conv or shape.conv_dtype],
            temporal_shape=shape.temporal_shape(tp),
            temporal_itemsize=ITEMSIZES[ssm or shape.ssm_dtype],
        )
