import re
import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.errors import InputError, UnknownFact, UsageError
from hicache_lab.base.units import GB, GIB
from hicache_lab.sglang.launch import (
    Container,
    LaunchConfig,
    changed,
    flag_of,
    flags_unknown_to,
    launch_from_flags,
    parse_launch,
    parse_launches,
    parse_server_args,
    refusals,
    render_launch,
)
from hicache_lab.sglang.launch.config import FIELD_TYPES, FLAG_FIELDS
from hicache_lab.sglang.launch.flags import known_flags, known_releases, resolve

FIXTURES = Path(__file__).parents[1] / "fixtures" / "launch"
KIMI = "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp-size 8"


def messages(found: tuple) -> str:
    return "\n".join(one.message for one in found)


# what people paste

PROGRAMS = [
    "python -m sglang.launch_server --model-path m",
    "python3 -u -m sglang.launch_server --model m",
    "/opt/venv/bin/python3.12 -m sglang.launch_server --model-path=m",
    "python3 /opt/sglang/python/sglang/launch_server.py --model-path m",
    "sglang serve m",
    "/usr/local/bin/sglang serve --model-path m",
    "nohup numactl --interleave=all python -m sglang.launch_server --model-path m > server.log 2>&1 &",
    "CUDA_VISIBLE_DEVICES=0,1 python -m sglang.launch_server --model-path m &> log &",
    "cd /work && source venv/bin/activate && python -m sglang.launch_server --model-path m | tee log",
    "$ python -m sglang.launch_server --model-path m",
    "(venv) $ python -m sglang.launch_server --model-path m",
    "user@node-1:~/run$ python -m sglang.launch_server --model-path m",
    "root@node:/# python -m sglang.launch_server --model-path m",
    "PS C:\\Users\\me> python -m sglang.launch_server --model-path m",
    "```bash\npython -m sglang.launch_server --model-path m\n```",
    "# start it\npython -m sglang.launch_server --model-path m  # the model",
    "srun -N1 bash -lc 'python -m sglang.launch_server --model-path m'",
    "ssh node1 \"nohup sh -c 'python -m sglang.launch_server --model-path m' &\"",
    "if true; then python -m sglang.launch_server --model-path m; fi",
    "python -m dynamo.sglang --model-path m",
    'CMD ["python3", "-m", "sglang.launch_server", "--model-path", "m"]',
    "python -m sglang.launch_server --model-path m > >(tee log) 2> \"$ERR\" <<< 'x y' |& cat",
    "python -m sglang.launch_server \\\n --model-path m \\\n > $LOG",
    "cat > c.yaml <<EOF\n--tp: 'x\nEOF\npython -m sglang.launch_server --model-path m",
]


@pytest.mark.parametrize("text", PROGRAMS)
def test_a_launch_is_found_in(text: str) -> None:
    config = parse_launch(text)
    assert config.model == "m"
    assert [name for name, _ in config.given()] == ["model"]


CONTINUED = [
    "python -m sglang.launch_server \\\n  --model-path m \\\n  --tp 8 \\\n  --hicache-size 48",
    "python -m sglang.launch_server \\   \n  --model-path m \\ \n  --tp 8 \\\t\n  --hicache-size 48",
    "python -m sglang.launch_server `\n  --model-path m `\n  --tp 8 `\n  --hicache-size 48",
    "python -m sglang.launch_server ^\r\n  --model-path m ^\r\n  --tp 8 ^\r\n  --hicache-size 48",
    "$ python -m sglang.launch_server \\\n>   --model-path m \\\n> --tp 8 --hicache-size 48",
    "python -m sglang.launch_server --model-path m\u00a0--tp 8 --hicache-size=48",
    "TP=8\npython -m sglang.launch_server --model-path m --tp $TP --hicache-size ${SIZE:-48}",
    'A="--tp 8 --hicache-size 48"\npython -m sglang.launch_server --model-path m $A',
    'A=(--tp 8  # ranks\n  --model-path m)\nA+=(--hicache-size 48)\npython -m sglang.launch_server "${A[@]}"',
    "python -m sglang.launch_server --model-path 'm' --t\\p \"8\" --hicache-si\\\nze 48",
]


@pytest.mark.parametrize("text", CONTINUED)
def test_lines_quotes_and_variables_are_read_as_a_shell_reads_them(text: str) -> None:
    config = parse_launch(text)
    assert (config.model, config.tp_size, config.hicache_size) == ("m", 8, 48)
    assert len(list(config.given())) == 3


def test_a_blank_after_the_backslash_is_noted() -> None:
    assert "line 1: a blank after the backslash" in parse_launch(CONTINUED[1]).notes[0]
    assert parse_launch(CONTINUED[0]).notes == ()


def test_environment() -> None:
    text = "export SGLANG_X=1\nA=2 env B='3 4' python -m sglang.launch_server --model-path m"
    assert parse_launch(text).env == (("SGLANG_X", "1"), ("A", "2"), ("B", "3 4"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no SGLang launch found"),
        ("python train.py --tp 8", "no SGLang launch found"),
        ("python -m sglang.bench_serving --model m", "no SGLang launch found"),
        ("vllm serve m --tensor-parallel-size 8", "launches vllm, not SGLang"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "not SGLang"),
        (
            f"{KIMI} --hicache-size 300GB",
            "--hicache-size: expected a whole number of GB .* per rank .*'300GB'",
        ),
        (f"{KIMI} --tp eight", "--tp: expected a whole number, got 'eight'"),
        (f"{KIMI} --hicache-ratio two", "--hicache-ratio: expected a finite number, got 'two'"),
        (f"{KIMI} --hicache-ratio nan", "--hicache-ratio: expected a finite number"),
        (f"{KIMI} --hicache-size", "--hicache-size: expected a value, got nothing"),
        (f"{KIMI} --hicache-size --page-size 1", "--hicache-size: expected a value, got nothing"),
        (
            f"{KIMI} --enable-hierarchical-cache 48",
            "'48' after --enable-hierarchical-cache belongs to no option",
        ),
        (f"{KIMI} --enable-hierarchical-cache=true", "is a switch and takes no value"),
        (f"{KIMI} --hicache-storage-prefetch-r 4", "ambiguous.*max-attempts.*poll-interval"),
        (f"{KIMI} --hicache-size $SIZE", "--hicache-size: .*SIZE, to which this text gives no value"),
        (f"{KIMI} --hicache-size $(nproc)", r"--hicache-size: \$\(nproc\)"),
        (f"{KIMI} $EXTRA", "EXTRA, to which this text gives no value"),
        (f'{KIMI} "${{EXTRA[@]}}"', "EXTRA"),
        (f"{KIMI} '--page-size", "line 1: the quote ' is never closed"),
        (f'{KIMI} \n"--page-size', 'line 2: the quote " is never closed'),
        (f"{KIMI} \u2013\u2013hicache-size 48", "typographic dash"),
        (f"{KIMI} -hicache-size 48", "-hicache-size: the server knows no option with one hyphen"),
        ("x" * 1_000_001, "1,000,001 characters"),
        (f"{KIMI} \\\n  # --page-size 64 \\\n  --hicache-size 48", "line 3: --hicache-size stands alone"),
        (f"{KIMI}\n  --hicache-size 48", "line 2: --hicache-size stands alone"),
        (f"{KIMI} \\ --page-size 64", "after --tp-size: a backslash before a blank does not continue"),
        (f"{KIMI}\n{KIMI} --hicache-size 1", "2 different SGLang launches"),
        ("services: {a: {command: [", "line [12]: not YAML"),
        ("command: {{ .Values.x }}\n- a", "Helm template"),
    ],
)
def test_a_bad_paste_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_launch(text)


def test_an_unreplaced_variable_among_words_is_named() -> None:
    with pytest.raises(UsageError, match=r"--tp: .*'\$TP', a variable that nothing has replaced"):
        parse_launch(["sglang", "serve", "m", "--tp", "$TP"])


def test_the_same_launch_twice_is_one() -> None:
    assert parse_launch(f"{KIMI}\n{KIMI}").tp_size == 8
    assert len(parse_launches(f"{KIMI}\n{KIMI} --page-size 64")) == 2


def test_variables_from_outside() -> None:
    assert parse_launch("sglang serve m --tp $TP", variables={"TP": "4"}).tp_size == 4


def test_what_no_size_depends_on_may_stay_a_variable() -> None:
    config = parse_launch(f"{KIMI} --host $POD_IP --port ${{PORT}} --node-rank $RANK")
    assert config.host is None
    assert dict(config.other)["--host"] == "$POD_IP"
    assert render_launch(config).endswith("--host $POD_IP --port ${PORT} --node-rank $RANK")
    assert parse_launch(render_launch(config)) == config


# options as argparse reads them


def test_every_field_is_an_option_of_the_server() -> None:
    assert [name for name in FLAG_FIELDS if flag_of(name) not in known_flags()] == []
    assert [name for name in FLAG_FIELDS if known_flags()[flag_of(name)].field != name] == []
    switches = [name for name in FLAG_FIELDS if FIELD_TYPES[name] is bool]
    assert {known_flags()[flag_of(name)].arity for name in switches} == {"0"}


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


@given(st.sampled_from(sorted(known_flags())), st.data())
def test_an_abbreviation_means_what_argparse_makes_of_it(name: str, data: st.DataObject) -> None:
    version = data.draw(st.sampled_from(known_releases()))
    prefix = name[: data.draw(st.integers(4, len(name)))]
    alive = [flag for flag in known_flags().values() if flag.exists_in(version)]
    meant = {flag.dest for flag in alive if flag.name == prefix} or {
        flag.dest for flag in alive if flag.name.startswith(prefix)
    }
    if prefix in {"--tp", "--pp", "--dp", "--ep", "--dcp"} or prefix in known_flags():
        return
    if len(meant) > 1:
        with pytest.raises(UsageError, match="ambiguous"):
            resolve(prefix, version)
    elif meant:
        flag = resolve(prefix, version).flag
        assert flag is not None and {flag.dest} == meant


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


# ranks


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


# wrappers


RECIPE = """#!/usr/bin/env bash
set -euo pipefail
source "$(dirname "$0")/lib.sh"
TP=${TP:-8}
HICACHE_SIZE=$(( MEM_GB / TP ))
ARGS=(
  --enable-hierarchical-cache  # the tier
  --hicache-size 270
)
if [[ "$X" == "1" ]]; then
  ARGS+=(--page-size 64)
fi
python3 -m sglang.launch_server \\
    --model-path="$MODEL" --port="$PORT" --tp="$TP" "${ARGS[@]}" \\
    > "$SERVER_LOG" 2>&1 &
SERVER_PID=$!
"""


def test_a_recipe_script() -> None:
    config = parse_launch(RECIPE, variables={"MODEL": "m"})
    assert (config.model, config.tp_size, config.hicache_size, config.page_size) == ("m", 8, 270, 64)
    assert any(note.startswith("line 10: this text branches") for note in config.notes)
    assert render_launch(config, changes={"hicache_size": 48}, multiline=False) == (
        'python3 -m sglang.launch_server --model-path=m --port="$PORT" --tp=8 --enable-hierarchical-cache '
        "--hicache-size 48 --page-size 64"
    )


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("srun --mem=868G -N1 python -m sglang.launch_server --model-path m", 868 * GIB),
        ("srun --mem 4096 bash -c 'python -m sglang.launch_server --model-path m'", 4 * GIB),
        ("#!/bin/bash\n#SBATCH --mem=100G\nA=1 python -m sglang.launch_server --model-path m", 100 * GIB),
        ("srun --mem=0 python -m sglang.launch_server --model-path m", None),
    ],
)
def test_slurm(text: str, memory: int | None) -> None:
    config = parse_launch(text)
    assert config.container == Container("slurm", memory)


def test_systemd() -> None:
    config = parse_launch(
        "[Service]\nEnvironment=A=1 'B=2 3'\nMemoryMax=100G\nMemoryHigh=90G\nLimitMEMLOCK=infinity\n"
        "ExecStart=/usr/bin/python3 -m sglang.launch_server --model-path m \\\n  --tp 8\nRestart=always\n"
    )
    assert config.container == Container("systemd", 90 * GIB, memlock_is_unlimited=True)
    assert (config.tp_size, config.env) == (8, (("A", "1"), ("B", "2 3")))


def test_docker_run() -> None:
    config = parse_launch(
        "sudo docker run -d --gpus all --shm-size=32g --ulimit memlock=-1:-1 -m 400g --memory-swap 500g "
        "--ipc host -v /data/sglang:/x -e A=1 --name m --privileged lmsysorg/sglang:v0.5.8-cu126 "
        "python3 -m sglang.launch_server --model-path m"
    )
    assert config.container == Container(
        "docker", 400 * GIB, 32 * GIB, None, True, "host", True, "lmsysorg/sglang:v0.5.8-cu126"
    )
    assert config.container.image_tag == "v0.5.8-cu126"
    assert config.sglang_version is None
    assert config.env == (("A", "1"),)
    assert parse_launch(render_launch(config)) == config


def test_docker_run_around_sh() -> None:
    inner = "exec python -m sglang.launch_server --model m --tp $TP"
    text = f"docker run -e TP=4 --memory 8589934592 reg:5000/llm bash -c '{inner}'"
    config = parse_launch(text)
    assert config.tp_size == 4
    assert config.container == Container("docker", 8 * GIB, image="reg:5000/llm")
    assert config.container.image_tag is None


def test_a_bad_docker_size_names_the_option() -> None:
    with pytest.raises(UsageError, match="--memory: expected a docker size"):
        parse_launch("docker run --memory lots i python -m sglang.launch_server --model-path m")


COMPOSE = """
services:
  sglang:
    image: lmsysorg/sglang:latest
    environment:
      - TP=8
    deploy: {resources: {limits: {memory: 417g}}}
    shm_size: "32gb"
    ulimits: {memlock: {soft: -1, hard: -1}}
    ipc: host
    entrypoint: python3 -m sglang.launch_server
    command: >
      --model-path m
      --tp $TP
      --hicache-size 48
"""
POD = """
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      hostIPC: true
      containers:
        - name: prefill
          image: lmsysorg/sglang:v0.5.19@sha256:00ff
          resources: {limits: {memory: 449G, nvidia.com/gpu: 8}}
          env: [{name: TP, value: "8"}, {name: KEY, valueFrom: {secretKeyRef: {name: a, key: b}}}]
          COMMAND
          volumeMounts: [{name: shm, mountPath: /dev/shm}]
      volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 10Gi}}]
"""
AS_LISTS = """command: [python3, -m, sglang.launch_server]
          args: [--model-path, m, --tp, $(TP), --hicache-size, 48]"""
AS_SHELL = """command: [/bin/sh, -c]
          args:
            - |
              set -e
              exec python3 -m sglang.launch_server --model-path m \\
                --tp $TP \\
                --hicache-size 48"""
AS_ARGUMENTS = "args: [--model-path, m, --tp, $(TP), --hicache-size, 48]"


def test_compose() -> None:
    config = parse_launch(COMPOSE)
    assert (config.model, config.tp_size, config.hicache_size) == ("m", 8, 48)
    assert config.container == Container(
        "compose", 417 * GIB, 32 * GIB, None, True, "host", image="lmsysorg/sglang:latest"
    )


@pytest.mark.parametrize("command", [AS_LISTS, AS_SHELL, AS_ARGUMENTS])
def test_kubernetes(command: str) -> None:
    config = parse_launch(POD.replace("COMMAND", command))
    assert (config.model, config.tp_size, config.hicache_size) == ("m", 8, 48)
    assert config.container is not None
    assert (config.container.memory_bytes, config.container.shm_bytes) == (449 * GB, 10 * GIB)
    assert (config.container.ipc, config.container.image_tag) == ("host", "v0.5.19")
    assert config.env == (("TP", "8"),)


def test_kubernetes_names_a_variable_without_a_value() -> None:
    with pytest.raises(UsageError, match=r"--tp: \$\(TP\) uses TP"):
        parse_launch(POD.replace("COMMAND", AS_LISTS).replace('value: "8"', "value:"))


def test_two_servers_of_one_manifest() -> None:
    both = POD.replace("COMMAND", AS_LISTS) + "---" + POD.replace("COMMAND", AS_LISTS).replace("48", "96")
    assert [one.hicache_size for one in parse_launches(both)] == [48, 96]
    with pytest.raises(UsageError, match="2 different SGLang launches"):
        parse_launch(both)


def test_yaml_aliases_do_not_multiply() -> None:
    bomb = "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True))
    with pytest.raises(UsageError, match="no SGLang launch"):
        parse_launch(bomb + "command: *i\n")


# --config


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


# releases


@pytest.mark.parametrize(
    ("options", "version", "expected"),
    [
        ("--hicache-size 48", "0.4.5", "--hicache-size does not exist in 0.4.5.*from 0.4.5.post3 on"),
        ("--hicache-ratio 2", "0.4.4", "--hicache-ratio does not exist in 0.4.4.*from 0.4.5 on"),
        ("--hicache-host-memory-fraction 0.5", "0.5.20", "from 0.5.21 on"),
        ("--disable-hicache-numa-detect", "0.5.10", "0.5.8 to 0.5.9"),
        ("--enable-hicache", "0.5.22", "--enable-hicache does not exist in 0.5.22"),
        ("--foo 1", "0.5.8", "--foo is in none of the releases 0.4.4 to 0.5.23"),
    ],
)
def test_options_a_release_does_not_have(options: str, version: str, expected: str) -> None:
    found = messages(flags_unknown_to(parse_launch(f"{KIMI} {options}"), version))
    assert re.fullmatch(f".*{expected}.*", found)


@pytest.mark.parametrize("version", ["0.5.23", "v0.5.23", "0.9.0", "0.5.16.post1"])
def test_what_the_release_has_is_not_reported(version: str) -> None:
    config = parse_launch(f"{KIMI} --tp 8 --hicache-size 48 --enable-hierarchical-cache --trust-remote-code")
    assert flags_unknown_to(config, version) == ()
    assert refusals(config, version) == ()


def test_options_of_a_configuration_without_a_paste() -> None:
    found = flags_unknown_to(LaunchConfig(hicache_size=48, other=(("--foo", None),)), "0.4.5")
    assert [one.flag for one in found] == ["--hicache-size", "--foo"]


def test_an_exact_name_of_later_releases_may_be_an_abbreviation_of_an_earlier_one() -> None:
    config = parse_launch("python -m sglang.launch_server --model m")
    assert flags_unknown_to(config, "0.4.4") == ()


@pytest.mark.parametrize(
    ("options", "version", "expected"),
    [
        (
            "--hicache-mem-layout page_head",
            "0.5.3",
            "0.5.3 accepts layer_first, page_first, page_first_direct",
        ),
        ("--hicache-write-policy write_around", "0.5.8", "accepts write_back"),
        ("--kv-cache-dtype fp4_e2m1", "0.5.21", "--kv-cache-dtype fp4_e2m1: 0.5.21 accepts"),
        ("--hicache_size 48", "0.5.8", "the server only knows --hicache-size"),
        ("--pp 2", "0.5.8", "--pp: ambiguous in 0.5.8"),
        ("--max-total-tokens 100k", "0.5.8", "only 0.5.10 and later"),
        ("--hicache-size 37.5", "0.5.8", "whole GB"),
    ],
)
def test_what_the_release_refuses(options: str, version: str, expected: str) -> None:
    assert expected in messages(refusals(parse_launch(f"{KIMI} {options}"), version))


@pytest.mark.parametrize(
    ("options", "version"),
    [
        ("--hicache-mem-layout page_head", "0.5.6"),
        ("--kv-cache-dtype fp4_e2m1", "0.5.20"),
        ("--pp 2", "0.4.9"),
        ("--max-total-tokens 100k", "0.5.10"),
    ],
)
def test_what_the_release_accepts(options: str, version: str) -> None:
    assert refusals(parse_launch(f"{KIMI} {options}"), version) == ()


def test_a_release_that_is_none_is_refused() -> None:
    with pytest.raises(UnknownFact, match=r"--sglang-version: expected a release .* got 'main'"):
        flags_unknown_to(LaunchConfig(), "main")


# server_args dumps


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


@given(st.text(max_size=200))
def test_any_paste_is_a_launch_or_a_clear_refusal(text: str) -> None:
    try:
        parse_launch("python -m sglang.launch_server --model-path m " + text)
    except UsageError as error:
        assert str(error)


# rendering


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hicache_sise": 4}, "hicache_sise: not a flag of a launch; did you mean hicache_size?"),
        ({"hicache_size": "48GB"}, "--hicache-size: expected a whole number of GB"),
        ({"tp_size": 1.5}, "--tp-size: expected a whole number"),
        ({"hicache_size": True}, "--hicache-size: expected a value, got True"),
        ({"enable_hierarchical_cache": 1}, "expected True, False or None"),
        ({"other": ()}, "other: not a flag"),
    ],
)
def test_a_bad_change_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        render_launch(LaunchConfig(model="m"), changes=changes)


def test_changes_by_option_name() -> None:
    config = changed(LaunchConfig(model="m", hicache_ratio=2.0), {"--hicache-size": 48, "--enable-hicache": True})
    assert (config.hicache_size, config.hicache_ratio, config.enable_hierarchical_cache) == (48, None, True)
    both = changed(config, {"hicache_size": 4, "hicache_ratio": 2.0})
    assert (both.hicache_size, both.hicache_ratio) == (4, 2.0)
    assert changed(both, {"enable_hierarchical_cache": False}).enable_hierarchical_cache is None


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


@pytest.mark.parametrize(
    ("argv", "fields_", "expected"),
    [
        (["--tp", "8", "--hicache-size=48"], {}, LaunchConfig(tp_size=8, hicache_size=48, sglang_version="0.5.8")),
        (["--tp", "8"], {"model": "m", "tp_size": 4}, LaunchConfig("m", "0.5.8", tp_size=4)),
        ([], {"model": "m", "enable_hierarchical_cache": True}, parse_launch("sglang serve m --enable-hier")),
    ],
)
def test_a_launch_from_flags_alone(argv: list[str], fields_: dict[str, object], expected: LaunchConfig) -> None:
    config = launch_from_flags(argv, sglang_version="0.5.8", **fields_)
    assert config == replace(expected, sglang_version="0.5.8")
    assert parse_launch(render_launch(config), sglang_version="0.5.8") == config


@pytest.mark.parametrize("argv", [["--tp-size", "two"], ["8"], ["--page-size"], ["--dis", "1"], ["--tp-size", "$TP"]])
def test_flags_alone_are_checked_as_on_a_line(argv: list[str]) -> None:
    with pytest.raises(UsageError) as alone:
        launch_from_flags(argv)
    with pytest.raises(UsageError) as line:
        parse_launch(["python", "-m", "sglang.launch_server", *argv])
    assert str(alone.value) == str(line.value)


def test_config_file_of_flags_alone(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("tp-size: 4\n")
    assert launch_from_flags(["--config", "run.yaml"], base_dir=tmp_path).tp_size == 4
    assert "not read" in launch_from_flags(["--config", "run.yaml"]).notes[0]
