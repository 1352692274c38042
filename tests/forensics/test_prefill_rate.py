"""The prefill rate of an engine, from its log."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.forensics.prefill_rate import fit_tokens_per_s, prefill_rate_of


def test_the_prefill_rate_comes_from_the_log(tmp_path: Path) -> None:
    line = "[2026-11-02 10:00:{:02d}] Prefill batch, #new-seq: 1, #new-token: {}, #cached-token: 0, token usage: 0.10, "
    line += "#running-req: 0, #queue-req: 0, cuda graph: False, input throughput (token/s): {:.2f}"
    # each line tells how fast the batch before it was: 20,000 tokens a second, and now and then a pause
    tokens = [4000, 8192, 8192, 100, 8192, 6000, 8192, 8192, 8192, 500]
    speeds = [0.0, *([20_000.0, 20_000.0, 20_000.0, 10.0] * 3)[: len(tokens) - 1]]
    log = tmp_path / "server.log"
    log.write_text("\n".join(line.format(i, t, s) for i, (t, s) in enumerate(zip(tokens, speeds, strict=True))) + "\n")
    rate, basis = prefill_rate_of(log)
    assert rate == pytest.approx(20_000)
    found = re.fullmatch(r"prefill rate fitted from (\d+) batches of server\.log", basis)
    assert found and int(found[1]) >= 5
    log.write_text(line.format(1, 5, 3.0) + "\n")
    with pytest.raises(InputError, match="at least 4 are needed"):
        prefill_rate_of(log)


@given(st.floats(100, 1e6), st.lists(st.floats(1, 1e5), min_size=2, max_size=20))
def test_a_clean_rate_is_found_again(rate: float, tokens: list[float]) -> None:
    assert fit_tokens_per_s(tokens, [count / rate for count in tokens]) == pytest.approx(rate, rel=1e-6)


def test_a_rate_needs_two_prefills() -> None:
    with pytest.raises(UsageError, match="at least two"):
        fit_tokens_per_s([100, 0], [1, 1])
