"""The host pools of one rank: launch flags × model × release × what the device holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB
from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import ReleaseRules
from hicache_lab.sizing.draft import plan_draft
from hicache_lab.sizing.dsv4 import DSV4_SWA_RATIO, dsv4_pools
from hicache_lab.sizing.geometry import ModelGeometry
from hicache_lab.sizing.guard import LaunchFailure
from hicache_lab.sizing.kv import KvRows, environment, option
from hicache_lab.sizing.pages import resolve_page_size
from hicache_lab.sizing.pools import HostPool, Kind, PoolSpec, resident_bytes, size_pool
from hicache_lab.sizing.side_pools import draft_pools, draft_row, indexer_pool

DEFAULT_SWA_RATIO = 0.8
DEFAULT_MAMBA_RATIO = 0.9
# only the proportion of the sub-pools matters where the device's tokens are not known
_NOMINAL_TOKENS = 1_000_000


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

    ``missing`` names facts without which a number could not be had; ``assumed`` what was assumed;
    ``uncounted`` pools that the release builds and these do not hold, because a fact is missing.
    """

    pools: tuple[HostPool, ...]
    page_size: int
    stage: int = 0
    device_bytes: int | None = None
    device_tokens: int | None = None
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the anchor pool: what the prefix cache can keep on this rank's host side."""
        return self.anchor.tokens if self.pools else 0

    @property
    def anchor(self) -> HostPool:
        """The pool whose tokens the prefix tree counts: the KV pool, for DeepSeek-V4 one of its full-length pools."""
        full = (pool for pool in self.pools if pool.spec.kind != "dsv4" or pool.spec.label != "swa")
        return next(full, self.pools[0])

    @property
    def requested_bytes(self) -> int:
        """Bytes that the checks of this rank see, all pools."""
        return sum(pool.requested_bytes for pool in self.pools)

    def resident_bytes(self, rules: ReleaseRules) -> int:
        """Bytes that really become resident on the host, pinned-allocator rounding included."""
        return sum(resident_bytes(pool, rules) for pool in self.pools)


def split_size(size_gb: float, device_pool_bytes: Sequence[int]) -> tuple[float, ...]:
    """One --hicache-size shared among sub-pools in proportion to their device bytes, in GB (1e9).

    Source: 0.5.17+ mem_cache/hybrid_cache/hybrid_pool_assembler.py _split_hicache_size.
    """
    total = sum(device_pool_bytes)
    return tuple(size_gb * device_bytes / total for device_bytes in device_pool_bytes)


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
        self.config, self.geometry, self.rules, self.stage = config, geometry, rules, stage
        self.layout = config.hicache_mem_layout or rules.default_layout
        self.assumed: list[str] = list(geometry.assumed)
        self.page_size, forced = resolve_page_size(config, geometry, rules)
        if forced:
            self.assumed.append(forced)
        self.rows = KvRows(config, geometry, rules)
        self.plan = plan_draft(config, geometry, rules, draft)
        self._stage = geometry.layers_of_stage(
            config.pp_size or 1, stage, remainder=rules.pp_remainder, partition=_partition(config)
        )
        self.layers = geometry.layer_kinds[self._stage]
        self.device = device
        self.device_tokens = self._device_tokens(device.tokens)
        self.refusal = self._unsupported()
        # the device pools to mirror, without the ratio or the size that is asked for them
        self.groups = () if self.refusal or geometry.kind == "dsv4" else self._groups(self.device_tokens or 0)
        in_tree = self.rows.swa_pool or geometry.kind == "dsv4"
        needs_tree = in_tree and self.rows.architectures & rules.swa_needs_unified_tree
        if needs_tree and environment(config, "SGLANG_ENABLE_UNIFIED_RADIX_TREE") not in ("1", "true", "True"):
            self.assumed.append("SGLANG_ENABLE_UNIFIED_RADIX_TREE=1 is set; without it this release refuses the model")

    def _device_tokens(self, stated: int | None) -> int | None:
        dcp, kv_bytes = self.config.dcp_size or 1, self.device.kv_bytes
        if stated is not None and dcp > 1 and self.rules.dcp_logs_logical_tokens:
            # 0.5.21+ managers/tp_worker.py get_worker_info: what the log calls tokens is the whole group's
            return stated // dcp
        cap = self.config.max_total_tokens
        if stated is not None and (cap is None or stated <= cap):
            return stated
        if cap is not None and kv_bytes is None:
            pages = cap // self.page_size
            self.assumed.append(f"the device holds the {pages * self.page_size} tokens of --max-total-tokens, no fewer")
            return pages * self.page_size or None
        if kv_bytes is None or self.geometry.kind == "dsv4":
            return stated
        row = self.rows.row(self.rows.full_layers(self.layers))
        if not self.rules.mla_bytes_count_layers and self.rows.latent_or_given(self.geometry):
            row *= len(self.layers)
        tokens = kv_bytes // row if row else None
        return tokens if cap is None or tokens is None else min(tokens, cap)

    def _host_layers(self, layers: int) -> int:
        """Layers that this rank mirrors: split over the context-parallel ranks where the DSA cache is.

        Source: 0.5.16+ mem_cache/pool_host/base.py _effective_host_layer_num.
        """
        if not self.rules.layer_shards or option(self.config, "enable-dsa-cache-layer-split") is None:
            return layers
        shards = self.config.attn_cp_size or 1
        if shards == 1:
            shards = max((self.config.tp_size or 1) // self.config.attention_dp_size, 1)
        return -(-layers // shards)

    def _indexer_layers(self) -> int:
        owners = self.geometry.indexer_owner[self._stage]
        return self._host_layers(sum(owners) if self.rules.indexer_owners_only and owners else len(self.layers))

    # -- which pools there are ------------------------------------------------------------------------------

    def _unsupported(self) -> LaunchFailure | None:
        """Pools that this release's host tier cannot mirror: the server stops at start."""
        geometry, rules = self.geometry, self.rules
        pp, spec = self.config.pp_size or 1, self.config.speculative_algorithm
        if rules.pp_refuses_mtp and pp > 1 and spec and geometry.draft_layers:
            return LaunchFailure("AssertionError", "PP is not compatible with MTP models.")
        only = "MHA, MLA, and NSA (DSA) models" if rules.draft != "none" else "MHA and MLA yet"
        text = f"HiRadixCache only supports {only}"
        if geometry.latent is not None and "mla" in rules.layouts and not rules.layouts["mla"]:
            return LaunchFailure("AttributeError", "'MLATokenToKVPool' object has no attribute 'head_num'")
        if "linear" in self.geometry.layer_kinds and not rules.mamba_host_pool:
            return LaunchFailure("ValueError", text)
        if self.rows.swa_pool and not rules.swa_host_pool:
            return LaunchFailure("ValueError", text)
        if geometry.kind == "dsv4" and not rules.dsv4_host_pool:
            return LaunchFailure("ValueError", text)
        return None

    def _groups(self, tokens: int) -> tuple[PoolSpec, ...]:
        rows, packed, dcp = self.rows, self.plan.packed_layers, self.config.dcp_size or 1
        layers = self._host_layers(rows.full_layers(self.layers))
        row = rows.row(layers + packed)
        kind: Kind = "mla" if rows.latent_or_given(self.geometry) else "mha"
        inside = rows.index_row if self.rules.indexer == "inside_the_flag" else 0
        anchor = PoolSpec(
            kind="nsa" if inside else kind,
            bytes_per_token=row + inside * layers,
            # this release's check counts one layer of them
            allocated_bytes_per_token=(
                None if self.rules.mla_bytes_count_layers or kind == "mha" else row * (layers + packed)
            ),
            device_tokens=tokens,
            page_size=self.page_size * dcp,
            dcp_size=dcp,
            label="full" if rows.swa_pool else "kv",
            layout=self.layout,
            target_layers=layers,
            draft_layers=packed,
            index_stride_bytes=inside * self.page_size or None,
        )
        groups = [anchor] if layers else []
        if rows.swa_pool:
            sliding = self.layers.count("swa")
            groups.append(
                PoolSpec(
                    kind="mha",
                    bytes_per_token=rows.head_row(self.geometry, "swa", sliding),
                    device_tokens=self._swa_tokens(tokens),
                    page_size=self.page_size * dcp,
                    dcp_size=dcp,
                    label="swa",
                    layout=self.layout,
                    target_layers=sliding,
                )
            )
        linear = self.layers.count("linear")
        if slot := rows.state_slot(linear):
            slots = self._mamba_slots(slot, anchor)
            mamba = PoolSpec("mamba", slot, slots, label="mamba", layout=self.layout, target_layers=linear)
            groups.append(mamba)
        return tuple(groups)

    def _swa_tokens(self, tokens: int) -> int:
        if self.device.swa_tokens is not None:
            return self.device.swa_tokens
        ratio = self.config.swa_full_tokens_ratio
        if ratio is None:
            ratio = DSV4_SWA_RATIO if self.geometry.kind == "dsv4" else DEFAULT_SWA_RATIO
            self.assumed.append(
                f"sliding-window device tokens are {ratio} × the full ones (--swa-device-tokens states them)"
            )
        return int(tokens * ratio)

    def _mamba_slots(self, slot_bytes: int, anchor: PoolSpec) -> int:
        if self.device.mamba_slots is not None:
            return self.device.mamba_slots
        if self.config.max_mamba_cache_size is not None:
            return self.config.max_mamba_cache_size // self.config.attention_dp_size
        ratio = self.config.mamba_full_memory_ratio or DEFAULT_MAMBA_RATIO
        self.assumed.append(f"state slots follow from --mamba-full-memory-ratio {ratio} (--mamba-slots states them)")
        return int(self._on_device(anchor, with_draft=False) * ratio / slot_bytes)

    def _on_device(self, group: PoolSpec, *, with_draft: bool = True) -> int:
        """Bytes of a pool's device buffers: they have one page (one slot) of padding more than tokens."""
        row = group.bytes_per_token
        if group.draft_layers and not with_draft:
            row -= self.rows.row(group.draft_layers)
        return row * (group.device_tokens + (1 if group.kind == "mamba" else self.page_size))

    @property
    def device_bytes(self) -> int | None:
        """Bytes of the device pools that are mirrored, as auto-sizing counts them; None when unknown."""
        if self.device_tokens is None or self.geometry.kind == "dsv4":
            return None
        total = sum(map(self._on_device, self.groups))
        if self.rules.indexer == "sidecar" and self.rows.index_row:
            layers = self._indexer_layers() + self.plan.packed_layers
            total += self.rows.index_row * layers * (self.device_tokens + self.page_size)
        if self.plan.place == "sidecar":
            total += draft_row(self.rows, self.plan) * (self.device_tokens + self.page_size)
        return total

    # -- the answer -----------------------------------------------------------------------------------------

    def _sizes(self, size_gb: float) -> tuple[float, ...]:
        """GB for each group: each the whole flag until 0.5.16, shared by the target's device bytes from 0.5.17 on."""
        if size_gb <= 0 or not self.rules.size_split or len(self.groups) == 1:
            return (size_gb,) * len(self.groups)
        groups = self.groups if self.device_tokens else self._groups(self._device_tokens(_NOMINAL_TOKENS) or 0)
        return split_size(size_gb, [self._on_device(group, with_draft=False) for group in groups])

    def require_auto_size(self) -> None:
        """Whether the release can size these pools itself.

        Raises:
            LaunchFailure: it cannot mirror this model, or auto-sizing does not know its pools.

        Source: 0.5.21+ mem_cache/hicache_auto_size.py.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.geometry.kind == "dsv4":
            raise LaunchFailure(
                "ValueError",
                "HiCache auto-sizing does not support DeepSeekV4TokenToKVPool; "
                "set --hicache-ratio or --hicache-size explicitly.",
            )

    def wanted_tokens(self, size_gb: float) -> dict[str, int]:
        """Tokens of each pool before page rounding, what the pipeline stages agree on pool by pool (0.5.15+)."""
        shares = zip(self.groups, self._sizes(size_gb), strict=True)
        return {group.label: int(share * float(GB) // group.bytes_per_token) for group, share in shares}

    def pools(self, *, ratio: float, size_gb: float, peers: Sequence[Mapping[str, int]] = ()) -> RankPools:
        """The host pools for a ratio (used when ``size_gb`` is not positive) or a size in GB for this rank.

        Args:
            ratio: host tokens per device token.
            size_gb: GB (1e9) for this rank.
            peers: what :meth:`wanted_tokens` says on the other pipeline stages.

        Raises:
            LaunchFailure: the release cannot mirror this model, or refuses the size for it.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.device_tokens is None and size_gb <= 0:
            instead = "" if self.geometry.kind == "dsv4" else ", or --device-kv-gb"
            wanted = f"device tokens (--device-tokens: max_total_num_tokens in the server's log{instead})"
            return RankPools((), self.page_size, self.stage, assumed=self._all_assumed, missing=(wanted,))
        pools = self._dsv4(ratio, size_gb) if self.geometry.kind == "dsv4" else self._flat(ratio, size_gb, peers)
        return RankPools(
            tuple(pools),
            self.page_size,
            self.stage,
            self.device_bytes,
            self.device_tokens,
            self._all_assumed,
            uncounted=(self.plan.missing,) if self.plan.missing else (),
        )

    @property
    def _all_assumed(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.rows.assumed, *self.assumed]))

    def _flat(self, ratio: float, size_gb: float, peers: Sequence[Mapping[str, int]]) -> list[HostPool]:
        built = []
        for group, share in zip(self.groups, self._sizes(size_gb), strict=True):
            others = tuple(peer[group.label] for peer in peers if group.label in peer)
            spec = replace(group, ratio=ratio, size_gb=share, pp_peer_tokens=others)
            built.append(size_pool(spec, self.rules))
        anchor = built[0]
        # the index pool is checked right after the KV pool that it lies beside
        if self.rules.indexer == "sidecar" and self.rows.index_row:
            built.insert(1, indexer_pool(anchor, self.rows, self._indexer_layers(), self.plan.packed_layers))
        return built + draft_pools(anchor, self.rows, self.plan, self.device_tokens)

    def _dsv4(self, ratio: float, size_gb: float) -> list[HostPool]:
        shape = self.geometry.compressed
        assert shape is not None
        self.assumed.append(
            "DeepSeek-V4: pools of the FlashMLA layout on CUDA, compression states in fp32, as read in 0.5.12–0.5.23"
        )
        return dsv4_pools(
            shape,
            self.layers,
            self.rules,
            full_tokens=self.device_tokens or 0,
            swa_tokens=self._swa_tokens(self.device_tokens or 0),
            draft_layers=self.plan.layers,
            speculative=self.config.speculative_algorithm is not None,
            layout=self.layout,
            ratio=ratio,
            size_gb=size_gb,
        )


def _partition(config: LaunchConfig) -> tuple[int, ...] | None:
    """Layers of each pipeline stage, where SGLANG_PP_LAYER_PARTITION states them."""
    text = environment(config, "SGLANG_PP_LAYER_PARTITION")
    if not text or (config.pp_size or 1) == 1:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"SGLANG_PP_LAYER_PARTITION: expected layers of each stage such as 30,31, got {text!r}"
        ) from None
