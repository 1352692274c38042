"""The host pools of one rank: launch flags × model × release × what the device holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hicache_lab.geometry import ModelGeometry
from hicache_lab.launch import LaunchConfig
from hicache_lab.releases import ReleaseRules
from hicache_lab.sizing.guard import LaunchFailure
from hicache_lab.sizing.pools import HostPool, PoolSpec, size_pool
from hicache_lab.sizing.rows import (
    indexer_bytes_per_layer,
    mha_bytes_per_token,
    mla_bytes_per_token,
    store_bytes,
)
from hicache_lab.sizing.shares import dsv4_host_pages, split_size
from hicache_lab.units import GB

DEFAULT_SWA_RATIO = 0.8
DSV4_SWA_RATIO = 0.1
DEFAULT_MAMBA_RATIO = 0.9
DSA_FP8_ROW_BYTES = 656
DSV4_PAGE = 256
# only the proportion of the sub-pools matters where the device's tokens are not known
_NOMINAL_TOKENS = 1_000_000
_LLAMA4_ONLY = frozenset({"Llama4ForConditionalGeneration"})

_WEIGHT_DTYPES = {
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
}
_MLA_PAGES = {"flashmla": (64,), "cutlass_mla": (128,), "trtllm_mla": (32, 64), "cutedsl_mla": (32, 64)}
_MHA_PAGES = {"trtllm_mha": (16, 32, 64), "fa4": (128,)}


@dataclass(frozen=True)
class DeviceFacts:
    """What the device side of one rank holds; None where nobody said.

    ``tokens`` is ``max_total_num_tokens`` (of the full-attention pool where there are several); ``kv_bytes`` the
    bytes of the KV pool, from which the tokens follow; ``mamba_slots`` state slots.
    """

    tokens: int | None = None
    kv_bytes: int | None = None
    swa_tokens: int | None = None
    mamba_slots: int | None = None


@dataclass(frozen=True)
class RankPools:
    """The host pools of one rank, in the order in which the release builds and checks them.

    ``missing`` names facts without which a number could not be had; ``assumed`` what was taken for granted.
    """

    pools: tuple[HostPool, ...]
    page_size: int
    stage: int = 0
    device_bytes: int | None = None
    device_tokens: int | None = None
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the anchor pool: what the prefix cache can keep on this rank's host side."""
        return self.pools[0].tokens if self.pools else 0

    @property
    def requested_bytes(self) -> int:
        """Bytes that the checks of this rank see, all pools."""
        return sum(pool.requested_bytes for pool in self.pools)

    def resident_bytes(self, rules: ReleaseRules) -> int:
        """Bytes that really become resident on the host, pinned-allocator rounding included."""
        return sum(resident_bytes(pool, rules) for pool in self.pools)


def resident_bytes(pool: HostPool, rules: ReleaseRules) -> int:
    """Host bytes that a pool really takes: torch's pinned allocator (0.4.5–0.5.4) rounds up to a power of two.

    Source: 0.4.5–0.5.4 mem_cache/memory_pool_host.py ``torch.empty(..., pin_memory=True)``, one buffer a pool;
    PyTorch's CachingHostAllocator rounds a request up to the next power of two.
    """
    if not rules.pinned_power_of_two or pool.allocated_bytes <= 0:
        return pool.allocated_bytes
    return 1 << (pool.allocated_bytes - 1).bit_length()


def resolve_page_size(config: LaunchConfig, geometry: ModelGeometry) -> tuple[int, str | None]:
    """Tokens a page as the server will run, and why where it is not what was given.

    Source: server_args.py page-size handling of the attention backends, 0.5.8–0.5.23 (CUDA).
    """
    given = config.page_size
    if geometry.kind == "dsv4":
        return DSV4_PAGE, None if given == DSV4_PAGE else "DeepSeek-V4 runs with page size 256 (0.5.23, CUDA)"
    if geometry.kind == "dsa":
        return 64, None if given == 64 else "DSA models run with page size 64 on CUDA"
    backends = _MLA_PAGES if geometry.kind == "mla" else _MHA_PAGES
    allowed = backends.get(config.attention_backend or "")
    if allowed and given not in allowed:
        forced = allowed[-1]
        return forced, f"--attention-backend {config.attention_backend} forces page size {forced}"
    return given or 1, None


@dataclass(frozen=True)
class _Group:
    """One device pool to mirror."""

    label: str
    kind: str
    bytes_per_token: int
    device_tokens: int
    layers: int
    taken_per_token: int | None = None
    draft_layers: int = 0

    @property
    def device_bytes(self) -> int:
        return self.bytes_per_token * self.device_tokens


class RankPlanner:
    """Works out the pools of one rank; one instance holds the inputs, :meth:`pools` answers for a ratio or a size."""

    def __init__(
        self,
        config: LaunchConfig,
        geometry: ModelGeometry,
        rules: ReleaseRules,
        device: DeviceFacts,
        *,
        draft: ModelGeometry | None = None,
        stage: int = 0,
    ) -> None:
        self.config, self.geometry, self.rules, self.stage, self.draft = config, geometry, rules, stage, draft
        self.assumed: list[str] = list(geometry.assumed)
        self.missing: list[str] = []
        self.page_size, forced = resolve_page_size(config, geometry)
        if forced:
            self.assumed.append(forced)
        self.dtype = self._dtype()
        self.layers = geometry.layer_kinds[geometry.layers_of_stage(config.pp_size or 1, stage)]
        self.device_tokens = self._device_tokens(device)
        self.device = device
        self.refusal = self._unsupported()
        self.groups = () if self.refusal or geometry.kind == "dsv4" else self._groups()

    # -- what the device holds ------------------------------------------------------------------------------

    def _dtype(self) -> str:
        wanted = self.config.kv_cache_dtype or "auto"
        if wanted != "auto":
            return wanted
        if self.geometry.kv_row_bytes is not None or self.geometry.kind == "dsv4":
            return "bf16"
        if self.geometry.kind == "dsa":
            self.assumed.append("KV dtype auto is taken as bf16; on Blackwell the server picks fp8_e4m3 for DSA models")
        weights = _WEIGHT_DTYPES.get(self.config.dtype or "auto") or self.geometry.dtype
        if weights is None:
            self.assumed.append("KV dtype auto: the config names no dtype, bfloat16 is taken")
        return weights or "bf16"

    def _device_tokens(self, device: DeviceFacts) -> int | None:
        if device.tokens is not None or device.kv_bytes is None:
            return device.tokens
        return int(device.kv_bytes // self._kv_row(self._full_layers()))

    @property
    def swa_pool(self) -> bool:
        """Whether this release keeps the sliding-window layers in a pool of their own."""
        if "swa" not in self.geometry.layer_kinds or self.geometry.kind == "dsv4":
            return False
        if self.rules.swa_needs_hybrid_ratio and not self._flag_given("hybrid-kvcache-ratio"):
            return self.geometry.architecture in self.rules.swa_architectures - _LLAMA4_ONLY
        names = {self.geometry.architecture, self.geometry.inner_architecture}
        return bool(names & self.rules.swa_architectures)

    def _flag_given(self, name: str) -> bool:
        return any(option.lstrip("-").replace("_", "-") == name for option, _ in self.config.other)

    def _full_layers(self) -> int:
        kinds = ("full",) if self.swa_pool else ("full", "swa")
        return sum(kind in kinds for kind in self.layers)

    # -- bytes a token --------------------------------------------------------------------------------------

    def _kv_row(self, layers: int, geometry: ModelGeometry | None = None) -> int:
        """Bytes a token of the anchor pool, as the release's check counts it."""
        model = geometry or self.geometry
        if model.kv_row_bytes is not None:
            return mla_bytes_per_token(self.rules, layers=layers, row_elements=model.kv_row_bytes, itemsize=1)
        if model.latent is not None:
            elements, itemsize = model.latent.row_elements, store_bytes(self.dtype)
            if model.kind == "dsa" and itemsize == 1 and self.rules.row_width_override:
                elements = DSA_FP8_ROW_BYTES
            return mla_bytes_per_token(self.rules, layers=layers, row_elements=elements, itemsize=itemsize)
        if model.full is None:
            raise LaunchFailure("UnknownFact", f"{model.name} has no full-attention layers to mirror")
        row = self._head_row(model, "full", layers)
        if not self.swa_pool and model is self.geometry and model.swa is not None and "swa" in self.layers:
            sliding = sum(kind == "swa" for kind in self.layers)
            row = self._head_row(model, "full", layers - sliding) + self._head_row(model, "swa", sliding)
        return row

    def _head_row(self, model: ModelGeometry, which: str, layers: int) -> int:
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
    def _index_row(self) -> int:
        return indexer_bytes_per_layer(self.geometry.index_head_dim) if self.geometry.index_head_dim else 0

    def _indexer_layers(self) -> int:
        owners = self.geometry.indexer_owner[self.geometry.layers_of_stage(self.config.pp_size or 1, self.stage)]
        return sum(owners) if self.rules.indexer_owners_only and owners else len(self.layers)

    # -- draft ----------------------------------------------------------------------------------------------

    @property
    def mtp_layers(self) -> int:
        """Draft layers of the model itself that are switched on."""
        if self.draft is not None or not self.geometry.draft_layers:
            return 0
        stated = self.geometry.confidence == "inline"
        return self.geometry.draft_layers if stated or self.config.speculative_algorithm else 0

    @property
    def packed_layers(self) -> int:
        """Draft layers that are packed behind the target's in one pool (0.5.18+)."""
        return self.mtp_layers if self.rules.draft == "packed" else 0

    # -- which pools there are ------------------------------------------------------------------------------

    def _unsupported(self) -> LaunchFailure | None:
        """Pools that this release's host tier cannot mirror: the server stops at start."""
        geometry, rules = self.geometry, self.rules
        only = "MHA, MLA, and NSA (DSA) models" if rules.draft != "none" else "MHA and MLA yet"
        text = f"HiRadixCache only supports {only}"
        if geometry.latent is not None and "mla" in rules.layouts and not rules.layouts["mla"]:
            return LaunchFailure("AttributeError", "the host pool of 0.4.4 mirrors MHA and GQA only")
        if "linear" in self.geometry.layer_kinds and not rules.mamba_host_pool:
            return LaunchFailure("ValueError", text)
        if self.swa_pool and not rules.swa_host_pool:
            return LaunchFailure("ValueError", text)
        if geometry.kind == "dsv4" and not rules.dsv4_host_pool:
            return LaunchFailure("ValueError", text)
        return None

    def _groups(self) -> tuple[_Group, ...]:
        tokens = self.device_tokens or 0
        layers, packed = self._full_layers(), self.packed_layers
        row = self._kv_row(layers + packed) if self.geometry.latent or self.geometry.kv_row_bytes else (
            self._kv_row(layers) + (self._head_row(self.geometry, "full", packed) if packed else 0)
        )
        inside = self.rules.indexer == "inside_the_flag" and self._index_row
        kind = "mha" if self.geometry.latent is None and self.geometry.kv_row_bytes is None else "mla"
        taken = None if self.rules.mla_bytes_count_layers or kind == "mha" else row * (layers + packed)
        anchor = _Group(
            "full" if self.swa_pool else "kv",
            "nsa" if inside else kind,
            row + (self._index_row * layers if inside else 0),
            tokens,
            layers,
            taken,
            packed,
        )
        found = [anchor] if layers else []
        if self.swa_pool:
            sliding = sum(layer == "swa" for layer in self.layers)
            found.append(
                _Group("swa", "mha", self._head_row(self.geometry, "swa", sliding), self._swa_tokens(), sliding)
            )
        linear = sum(layer == "linear" for layer in self.layers)
        if linear and self.geometry.state is not None:
            slot = self.geometry.state.slot_bytes_per_layer(self.config.attn_tp_size) * linear
            found.append(_Group("mamba", "mamba", slot, self._mamba_slots(slot, anchor), linear))
        return tuple(found)

    def _swa_tokens(self) -> int:
        if self.device.swa_tokens is not None:
            return self.device.swa_tokens
        ratio = self.config.swa_full_tokens_ratio
        if ratio is None:
            ratio = DSV4_SWA_RATIO if self.geometry.kind == "dsv4" else DEFAULT_SWA_RATIO
            self.assumed.append(f"sliding-window device tokens are {ratio} × the full ones (--swa-full-tokens-ratio)")
        return int((self.device_tokens or 0) * ratio)

    def _mamba_slots(self, slot_bytes: int, anchor: _Group) -> int:
        given = self.device.mamba_slots or self.config.max_mamba_cache_size
        if given is not None:
            return given
        ratio = self.config.mamba_full_memory_ratio or DEFAULT_MAMBA_RATIO
        self.assumed.append(
            f"state slots follow from --mamba-full-memory-ratio {ratio}; give --max-mamba-cache-size for exact ones"
        )
        return int(anchor.device_bytes * ratio / slot_bytes)

    @property
    def device_bytes(self) -> int | None:
        """Bytes of the device pools that are mirrored, as auto-sizing counts them; None when unknown."""
        if self.device_tokens is None:
            return None
        if self.geometry.kind == "dsv4":
            return None
        total = sum(group.device_bytes for group in self.groups)
        if self.rules.indexer == "sidecar" and self._index_row:
            total += self._index_row * (self._indexer_layers() + self.packed_layers) * self.device_tokens
        return total

    # -- the answer -----------------------------------------------------------------------------------------

    def _sizes(self, size_gb: float) -> tuple[float, ...]:
        """GB for each group: each the whole flag until 0.5.16, shared by device bytes from 0.5.17 on."""
        if size_gb <= 0 or not self.rules.size_split or len(self.groups) == 1:
            return (size_gb,) * len(self.groups)
        return split_size(size_gb, [group.device_bytes for group in self._proportioned()])

    def _proportioned(self) -> Sequence[_Group]:
        if self.device_tokens:
            return self.groups
        other = RankPlanner(
            self.config,
            self.geometry,
            self.rules,
            replace(self.device, tokens=_NOMINAL_TOKENS),
            draft=self.draft,
            stage=self.stage,
        )
        return other.groups

    def _spec(self, group: _Group, ratio: float, size_gb: float, peers: tuple[int, ...]) -> PoolSpec:
        dcp = self.config.dcp_size or 1
        layout = self.config.hicache_mem_layout or self.rules.default_layout
        if group.kind == "mamba":
            # hybrid models run with a page-first layout whatever was asked for
            layout = layout if layout.startswith("page_first") else "page_first_direct"
        return PoolSpec(
            kind=group.kind,  # type: ignore[arg-type]
            bytes_per_token=group.bytes_per_token,
            allocated_bytes_per_token=group.taken_per_token,
            device_tokens=group.device_tokens,
            page_size=1 if group.kind == "mamba" else self.page_size * dcp,
            dcp_size=1 if group.kind == "mamba" else dcp,
            ratio=ratio,
            size_gb=size_gb,
            label=group.label,
            layout=layout,
            target_layers=group.layers,
            draft_layers=group.draft_layers,
            pp_peer_tokens=peers,
            index_stride_bytes=self._index_row * self.page_size if group.kind == "nsa" else None,
            layout_family="mha" if group.kind in ("mha", "mamba") else "mla",
        )

    def wanted_tokens(self, size_gb: float) -> int:
        """Tokens of the anchor pool before page rounding, what the pipeline stages agree on (0.5.15+)."""
        anchor = self.groups[0]
        return int(self._sizes(size_gb)[0] * float(GB) // anchor.bytes_per_token)

    def pools(self, *, ratio: float, size_gb: float, peer_tokens: tuple[int, ...] = ()) -> RankPools:
        """The host pools for a ratio (used when ``size_gb`` is not positive) or a size in GB for this rank.

        Args:
            ratio: host tokens per device token.
            size_gb: GB (1e9) for this rank.
            peer_tokens: what :meth:`wanted_tokens` says on the other pipeline stages.

        Raises:
            LaunchFailure: the release cannot mirror this model, or refuses the size for it.
        """
        if self.refusal is not None:
            raise self.refusal
        missing = list(self.missing)
        if self.device_tokens is None and size_gb <= 0:
            missing.append(
                "device tokens (--device-tokens: max_total_num_tokens in the server's log, or --device-kv-gb)"
            )
            return RankPools((), self.page_size, self.stage, assumed=tuple(self.assumed), missing=tuple(missing))
        pools = self._dsv4(ratio, size_gb) if self.geometry.kind == "dsv4" else self._flat(ratio, size_gb, peer_tokens)
        return RankPools(
            tuple(pools),
            self.page_size,
            self.stage,
            self.device_bytes,
            self.device_tokens,
            tuple(dict.fromkeys(self.assumed)),
            tuple(missing),
        )

    def _flat(self, ratio: float, size_gb: float, peers: tuple[int, ...]) -> list[HostPool]:
        built = []
        for index, (group, share) in enumerate(zip(self.groups, self._sizes(size_gb), strict=True)):
            built.append(size_pool(self._spec(group, ratio, share, peers if index == 0 else ()), self.rules))
        anchor = built[0]
        # the index pool is checked right after the KV pool that it lies beside
        if self.rules.indexer == "sidecar" and self._index_row:
            built.insert(1, self._indexer(anchor))
        draft = self._draft(anchor)
        return built + ([draft] if draft else [])

    def _indexer(self, anchor: HostPool) -> HostPool:
        layers, packed = self._indexer_layers(), self.packed_layers
        spec = replace(
            anchor.spec,
            kind="indexer",
            label="indexer",
            bytes_per_token=self._index_row * (layers + packed),
            allocated_bytes_per_token=None,
            page_size=anchor.page_size,
            anchor_tokens=anchor.tokens,
            target_layers=layers,
            draft_layers=packed,
        )
        return size_pool(spec, self.rules)

    def _draft(self, anchor: HostPool) -> HostPool | None:
        """The draft model's host pool: as many tokens as the target's, sized again by a ratio."""
        layers = self.mtp_layers if self.rules.draft == "sidecar" else 0
        if self.draft is not None and self.rules.draft != "none":
            layers = self.draft.num_layers
        if not layers:
            return None
        model = self.draft or self.geometry
        plain = model.latent is not None or model.kv_row_bytes is not None
        row = self._kv_row(layers, model) if plain else self._head_row(model, "full", layers)
        tokens = self.device_tokens or anchor.tokens
        spec = replace(
            anchor.spec,
            kind="mla" if plain else "mha",
            label="draft",
            bytes_per_token=row,
            allocated_bytes_per_token=None,
            device_tokens=tokens,
            ratio=anchor.tokens / tokens,
            size_gb=0,
            target_layers=layers,
            draft_layers=0,
            pp_peer_tokens=(),
            index_stride_bytes=None,
            host_token_capacity=anchor.tokens if self.rules.draft_exact else None,
        )
        return size_pool(spec, self.rules)

    def _dsv4(self, ratio: float, size_gb: float) -> list[HostPool]:
        """DeepSeek-V4's page pools; the compress-state pools (a few slots a page) are not counted."""
        shape = self.geometry.compressed
        assert shape is not None
        self.assumed.append(
            "DeepSeek-V4: swa, c4, c4 indexer and c128 pools as read in 0.5.23; compress-state pools are not counted"
        )
        pages = dsv4_host_pages(
            self.rules,
            device_full_tokens=self.device_tokens or 0,
            device_swa_tokens=self._swa_tokens(),
            page_size=DSV4_PAGE,
            swa_page_size=DSV4_PAGE,
            ratio=ratio,
            size_gb=size_gb,
        )
        c4 = sum(kind == "c4" for kind in self.layers)
        c128 = sum(kind == "c128" for kind in self.layers)
        rows = (
            ("swa", len(self.layers), pages[1], shape.page_item_bytes(DSV4_PAGE)),
            ("c4", c4, pages[0], shape.page_item_bytes(DSV4_PAGE // 4)),
            ("c4_indexer", c4, pages[0], shape.indexer_page_item_bytes(DSV4_PAGE // 4)),
            ("c128", c128, pages[-1] if len(pages) == 3 else pages[0], shape.page_item_bytes(DSV4_PAGE // 128)),
        )
        layout = self.config.hicache_mem_layout or self.rules.default_layout
        return [
            size_pool(
                PoolSpec(
                    kind="dsv4",
                    bytes_per_token=item,
                    device_tokens=self.device_tokens or 0,
                    page_size=DSV4_PAGE,
                    ratio=ratio,
                    label=label,
                    layout=layout,
                    target_layers=layers,
                    pages=count,
                ),
                self.rules,
            )
            for label, layers, count, item in rows
            if layers
        ]
