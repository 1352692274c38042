"""Options as argparse reads them, and --config files."""

import argparse
import contextlib
import io
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.sglang.launch import flag_of, parse_launch, parse_server_args, refusals, render_launch
from hicache_lab.sglang.launch.config import FIELD_TYPES, FLAG_FIELDS
from hicache_lab.sglang.launch.flags import Flag, known_flags, known_releases, resolve

KIMI = "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp-size 8"
LAUNCH = ["python", "-m", "sglang.launch_server"]


def messages(found: tuple) -> str:
    return "\n".join(one.message for one in found)


def test_every_field_is_an_option_of_the_server() -> None:
    assert [name for name in FLAG_FIELDS if flag_of(name) not in known_flags()] == []
    assert [name for name in FLAG_FIELDS if known_flags()[flag_of(name)].field != name] == []
    switches = [name for name in FLAG_FIELDS if FIELD_TYPES[name] is bool]
    assert {known_flags()[flag_of(name)].arity() for name in switches} == {"0"}


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("--tp 8", "tp_size", 8),
        ("--tensor-parallel-size 8", "tp_size", 8),
        ("--pp 2", "pp_size", 2),
        ("--pipeline-parallel-size=2", "pp_size", 2),
        ("--dp 4", "dp_size", 4),
        ("--attention-data-parallel-size 4", "attn_dp_size", 4),
        ("--attn-dp-size 4", "attn_dp_size", 4),
        ("--attn-cp-size 2", "attn_cp_size", 2),
        ("--decode-context-parallel-size 2", "dcp_size", 2),
        ("--ep 8", "ep_size", 8),
        ("--enable-hicache", "enable_hierarchical_cache", True),
        ("--hicache-si 48", "hicache_size", 48),
        ("--hicache_size 48", "hicache_size", 48),
        ("--hicache-size -1", "hicache_size", -1),
        ("--hicache-ratio -.5", "hicache_ratio", -0.5),
        ("--mem-frac 0.85", "mem_fraction_static", 0.85),
        ("--context-length 128k", "context_length", 128_000),
        ("--max-total-tokens 128Ki", "max_total_tokens", 131_072),
        ("--max-total-tokens 1.5M", "max_total_tokens", 1_500_000),
        ("--speculative-draft-model d", "speculative_draft_model_path", "d"),
    ],
)
def test_aliases_and_abbreviations(option: str, field: str, value: object) -> None:
    config = parse_launch(f"python -m sglang.launch_server --model-path m {option}")
    assert getattr(config, field) == value
    assert [name for name, _ in config.given()] == [n for n in FLAG_FIELDS if n in {"model", field}]


def test_an_abbreviation_is_judged_by_the_release() -> None:
    text = "sglang serve m --enable-hi"
    assert parse_launch(text, sglang_version="0.5.9").enable_hierarchical_cache
    with pytest.raises(UsageError, match=r"--enable-hi: ambiguous.*--enable-hierarchical-cache, --enable-hisparse"):
        parse_launch(text, sglang_version="0.5.10")
    assert "ambiguous from 0.5.10" in parse_launch(text).notes[0]


RELEASES = st.sampled_from(known_releases())


@cache
def argparse_of(version: Version) -> argparse.ArgumentParser:
    """Python's own parser with the options of a release."""
    parser = argparse.ArgumentParser(add_help=False)
    for name, flag in known_flags().items():
        if flag.exists_in(version):
            count = {"0": 0, "1": None}.get(flag.arity(version), flag.arity(version))
            parser.add_argument(name, dest=name, nargs=count, action=Named, default=argparse.SUPPRESS)
    return parser


class Named(argparse.Action):
    """Notes that the option was there."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        setattr(namespace, self.dest, values)


def a_value(flag: Flag, version: Version) -> str:
    period = flag.period(version)
    assert period is not None
    return (*(period.choices or ()), {"int": "1", "human_readable_int": "1", "float": "0.5"}.get(period.kind, "{}"))[0]


@given(RELEASES, st.sampled_from(sorted(known_flags())), st.data())
def test_an_abbreviation_means_what_argparse_makes_of_it(version: Version, name: str, data: st.DataObject) -> None:
    prefix = name[: data.draw(st.integers(4, len(name)))]
    if prefix in {"--tp", "--pp", "--dp", "--ep", "--dcp"} or (prefix in known_flags() and prefix != name):
        return
    words = [prefix, *([] if known_flags()[name].arity(version) in "0?*" else ["1"])]
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            (meant,) = vars(argparse_of(version).parse_known_args(words)[0]) or [None]
    except SystemExit:
        if "ambiguous option" not in error.getvalue():
            return
        meant = "ambiguous"
    if meant == "ambiguous" and prefix not in known_flags():
        with pytest.raises(UsageError, match=f"ambiguous option: {prefix} could match"):
            resolve(prefix, version)
    elif meant == "ambiguous":
        assert "ambiguous option" in messages(refusals(parse_launch([*LAUNCH, *words]), str(version)))
    elif meant is not None:
        flag = resolve(prefix, version).flag
        assert flag is not None and flag.name == meant


@given(RELEASES, st.data())
def test_every_option_of_a_release_is_accepted_by_it(version: Version, data: st.DataObject) -> None:
    flag = data.draw(st.sampled_from([one for one in known_flags().values() if one.exists_in(version)]))
    words = [flag.name, *([a_value(flag, version)] if flag.arity(version) != "0" else [])]
    period = flag.period(version)
    for known in (None, str(version)):
        found = messages(refusals(parse_launch([*LAUNCH, *words], sglang_version=known), str(version)))
        if period is not None and period.action in {"stops", "help"}:
            assert f"{flag.name}: {version} answers it with a text and stops" in found
        else:
            assert found == ""
            argparse_of(version).parse_args(words)


@given(RELEASES, st.data())
def test_an_option_that_a_release_lacks_is_refused_with_those_that_have_it(
    version: Version, data: st.DataObject
) -> None:
    absent = [one for one in known_flags().values() if not one.exists_in(version)]
    flag = data.draw(st.sampled_from(absent))
    words = [flag.name, *(["1"] if flag.arity() != "0" else [])]
    found = messages(refusals(parse_launch([*LAUNCH, *words]), str(version)))
    begun = [n for n, one in known_flags().items() if n.startswith(flag.name) and one.exists_in(version)]
    if not begun:
        assert f"{flag.name} does not exist in {version}; releases that have it: {flag.history}" in found
    elif len(begun) > 1:
        assert "ambiguous option" in found


@given(RELEASES, st.data())
def test_a_misspelt_option_is_refused_with_the_one_it_resembles(version: Version, data: st.DataObject) -> None:
    alive = [n for n, one in known_flags().items() if one.exists_in(version) and len(n) > 12]
    name = data.draw(st.sampled_from(alive))
    at = data.draw(st.integers(4, len(name) - 2))
    typed = name[:at] + "qq" + name[at:]
    config = parse_launch([*LAUNCH, typed])
    assert re.search("is in none of the releases.*did you mean --", messages(refusals(config, str(version))))


def test_options_without_a_field_are_kept_in_order() -> None:
    text = KIMI + """ --trust-remote-code --cuda-graph-bs 1 2 4 --json-model-override-args '{"a": [1, 2]}' --foo x"""
    config = parse_launch(text)
    assert config.other == (
        ("--trust-remote-code", None),
        ("--cuda-graph-bs", ("1", "2", "4")),
        ("--json-model-override-args", '{"a": [1, 2]}'),
        ("--foo", "x"),
    )
    assert any(note.startswith("--foo is in none of the releases") for note in config.notes)


def test_a_misspelt_option_is_pointed_at() -> None:
    config = parse_launch(f"{KIMI} --hicache-sizes 48")
    assert config.hicache_size is None
    assert "did you mean --hicache-size?" in config.notes[0]


def test_the_last_of_two_counts_and_is_noted() -> None:
    config = parse_launch(f"{KIMI} --hicache-size 300 --hicache-size 48")
    assert config.hicache_size == 48
    assert "more than once" in config.notes[0]


def test_a_fraction_of_a_gb_is_kept_and_the_server_refuses_it() -> None:
    config = parse_launch(f"{KIMI} --hicache-size 37.5")
    assert config.hicache_size == 37.5
    assert "whole GB" in messages(config.rejections) and "--hicache-size 37" in messages(config.rejections)
    assert parse_launch(f"{KIMI} --hicache-size 37").rejections == ()


def test_secrets_are_not_kept() -> None:
    text = f"HF_TOKEN=hf_abc {KIMI} --api-key sk-123 --admin-api-key=sk-456"
    config = parse_launch(text)
    assert not re.search("hf_abc|sk-", repr(config) + repr(config.source) + render_launch(config))
    assert render_launch(config).startswith('HF_TOKEN="$HF_TOKEN" python')
    assert '--api-key "$API_KEY"' in render_launch(config)
    assert parse_launch(render_launch(config)) == config
    docker = parse_launch("docker run -e HF_TOKEN=hf_abc i python -m sglang.launch_server --model-path m")
    assert "hf_abc" not in render_launch(docker) + repr(docker)


def test_a_credential_inside_a_value_is_not_kept() -> None:
    extra = """--hicache-storage-backend-extra-config '{"access_token": "abc123", "size": 4}'"""
    config = parse_launch(f"{KIMI} {extra} --watermark-key-id w123")
    assert "abc123" not in repr(config) + repr(config.source) + render_launch(config)
    assert '"size": 4' in render_launch(config)
    assert "put it back where the stars are" in " ".join(config.notes)
    assert parse_launch(render_launch(config)) == replace(config, notes=())
    dump = """server_args={'model_path': 'm', 'watermark_key': 'w123', 'extra': '{"access_token": "abc123"}'}"""
    assert not re.search("abc123|w123", repr(parse_server_args(dump)))


def test_a_config_file_is_merged_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model-path: m\ntensor-parallel-size: 4\nenable-hierarchical-cache: true\nenable-metrics: true\n"
        "disable-radix-cache: false\nhicache_size: 300\ncuda-graph-bs: [1, 2]\nlog-level: info\n"
    )
    text = "python -m sglang.launch_server --config run.yaml --hicache-size 48 --log-level debug"
    config = parse_launch(text, base_dir=tmp_path)
    assert (config.model, config.tp_size, config.hicache_size) == ("m", 4, 48)
    assert config.enable_hierarchical_cache and config.disable_radix_cache is None
    assert ("--cuda-graph-bs", ("1", "2")) in config.other
    assert ("--log-level", "debug") in config.other and ("--log-level", "info") not in config.other
    assert render_launch(config) == text
    assert render_launch(config, changes={"tp_size": 8}) == f"{text} --tp-size 8"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.yaml", None, r"gone\.yaml: No such file"),
        ("run.json", "{}", "only takes .yaml or .yml"),
        ("run.yaml", "a: [", r"run\.yaml:\d+: not YAML"),
        ("run.yaml", "- a", "expected a mapping of options, got a list"),
    ],
)
def test_a_bad_config_file_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        parse_launch(f"sglang serve m --config {name}", base_dir=tmp_path)


def test_a_config_file_with_a_wrong_value_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("hicache-size: 300GB\n")
    with pytest.raises(UsageError, match="--hicache-size: expected a whole number of GB"):
        parse_launch("sglang serve m --config run.yaml", base_dir=tmp_path)


def test_only_one_config_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--config: given more than once"):
        parse_launch("sglang serve m --config a.yaml --config b.yaml", base_dir=tmp_path)


def test_without_a_folder_the_config_file_stays_unread_and_that_is_said() -> None:
    config = parse_launch("sglang serve m --config a.yaml")
    assert config.notes == ("--config a.yaml was not read: what it sets is not known here",)


def test_a_value_that_only_some_releases_take_is_kept_while_the_release_is_not_known() -> None:
    """--hybrid-kvcache-ratio took a number up to 0.5.7 and is a switch from 0.5.8 on."""
    config = parse_launch([*LAUNCH, "--hybrid-kvcache-ratio", "0.5"])
    assert refusals(config, "0.5.5.post3") == ()
