"""What systemd, Kubernetes and Docker tell of a kill, where nobody can see the kernel's own line."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from hicache_lab.cli import main
from hicache_lab.incident.folder import kind_of
from hicache_lab.incident.kernel import read_kernel_log
from hicache_lab.incident.told import teller_of
from hicache_lab.units import GB, GIB

DESCRIBE = """Name:             sglang-0
Namespace:        inference
Containers:
  istio-proxy:
    State:          Running
      Started:      Tue, 20 Jan 2026 09:00:00 +0000
    Limits:
      memory:  1Gi
  sglang:
    Container ID:   containerd://3f
    State:          Running
      Started:      Tue, 20 Jan 2026 10:18:40 +0100
    Last State:     Terminated
      Reason:       OOMKilled
      Exit Code:    137
      Started:      Tue, 20 Jan 2026 10:15:00 +0100
      Finished:     Tue, 20 Jan 2026 10:18:02 +0100
    Ready:          True
    Restart Count:  3
    Limits:
      cpu:             96
      memory:          200Gi
      nvidia.com/gpu:  8
    Requests:
      cpu:             48
      memory:          100Gi
Events:                <none>
"""
YAML = """apiVersion: v1
kind: Pod
spec:
  containers:
  - name: sglang
    resources:
      limits:
        memory: 440G
        nvidia.com/gpu: "8"
      requests:
        memory: 100Gi
status:
  containerStatuses:
  - lastState:
      terminated:
        exitCode: 137
        finishedAt: "2026-01-20T09:18:02Z"
        reason: OOMKilled
        startedAt: "2026-01-20T09:15:00Z"
    name: sglang
"""
TABLE = """NAMESPACE   NAME       READY   STATUS      RESTARTS   AGE
inference   sglang-0   0/1     OOMKilled   3          10m
inference   router-0   1/1     Running     0          10m
"""
DOCKER = json.dumps(
    [{"State": {"Status": "exited", "Running": False, "OOMKilled": True, "Dead": False, "Pid": 0, "ExitCode": 137,
                "Error": "", "StartedAt": "2026-01-20T09:15:00.1Z", "FinishedAt": "2026-01-20T09:18:02.123456789Z"},
      "HostConfig": {"Memory": 0}}], indent=4,
)  # fmt: skip
UNIT = """2026-01-20T09:18:02+0000 node systemd[1]: s.service: A process of this unit has been killed by the OOM killer.
2026-01-20T09:18:03+0000 node systemd[1]: s.service: Main process exited, code=killed, status=9/KILL
2026-01-20T09:18:03+0000 node systemd[1]: s.service: Failed with result 'oom-kill'.
"""
AT = datetime(2026, 1, 20, 9, 18, 2)


@pytest.mark.parametrize(
    ("text", "teller", "at", "limit_bytes"),
    [
        (DESCRIBE, "Kubernetes", AT, 200 * GIB),
        (YAML, "Kubernetes", AT, 440 * GB),
        (TABLE, "Kubernetes", None, None),
        (DOCKER, "Docker", AT.replace(microsecond=123456), None),
        (UNIT, "systemd", AT, None),
        (UNIT.split("\n", 2)[2], "systemd", AT.replace(second=3), None),
    ],
    ids=["describe", "yaml", "table", "docker", "systemd", "older systemd"],
)
def test_a_kill_is_read_from(
    text: str,
    teller: str,
    at: datetime | None,
    limit_bytes: int | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "told.txt"
    path.write_text(text)
    read = read_kernel_log(str(path))
    assert [(teller_of(kill), kill.at) for kill in read.kills] == [(teller, at)]
    assert read.cgroup_limit_bytes == limit_bytes
    assert kind_of(str(path)) == "kernel"
    assert capsys.readouterr().err == ""


def test_the_kubelet_names_its_victim(tmp_path: Path) -> None:
    path = tmp_path / "events.txt"
    said = "System OOM encountered, victim process: sglang::schedul, pid: 4242"
    path.write_text(
        f"LAST SEEN  TYPE     REASON     OBJECT      MESSAGE\n3m         Warning  SystemOOM  node/gpu-7  {said}\n"
    )
    (kill,) = read_kernel_log(str(path)).kills
    assert (kill.comm, kill.pid, teller_of(kill)) == ("sglang::schedul", 4242, "Kubernetes")


@pytest.mark.parametrize(
    "text",
    [
        DESCRIBE.replace("OOMKilled", "Error"),
        YAML.replace("OOMKilled", "Completed"),
        DOCKER.replace("true,\n", "false,\n"),
        UNIT.replace("oom-kill", "signal").replace(
            "A process of this unit has been killed by the OOM killer.", "Stopped."
        ),
        "If this was an OOM (Reason: OOMKilled), lower --mem-fraction-static.\n",
        "the pod was OOMKilled yesterday, or so they say\n",
    ],
)
def test_nothing_is_read_from_other_ends_and_from_prose(text: str, tmp_path: Path) -> None:
    path = tmp_path / "told.txt"
    path.write_text(text)
    assert read_kernel_log(str(path)).kills == ()


def test_the_kernels_own_line_counts_more(tmp_path: Path) -> None:
    path = tmp_path / "journal.txt"
    line = "node kernel: Out of memory: Killed process 77 (sglang::schedul) total-vm:9kB, anon-rss:5kB"
    kernel = f"2026-01-20T09:18:01+0000 {line}\n"
    path.write_text(kernel + UNIT)
    assert [(kill.pid, teller_of(kill)) for kill in read_kernel_log(str(path)).kills] == [(77, None)]


def test_another_containers_limit_is_not_the_killed_ones(tmp_path: Path) -> None:
    path = tmp_path / "pod.txt"
    begin, end = DESCRIBE.index("    Limits:\n      cpu"), DESCRIBE.index("Events:")
    for text in (DESCRIBE[:begin] + DESCRIBE[end:], DESCRIBE[:begin] + "  other:\n" + DESCRIBE[begin:]):
        path.write_text(text)
        assert read_kernel_log(str(path)).cgroup_limit_bytes is None


def test_several_limits_without_an_owner_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(YAML + YAML.replace("440G", "1Gi"))
    assert read_kernel_log(str(path)).cgroup_limit_bytes is None


def test_diagnose_takes_it_beside_the_server_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, pod = tmp_path / "server.log", tmp_path / "pod.txt"
    pod.write_text(DESCRIBE)
    server.write_text(
        "[2026-01-20 09:17:30] server_args=ServerArgs(model_path='m', tp_size=2, enable_hierarchical_cache=True, "
        "hicache_ratio=2.0, hicache_size=0)\n"
        + "".join(
            f"[2026-01-20 09:17:33 TP{rank}] Allocating 150.00 GB host memory for hierarchical KV cache.\n"
            for rank in range(2)
        )
    )
    assert main(["diagnose", str(server), str(pod), "--host-ram", "1000GB", "--json"]) == 3
    found = {one["cause"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert "200.00 GiB" in found["container_limit"]["explanation"]
    kill = found["kernel_oom_kill"]
    assert "what Kubernetes tells" in kill["explanation"] and kill["confidence"] == "medium"
    assert [line["text"] for line in kill["evidence"]] == ["Reason:       OOMKilled"]
