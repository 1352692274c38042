"""Pools that lie beside a rank's KV pool and hold as many tokens: the indexer's keys and the draft's rows."""

from __future__ import annotations

from dataclasses import replace

from hicache_lab.sizing.draft import Draft
from hicache_lab.sizing.kv import KvRows
from hicache_lab.sizing.pools import HostPool, size_pool
from hicache_lab.sizing.rows import indexer_bytes_per_layer


def indexer_pool(anchor: HostPool, rows: KvRows, layers: int, packed_layers: int) -> HostPool:
    """The index keys of ``layers`` target layers and the draft layers packed behind them."""
    spec = replace(
        anchor.spec,
        kind="indexer",
        label="indexer",
        bytes_per_token=rows.index_row * (layers + packed_layers),
        allocated_bytes_per_token=None,
        page_size=anchor.page_size,
        anchor_tokens=anchor.tokens,
        target_layers=layers,
        draft_layers=packed_layers,
    )
    return size_pool(spec, rows.rules)


def draft_row(rows: KvRows, draft: Draft) -> int:
    """Bytes of one token in the draft's own pool."""
    model = draft.model or rows.geometry
    if rows.latent_or_given(model):
        return rows.row(draft.layers, model, is_draft=True)
    return rows.head_row(model, "full", draft.layers)


def draft_pools(anchor: HostPool, rows: KvRows, draft: Draft, device_tokens: int | None) -> list[HostPool]:
    """The draft's own host pools: as many tokens as the target's, sized again by a ratio."""
    if draft.place != "sidecar":
        return []
    model = draft.model or rows.geometry
    tokens = device_tokens or anchor.tokens
    spec = replace(
        anchor.spec,
        kind="mla" if rows.latent_or_given(model) else "mha",
        label="draft",
        bytes_per_token=draft_row(rows, draft),
        allocated_bytes_per_token=None,
        device_tokens=tokens,
        ratio=anchor.tokens / tokens,
        size_gb=0,
        target_layers=draft.layers,
        draft_layers=0,
        pp_peer_tokens=(),
        index_stride_bytes=None,
        host_token_capacity=anchor.tokens if rows.rules.draft_exact else None,
    )
    pool = size_pool(spec, rows.rules)
    if model.index_head_dim is None or not rows.rules.dsa_draft_like_device:
        return [pool]
    index = replace(
        spec,
        kind="indexer",
        label="draft_indexer",
        bytes_per_token=indexer_bytes_per_layer(model.index_head_dim) * draft.layers,
        page_size=pool.page_size,
        anchor_tokens=pool.tokens,
        host_token_capacity=None,
    )
    return [pool, size_pool(index, rows.rules)]
