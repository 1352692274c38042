"""DeepSeek-V4's host pools: pages of window, compressed and index rows, and the compression states beside them."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_lab.sglang.releases import ReleaseRules
from hicache_lab.sizing.geometry.shapes import CompressedShape
from hicache_lab.sizing.guard import LaunchFailure
from hicache_lab.sizing.pages import DSV4_PAGE
from hicache_lab.sizing.pools import HostPool, PoolSpec, size_pool

DSV4_SWA_RATIO = 0.1
_C4_RING, _C128_RING = 8, 128


def dsv4_pools(
    shape: CompressedShape,
    layers: Sequence[str],
    rules: ReleaseRules,
    *,
    full_tokens: int,
    swa_tokens: int,
    draft_layers: int,
    speculative: bool,
    layout: str,
    ratio: float,
    size_gb: float,
) -> list[HostPool]:
    """The page pools of one rank, in the order in which they are built and checked.

    Args:
        shape: the latent rows.
        layers: this stage's layers ("c4", "c128" or neither).
        rules: the release. 0.5.12 mirrors the c128 states too; uncompressed draft layers are packed behind the
            window's from 0.5.18 on, and are not mirrored before.
        full_tokens: tokens of the full device pool.
        swa_tokens: tokens of the window's.
        draft_layers: layers of the draft.
        speculative: whether the server speculates.
        layout: --hicache-mem-layout.
        ratio: host pages per device page.
        size_gb: refused when positive.

    Raises:
        LaunchFailure: --hicache-size was given.

    Source: 0.5.12–0.5.23 mem_cache/hybrid_cache/hybrid_pool_assembler.py build_deepseek_v4_hicache_stack;
    ring sizes in mem_cache/deepseek_v4_memory_pool.py get_compress_state_ring_size.
    """
    pages = dsv4_host_pages(
        rules,
        device_full_tokens=full_tokens,
        device_swa_tokens=swa_tokens,
        page_size=DSV4_PAGE,
        swa_page_size=DSV4_PAGE,
        ratio=ratio,
        size_gb=size_gb,
    )
    full, window, c128_pages = pages[0], pages[1], pages[-1] if len(pages) == 3 else pages[0]
    c4, c128 = sum(kind == "c4" for kind in layers), sum(kind == "c128" for kind in layers)
    wider = 2 if speculative else 1
    c4_state = shape.state_page_bytes(4, ring=_C4_RING * wider)
    c4_index_state = shape.state_page_bytes(4, ring=_C4_RING * wider, indexer=True)
    packed = draft_layers if rules.draft == "packed" else 0
    # name, target layers, packed draft layers, pages, bytes of one layer's page, whether it is a state
    rows = [
        ("swa", len(layers), packed, window, shape.page_item_bytes(DSV4_PAGE), False),
        ("deepseek_v4_c4", c4, 0, full, shape.page_item_bytes(DSV4_PAGE // 4), False),
        ("deepseek_v4_c4_indexer", c4, 0, full, shape.indexer_page_item_bytes(DSV4_PAGE // 4), False),
        ("deepseek_v4_c4_state", c4, 0, window, c4_state, True),
        ("deepseek_v4_c4_indexer_state", c4, 0, window, c4_index_state, True),
        ("deepseek_v4_c128", c128, 0, c128_pages, shape.page_item_bytes(DSV4_PAGE // 128), False),
    ]
    if rules.dsv4_c128_state:
        state = shape.state_page_bytes(128, ring=_C128_RING * wider)
        rows.append(("deepseek_v4_c128_state", c128, 0, window, state, True))
    return [
        size_pool(
            PoolSpec(
                kind="dsv4_state" if is_state else "dsv4",
                bytes_per_token=item,
                device_tokens=full_tokens,
                page_size=DSV4_PAGE,
                ratio=ratio,
                label=label,
                layout=layout,
                target_layers=target,
                draft_layers=draft,
                pages=count,
            ),
            rules,
        )
        for label, target, draft, count, item, is_state in rows
        if target
    ]


def dsv4_host_pages(
    rules: ReleaseRules,
    *,
    device_full_tokens: int,
    device_swa_tokens: int,
    page_size: int,
    swa_page_size: int,
    ratio: float,
    size_gb: float,
) -> tuple[int, ...]:
    """Host pages of the DeepSeek-V4 pools: full and swa, from 0.5.20 also c128.

    Raises:
        LaunchFailure: --hicache-size was given; these pools take a ratio only.

    Source: mem_cache/hybrid_cache/hybrid_pool_assembler.py _deepseek_v4_num_host_pages.
    """
    if size_gb > 0:
        text = "DeepSeek V4 HiCache currently does not support --hicache-size; use --hicache-ratio instead."
        raise LaunchFailure("ValueError", text)
    full = -(-device_full_tokens // page_size)
    swa = -(-device_swa_tokens // swa_page_size)
    pages = tuple(
        max(int(device * ratio), device + 1) if rules.dsv4_full_page_more_than_device else int(device * ratio)
        for device in (full, swa)
    )
    return (*pages, pages[0]) if rules.dsv4_c128_pages else pages
