"""Docker, compose, Kubernetes, Slurm and systemd around a launch."""

import pytest

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, GIB
from hicache_lab.sglang.launch import Container, parse_launch, parse_launches, render_launch


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
    assert config.container == Container("systemd", 90 * GIB)
    assert (config.tp_size, config.env) == (8, (("A", "1"), ("B", "2 3")))


def test_docker_run() -> None:
    config = parse_launch(
        "sudo docker run -d --gpus all --shm-size=32g --ulimit memlock=-1:-1 -m 400g --memory-swap 500g "
        "--ipc host -v /data/sglang:/x -e A=1 --name m --privileged lmsysorg/sglang:v0.5.8-cu126 "
        "python3 -m sglang.launch_server --model-path m"
    )
    assert config.container == Container("docker", 400 * GIB, 32 * GIB, "lmsysorg/sglang:v0.5.8-cu126")
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
    assert config.container == Container("compose", 417 * GIB, 32 * GIB, image="lmsysorg/sglang:latest")


@pytest.mark.parametrize("command", [AS_LISTS, AS_SHELL, AS_ARGUMENTS])
def test_kubernetes(command: str) -> None:
    config = parse_launch(POD.replace("COMMAND", command))
    assert (config.model, config.tp_size, config.hicache_size) == ("m", 8, 48)
    assert config.container is not None
    assert (config.container.memory_bytes, config.container.shm_bytes) == (449 * GB, 10 * GIB)
    assert config.container.image_tag == "v0.5.19"
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


@pytest.mark.parametrize(
    "limit", ["-p MemoryMax=600G", "--property=MemoryMax=600G", "-p MemoryHigh=600G -p MemoryMax=700G"]
)
def test_systemd_run(limit: str) -> None:
    line = f"systemd-run --scope {limit} python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B"
    config = parse_launch(f"export SGLANG_USE_MODELSCOPE=1\n{line}")
    assert config.container == Container("systemd-scope", 600 * GIB)
    assert dict(config.env) == {"SGLANG_USE_MODELSCOPE": "1"}
    service = parse_launch(line.replace("--scope ", ""))
    assert service.container == Container("systemd", 600 * GIB)


def test_systemd_run_without_a_limit() -> None:
    line = "systemd-run --scope -p MemoryMax=infinity python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B"
    assert parse_launch(line).container is None
