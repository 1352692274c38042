"""What a configuration says of its ranks."""

import pytest

from hicache_lab.sglang.launch import LaunchConfig


@pytest.mark.parametrize(
    ("config", "engine", "processes", "host", "attention"),
    [
        (LaunchConfig(), 1, 1, 1, 1),
        (LaunchConfig(tp_size=8), 8, 8, 8, 8),
        (LaunchConfig(tp_size=8, pp_size=2, nnodes=2), 16, 16, 8, 8),
        (LaunchConfig(tp_size=4, dp_size=2), 4, 8, 4, 4),
        (LaunchConfig(tp_size=8, dp_size=8, enable_dp_attention=True), 8, 8, 8, 1),
        (LaunchConfig(tp_size=8, attn_dp_size=4), 8, 8, 8, 2),
        (LaunchConfig(tp_size=8, attn_dp_size=2, attn_cp_size=2), 8, 8, 8, 2),
        (LaunchConfig(tp_size=1, nnodes=2), 1, 1, 1, 1),
    ],
)
def test_ranks(config: LaunchConfig, engine: int, processes: int, host: int, attention: int) -> None:
    assert config.ranks_per_engine == engine
    assert config.processes == processes
    assert config.ranks_per_host == host
    assert config.attn_tp_size == attention
