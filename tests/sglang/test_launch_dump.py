"""A server's own account of its arguments."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.errors import InputError
from hicache_lab.sglang.launch import parse_server_args

FIXTURES = Path(__file__).parents[1] / "fixtures" / "launch"


def test_the_repr_form_of_a_real_log() -> None:
    config = parse_server_args((FIXTURES / "server_args_0.5.10.log").read_text())
    assert (config.tp_size, config.hicache_size, config.hicache_ratio) == (2, 5, 2.0)
    assert (config.hicache_mem_layout, config.page_size, config.mem_fraction_static) == (
        "layer_first",
        1,
        0.88,
    )
    assert config.enable_hierarchical_cache is True and config.enable_dp_attention is False
    assert config.disaggregation_mode == "null" and config.speculative_algorithm is None
    assert dict(config.other)["--cuda-graph-max-bs"] == "32"
    assert config.notes == () and config.sglang_version is None


def test_the_dict_form_of_a_real_log() -> None:
    config = parse_server_args((FIXTURES / "server_args_0.5.23.log").read_text())
    assert (config.tp_size, config.hicache_size, config.attn_dp_size) == (2, 5, 1)
    assert config.hicache_mem_layout == "page_first" and config.hicache_host_memory_fraction is None


def test_the_json_of_a_real_server() -> None:
    config = parse_server_args((FIXTURES / "server_info_0.5.10.json").read_text())
    assert (config.sglang_version, config.hicache_ratio, config.max_total_tokens) == ("0.5.10", 4.0, 2048)


def test_the_last_launch_of_a_log_counts() -> None:
    text = (FIXTURES / "server_args_0.5.10.log").read_text()
    assert parse_server_args(text + text.replace("hicache_size=5", "hicache_size=6")).hicache_size == 6


def test_what_is_cut_off_is_said() -> None:
    text = (FIXTURES / "server_args_0.5.10.log").read_text()
    config = parse_server_args(text[: text.index("hicache_ratio") + 3])
    assert config.tp_size == 2 and config.hicache_ratio is None
    assert "cut off" in config.notes[0] and "after enable_hierarchical_cache" in config.notes[0]
    elided = parse_server_args(re.sub(r"port=\d+.*?dtype", "..., dtype", text))
    assert "left fields out" in elided.notes[0] and elided.hicache_size == 5


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("server_args=ServerArgs(tp_size=8, x=<Mode.A: 'a)'>, hicache_size=48)", "hicache_size", 48),
        ("server_args=ServerArgs(tp_size=8, x=Foo(a=[1, ')'], b={}), hicache_ratio=2)", "hicache_ratio", 2.0),
        ("ServerArgs(tp_size=8, x=inf, y=-inf, z=nan, w=torch.float16, page_size=64)", "page_size", 64),
        (r"server_args={'model_path': 'a\'b\\c\n', 'tp_size': 8}", "model", "a'b\\c\n"),
        ('{"server_args": {"tp_size": 4, "model_path": "a\\u00e9\\/"}, "version": "0.5.2"}', "model", "aé/"),
        ("server_args={'tp_size': 8, 'hicache_size': 37.5}", "hicache_size", 37.5),
        ("server_args={'tp_size': 8, 'x': (1, (2, {'a': b'c'})), 'port': 1}", "port", 1),
    ],
)
def test_values_of_every_kind_are_passed_over_or_read(text: str, field: str, value: object) -> None:
    assert getattr(parse_server_args(text), field) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here", "no server_args in this text"),
        ("{}", "neither model_path nor tp_size"),
        ('{"choices": []}', "not SGLang's server_args"),
        ("server_args={'tp_size': '8'}", "tp_size is '8'; expected int"),
        ("server_args={'tp_size': True}", "tp_size is 'True'; expected int"),
        ("server_args={'tp_size': 8, 'hicache_ratio': inf}", "hicache_ratio is 'inf'"),
        ("server_args={'tp_size': " + "[" * 5000, "levels of brackets"),
    ],
)
def test_what_is_no_dump_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_server_args(text)


def test_a_dump_is_never_evaluated_and_its_secrets_are_not_kept() -> None:
    config = parse_server_args("server_args={'tp_size': 8, 'a': __import__('os').abort(), 'api_key': 'sk-1'}")
    assert config.tp_size == 8 and "sk-1" not in repr(config)


@given(st.text(max_size=200))
def test_any_text_is_a_dump_or_a_clear_refusal(text: str) -> None:
    try:
        parse_server_args("server_args={'tp_size': 8, " + text)
    except InputError as error:
        assert str(error).startswith("server_args: ")
