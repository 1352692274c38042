"""A configuration as the line to copy."""

import re
import shlex
from dataclasses import fields, replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.sglang.launch import LaunchConfig, parse_launch, parse_server_args, render_launch
from hicache_lab.sglang.launch.config import FIELD_TYPES, FLAG_FIELDS

FIXTURES = Path(__file__).parents[1] / "fixtures" / "launch"


def test_a_change_touches_nothing_else() -> None:
    text = (
        "FOO=1 python3 -m sglang.launch_server \\\n    --model-path 'm'  --tp 8 \\\n"
        "    --hicache-ratio=2.5 \\\n    --trust-remote-code"
    )
    config = parse_launch(text)
    assert render_launch(config) == text.replace("  --tp", " --tp")
    assert render_launch(config, changes={"tp_size": 4}) == render_launch(config).replace("--tp 8", "--tp 4")
    assert render_launch(config, changes={"hicache_ratio": 3}) == render_launch(config).replace("=2.5", "=3.0")
    sized = render_launch(config, changes={"hicache_size": 48})
    assert "--hicache-ratio" not in sized
    assert sized.endswith("--trust-remote-code \\\n    --hicache-size 48")
    assert render_launch(config, changes={"hicache_ratio": None}, multiline=False) == (
        "FOO=1 python3 -m sglang.launch_server --model-path 'm' --tp 8 --trust-remote-code"
    )


def test_serve_keeps_its_plain_model() -> None:
    config = parse_launch("sglang serve old --tp 2")
    assert render_launch(config, changes={"model": "new model"}) == "sglang serve 'new model' --tp 2"


def test_a_line_without_a_paste() -> None:
    config = LaunchConfig(model="m", tp_size=8, enable_hierarchical_cache=True, env=(("A", "b c"),))
    line = "A='b c' python -m sglang.launch_server --model-path m --tp-size 8 --enable-hierarchical-cache"
    assert render_launch(config) == line
    assert render_launch(config, multiline=True).count(" \\\n  ") == 3


def test_a_dump_renders_its_fields() -> None:
    line = render_launch(
        parse_server_args((FIXTURES / "server_args_0.5.10.log").read_text()), changes={"hicache_size": 4}
    )
    assert "--hicache-size 4" in line and "--hicache-ratio" not in line and "False" not in line
    assert parse_launch(line).tp_size == 2


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda text: not text.startswith("-") and not re.match(r"[\u2012-\u2015\u2212]", text)
)


values = {
    str: words,
    int: st.integers(-5, 10**9),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.just(True),
    "hicache_size": st.one_of(st.integers(0, 5000), st.floats(0.5, 5000).filter(lambda x: x != int(x))),
}


others = st.one_of(
    st.tuples(st.just("--trust-remote-code"), st.none()),
    st.tuples(st.just("--json-model-override-args"), words),
    st.tuples(st.just("--cuda-graph-bs"), st.lists(st.integers(1, 512).map(str), min_size=2).map(tuple)),
    st.tuples(st.just("--foo"), words),
)


names = st.sampled_from(["A", "SGLANG_X", "CUDA_VISIBLE_DEVICES"])


@st.composite
def configs(draw: st.DrawFn) -> LaunchConfig:
    chosen = draw(st.sets(st.sampled_from(FLAG_FIELDS), max_size=8)) | {"model"}
    given_values = {name: draw(values.get(name, values[FIELD_TYPES[name]])) for name in sorted(chosen)}
    env = draw(st.dictionaries(names, words, max_size=2))
    return LaunchConfig(**given_values, other=tuple(draw(st.lists(others, max_size=3))), env=tuple(env.items()))


@given(configs())
def test_what_is_rendered_is_read_back(config: LaunchConfig) -> None:
    assert parse_launch(render_launch(config)) == config
    assert parse_launch(render_launch(config, multiline=True)) == config
    assert parse_launch(shlex.split(render_launch(config))[len(config.env) :]) == replace(config, env=())


def in_any_order(config: LaunchConfig) -> LaunchConfig:
    return replace(config, other=tuple(sorted(config.other, key=repr)))


@given(configs(), configs())
def test_any_paste_renders_any_change(pasted: LaunchConfig, wanted: LaunchConfig) -> None:
    flags = {name: getattr(wanted, name) for name in FLAG_FIELDS}
    target = replace(parse_launch(render_launch(pasted)), **flags, other=wanted.other)
    assert in_any_order(parse_launch(render_launch(target))) == in_any_order(target)


def test_every_field_kind_is_generated() -> None:
    kinds = {f.name if f.name in values else FIELD_TYPES[f.name] for f in fields(LaunchConfig) if f.name in FLAG_FIELDS}
    assert kinds == set(values)
