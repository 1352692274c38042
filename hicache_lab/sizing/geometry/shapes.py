"""The shapes of one layer's cache and the model made of them: integers, independent of the SGLang release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache_lab.base.display import one_line
from hicache_lab.base.errors import UsageError
from hicache_lab.sizing.rows import indexer_bytes_per_layer

LAYER_KINDS = ("full", "swa", "linear", "none", "c4", "c128")

ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

# DeepSeek-V4 under FlashMLA: a page's rows are padded together to whole multiples of this many bytes
# (0.5.23 model_executor/pool_configurator.py; read, not executed).
_V4_PAGE_MULTIPLE = 576
_V4_NOPE_PER_SCALE = 64


def _check_tp(tp: int) -> None:
    if tp < 1:
        raise UsageError(f"--tp-size: expected at least 1, got {tp}")


def _share(what: str, count: int, tp: int) -> int:
    """One rank's part of ``count``, which must divide evenly as SGLang's ``divide()`` demands."""
    _check_tp(tp)
    if count % tp:
        raise UsageError(f"--tp-size {tp}: {count} {what} do not divide by it; SGLang cannot start this model so")
    return count // tp


@dataclass(frozen=True)
class HeadShape:
    """Keys and values of one attention layer (MHA, GQA, MQA).

    Attributes:
        kv_heads: KV heads of the whole model's layer, before tensor parallelism.
        head_dim: elements of one key.
        v_head_dim: elements of one value (differs from the key's in MiMo-V2).
    """

    kv_heads: int
    head_dim: int
    v_head_dim: int

    def heads_per_rank(self, tp: int) -> int:
        """KV heads on one rank; a head is replicated when there are more ranks than heads."""
        _check_tp(tp)
        return max(1, self.kv_heads // tp)

    def splits_evenly(self, tp: int) -> bool:
        """Whether one of heads and ranks divides the other, which SGLang asserts (``models/llama.py``)."""
        _check_tp(tp)
        return self.kv_heads % tp == 0 if self.kv_heads >= tp else tp % self.kv_heads == 0


@dataclass(frozen=True)
class LatentShape:
    """The compressed row of multi-head latent attention (MLA); every rank holds a full copy of it."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def row_elements(self) -> int:
        """Elements of one token's row in one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class CompressedShape:
    """DeepSeek-V4: one latent per 4 or 128 tokens (c4, c128) besides a sliding-window latent in every layer.

    Bytes are those of the FlashMLA layout on CUDA (0.5.23 ``model_executor/pool_configurator.py``, read, not
    executed): the part without position is fp8 with one scale byte per 64 elements and one byte of padding,
    the rope part is bf16, and a page is padded to a multiple of 576 bytes.
    """

    head_dim: int
    qk_rope_head_dim: int
    index_head_dim: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one latent row before the page's padding (584 for 448 + 64 elements)."""
        nope = self.head_dim - self.qk_rope_head_dim
        return nope + 2 * self.qk_rope_head_dim + -(-nope // _V4_NOPE_PER_SCALE) + 1

    def page_item_bytes(self, slots: int) -> int:
        """Bytes of one layer's page of ``slots`` latent rows (page 256: swa 256, c4 64, c128 2 slots)."""
        return -(-slots * self.row_bytes // _V4_PAGE_MULTIPLE) * _V4_PAGE_MULTIPLE

    def state_page_bytes(self, ratio: int, *, ring: int, indexer: bool = False) -> int:
        """Bytes of one layer's compression state beside one sliding-window page.

        A state row is a key and its score in fp32, twice as wide for c4, whose blocks overlap; one page of the
        window has a ring of them. Source: 0.5.12–0.5.23 mem_cache/deepseek_v4_compress_state.py:CompressStatePool.
        """
        width = self.index_head_dim if indexer else self.head_dim
        return ring * 2 * (2 if ratio == 4 else 1) * width * ITEMSIZES["float32"]

    def indexer_page_item_bytes(self, slots: int) -> int:
        """Bytes of one c4 layer's page of ``slots`` indexer keys."""
        return slots * indexer_bytes_per_layer(self.index_head_dim)


@dataclass(frozen=True)
class StateShape:
    """The recurrent state of one linear layer; a slot serves one request or one cached prefix of any length.

    Attributes:
        kind: ``mamba1``, ``mamba2``, ``gdn`` (gated delta net), ``kda`` (Kimi delta attention),
            ``lightning``.
        conv_channels: channels of the convolution window before tensor parallelism (0: no convolution).
        conv_rows: kept steps of the window, the kernel's width less one.
        heads: heads (mamba1: inner channels) that tensor parallelism divides.
        head_dim: first inner dimension of the state (mamba1: 1).
        state_size: last dimension of the state.
        groups: groups or key heads whose channels are part of the convolution; 0 when there are none.
        group_channels: convolution channels that one group adds.
        conv_dtype: SGLang's default is bfloat16.
        ssm_dtype: SGLang's default is float32; a config may say otherwise.
    """

    kind: str
    conv_channels: int
    conv_rows: int
    heads: int
    head_dim: int
    state_size: int
    groups: int = 0
    group_channels: int = 0
    conv_dtype: str = "bfloat16"
    ssm_dtype: str = "float32"

    def conv_shape(self, tp: int = 1) -> tuple[int, int]:
        """Shape of the convolution window on one rank: channels × kept steps."""
        channels = self.conv_channels
        _check_tp(tp)
        if self.groups and self.groups % tp:
            # groups that do not divide become one a rank (0.5.8 configs/mamba_utils.py:Mamba2StateShape)
            channels += (tp - self.groups) * self.group_channels
        return _share("convolution channels", channels, tp), self.conv_rows

    def temporal_shape(self, tp: int = 1) -> tuple[int, int, int]:
        """Shape of the recurrent state on one rank: heads × head dimension × state size."""
        return _share(f"{self.kind} heads", self.heads, tp), self.head_dim, self.state_size


@dataclass(frozen=True)
class ModelGeometry:
    """Everything about a model that decides the size of its caches.

    Attributes:
        name: catalogue name, or what the user called it.
        architecture: outer ``architectures[0]`` of the config ("" when inline).
        inner_architecture: ``architectures[0]`` of the nested text config, else the outer one.
        source: where the numbers come from.
        confidence: ``confirmed``, ``secondary``, ``config file`` or ``inline`` (facts given by hand).
        kind: how attention layers store a token: ``gqa``, ``mla``, ``dsa`` (MLA with an indexer) or ``dsv4``.
        layer_kinds: one of ``LAYER_KINDS`` for each target layer; "linear" owns a state slot.
        full: heads of the full-attention layers.
        swa: heads of the sliding-window layers (equal to ``full`` unless the model says otherwise).
        latent: the MLA row.
        compressed: the DeepSeek-V4 rows.
        kv_row_bytes: bytes of one MLA row when given explicitly; beats ``latent`` and the KV dtype.
        index_head_dim: elements of one indexer key.
        indexer_owner: for each layer whether it owns an indexer; () when the model has none.
        state: recurrent state of the "linear" layers.
        window: tokens of the sliding (or chunked) window.
        draft_layers: MTP / next-n layers that the model brings.
        num_attention_heads: query heads.
        max_position_embeddings: longest context the config declares.
        dtype: the config's weight dtype, what ``--kv-cache-dtype auto`` follows; None when it does not say.
        checkpoint_kv_dtype: what the checkpoint's quantization asks for the KV cache: ``fp8_e4m3`` or None.
        assumed: facts that were not in the file and come from the architecture's class, in words.
        notes: what a reader should know.
    """

    name: str
    architecture: str
    inner_architecture: str
    source: tuple[str, ...]
    confidence: str
    kind: str
    layer_kinds: tuple[str, ...]
    full: HeadShape | None = None
    swa: HeadShape | None = None
    latent: LatentShape | None = None
    compressed: CompressedShape | None = None
    kv_row_bytes: int | None = None
    index_head_dim: int | None = None
    indexer_owner: tuple[bool, ...] = ()
    state: StateShape | None = None
    window: int | None = None
    draft_layers: int = 0
    num_attention_heads: int | None = None
    max_position_embeddings: int | None = None
    dtype: str | None = None
    checkpoint_kv_dtype: str | None = None
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def host_pool_takes_size(self) -> bool:
        """Whether --hicache-size can size its host pools; DeepSeek-V4's pages take a ratio only."""
        return self.kind != "dsv4"

    def __repr__(self) -> str:
        return f"ModelGeometry({one_line(self.name)}: {self.kind}, {self.num_layers} layers, {self.confidence})"

    @property
    def num_layers(self) -> int:
        """Target layers, caches or not; draft layers are not among them."""
        return len(self.layer_kinds)

    def count(self, *kinds: str) -> int:
        """Layers of the given kinds."""
        return sum(kind in kinds for kind in self.layer_kinds)

    def layers_of_stage(
        self, pp_size: int, stage: int, *, remainder: str = "last_stages", partition: Sequence[int] | None = None
    ) -> slice:
        """The layers of one pipeline stage.

        Args:
            pp_size: stages.
            stage: which, from 0.
            remainder: what does not divide goes one layer each to the ``last_stages`` (0.5.6+), or all of it to the
                ``last_stage`` (until 0.5.5.post3).
            partition: layers of each stage where SGLANG_PP_LAYER_PARTITION states them.

        Source: distributed/utils.py:get_pp_indices of 0.5.8 and 0.5.5.
        """
        if not 1 <= pp_size <= self.num_layers:
            raise UsageError(f"--pp-size: expected 1 to {self.num_layers} (the model's layers), got {pp_size}")
        if not 0 <= stage < pp_size:
            raise UsageError(f"pipeline stage: expected 0 to {pp_size - 1}, got {stage}")
        if partition is not None:
            if len(partition) != pp_size or sum(partition) != self.num_layers or min(partition) < 1:
                raise UsageError(
                    f"SGLANG_PP_LAYER_PARTITION: expected {pp_size} numbers (--pp-size) that add up to "
                    f"{self.num_layers} layers, got {','.join(map(str, partition))}"
                )
            start = sum(partition[:stage])
            return slice(start, start + partition[stage])
        each, rest = divmod(self.num_layers, pp_size)
        if remainder == "last_stage":
            return slice(stage * each, self.num_layers if stage == pp_size - 1 else (stage + 1) * each)
        first_long = pp_size - rest
        start = stage * each + max(0, stage - first_long)
        return slice(start, start + each + (stage >= first_long))
