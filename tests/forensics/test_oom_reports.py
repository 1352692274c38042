"""A kill that systemd, Kubernetes and Docker report, where nobody can see the kernel's own line."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hicache_lab.base.units import GB, GIB
from hicache_lab.cli import main
from hicache_lab.forensics.incident.facts import gather
from hicache_lab.forensics.incident.folder import kind_of, sort_files
from hicache_lab.forensics.incident.kernel import KernelLog, read_kernel_log

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
HAPPENED = "A process of this unit has been killed by the OOM killer"
STATUS = """x s.service - SGLang
     Active: failed (Result: oom-kill) since Tue 2026-01-20 09:18:02 UTC; 5min ago
"""
AT = datetime(2026, 1, 20, 9, 18, 2)


@pytest.mark.parametrize(
    ("text", "reporter", "at", "limit_bytes"),
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
    reporter: str,
    at: datetime | None,
    limit_bytes: int | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "reported.txt"
    path.write_text(text)
    read = read_kernel_log(str(path))
    assert [(kill.reporter, kill.at) for kill in read.kills] == [(reporter, at)]
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
    assert (kill.comm, kill.pid, kill.reporter) == ("sglang::schedul", 4242, "Kubernetes")


@pytest.mark.parametrize(
    "text",
    [
        "Jan 20 09:18:02 node logger[3]: saw systemd: s.service: Failed with result 'oom-kill'.\n",
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
    path = tmp_path / "reported.txt"
    path.write_text(text)
    assert read_kernel_log(str(path)).kills == ()


def test_the_kernels_own_line_counts_more(tmp_path: Path) -> None:
    path = tmp_path / "journal.txt"
    line = "node kernel: Out of memory: Killed process 77 (sglang::schedul) total-vm:9kB, anon-rss:5kB"
    kernel = f"2026-01-20T09:18:01+0000 {line}\n"
    path.write_text(kernel + UNIT)
    assert [(kill.pid, kill.reporter) for kill in read_kernel_log(str(path)).kills] == [(77, None)]


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


def read(text: str, tmp_path: Path, name: str = "reported.txt") -> KernelLog:
    path = tmp_path / name
    path.write_text(text, newline="")
    return read_kernel_log(str(path))


def pod(*containers: tuple[str, str | None, str | None]) -> dict[str, object]:
    """A pod of kubectl's: each container with its limit and when it was killed."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "sglang-0"},
        "spec": {
            "containers": [
                {
                    "env": [{"name": "istio-proxy", "valueFrom": {"fieldRef": {"apiVersion": "v1"}}}],
                    "name": name,
                    "resources": {"limits": {"cpu": "8", "memory": size}, "requests": {"memory": "5Gi"}}
                    if size else {},
                }
                for name, size, _ in containers
            ],
        },
        "status": {
            "containerStatuses": [
                {
                    "lastState": {
                        "terminated": {"exitCode": 1, "finishedAt": at, "message": "a\nb", "reason": "OOMKilled"}
                    } if at else {},
                    "name": name,
                    "state": {"waiting": {"message": "back-off", "reason": "CrashLoopBackOff"}},
                }
                for name, _, at in containers
            ],
        },
    }  # fmt: skip


SIDECAR = ("istio-proxy", "1Gi", None)
KILLED = ("sglang", "440Gi", "2026-01-20T09:18:02Z")


def in_yaml(value: object, depth: int = 0) -> str:
    """As kubectl prints it: sorted keys, a list's dashes below its key."""
    pad = "  " * depth
    if isinstance(value, dict):
        return "".join(
            f"{pad}{key}: {one or '{}'}\n"
            if not isinstance(one, dict | list) or not one
            else f"{pad}{key}:\n" + in_yaml(one, depth + (not isinstance(one, list)))
            for key, one in sorted(value.items())
        )
    assert isinstance(value, list)
    return "".join(f"{pad}- " + in_yaml(one, depth + 1).lstrip() for one in value)


@pytest.mark.parametrize("form", ["json", "yaml", "one line", "a list"])
@pytest.mark.parametrize(
    ("containers", "limit_bytes"),
    [
        ((SIDECAR, KILLED), 440 * GIB),
        ((KILLED, SIDECAR), 440 * GIB),
        ((SIDECAR, ("sglang", None, AT.isoformat() + "Z")), None),
        ((SIDECAR, ("sglang", "440G", None)), None),
        ((("istio-proxy", "1Gi", AT.isoformat() + "Z"), KILLED), None),
    ],
    ids=["sidecar first", "sidecar last", "sidecar's only", "nobody killed", "both killed"],
)
def test_a_limit_is_the_killed_containers(
    containers: tuple[tuple[str, str | None, str | None], ...], limit_bytes: int | None, form: str, tmp_path: Path
) -> None:
    one = pod(*containers)
    everything: object = {"apiVersion": "v1", "items": [pod(("sglang", "3Gi", None)), one], "kind": "List"}
    text = {
        "json": json.dumps(one, indent=4),
        "yaml": in_yaml(one).replace("message: a\nb", "message: |\n          a\n          b"),
        "one line": json.dumps(one, separators=(",", ":")),
        "a list": json.dumps(everything, indent=4),
    }[form]
    log = read(text.replace("\n", "\r\n"), tmp_path)
    assert [kill.at for kill in log.kills] == [AT for *_, at in containers if at]
    assert log.cgroup_limit_bytes == limit_bytes


@pytest.mark.parametrize(
    ("written", "limit_bytes"),
    [
        ("440G", 440 * GB),
        ("450000Mi", 450000 * 1024**2),
        ("472446402560", 440 * GIB),
        ('"44e10"', 440 * GB),
        ("440000000000000m", 440 * GB),
        ("1.5Ti", 1536 * GIB),
        ("1P", 1000000 * GB),
        ("1e99", 2**63 - 1),
    ],
)
def test_quantities(written: str, limit_bytes: int, tmp_path: Path) -> None:
    assert read(YAML.replace("440G", written), tmp_path).cgroup_limit_bytes == limit_bytes


def test_a_container_quotes_its_last_words(tmp_path: Path) -> None:
    words = "".join(f"[2026-01-20 09:17:33 TP{rank}] Allocating\nRuntimeError: no\n" for rank in range(3))
    text = DESCRIBE.replace(
        "      Exit Code:    137\n", "      Message:      " + words + "\n" * 9 + "      Exit Code: 1\n"
    )
    log = read(text, tmp_path)
    assert [kill.at for kill in log.kills] == [AT]
    assert log.cgroup_limit_bytes == 200 * GIB
    assert kind_of(log.path) == "kernel"
    own = "[2026-01-20 09:17:33 TP0] Decode batch\n" * 99
    assert kind_of(read(text + own, tmp_path).path) == "server"


def test_an_event_of_the_node_is_no_containers(tmp_path: Path) -> None:
    event = "Events:\n  Warning  SystemOOM  3m  kubelet  System OOM encountered, victim process: python3, pid: 7\n"
    log = read(DESCRIBE.replace("OOMKilled", "Error").replace("Events:                <none>\n", event), tmp_path)
    assert [(kill.pid, kill.at) for kill in log.kills] == [(7, None)]
    assert log.cgroup_limit_bytes is None


def test_kubectl_watching_says_a_kill_again(tmp_path: Path) -> None:
    rows = """NAME       READY   STATUS                  RESTARTS      AGE
sglang-0   0/1     OOMKilled               0             9m
sglang-0   0/1     OOMKilled               0             9m
sglang-0   1/1     Running                 1 (2s ago)    9m
sglang-0   0/1     OOMKilled               1 (60s ago)   10m
sglang-0   0/1     CrashLoopBackOff        1 (2s ago)    10m
router-0   0/1     Init:OOMKilled          0             10m
router-1   0/1     Evicted                 0             10m
"""
    assert [kill.where.line for kill in read(rows, tmp_path).kills] == [2, 5, 7]
    assert [kill.at for kill in read(rows.split("\n", 2)[1] + "\n" + DESCRIBE, tmp_path).kills] == [AT]


def inspected(number: int, *, memory: int, killed: bool, running: bool = False) -> dict[str, object]:
    return {
        "Id": f"{number:064x}",
        "State": {"Status": "exited", "Running": running, "OOMKilled": killed, "ExitCode": 137, "StartedAt": "",
                  "FinishedAt": "2026-01-20T10:18:02+01:00"},
        "Name": f"/s{number}",
        "HostConfig": {"CpuShares": 0, "Memory": memory, "MemoryReservation": 5},
    }  # fmt: skip


@pytest.mark.parametrize("indent", [4, 5, None], ids=["docker", "podman", "one line"])
def test_docker_inspect_of_several_containers(indent: int | None, tmp_path: Path) -> None:
    both = [inspected(1, memory=3, killed=False), inspected(2, memory=440 * GIB, killed=True)]
    for containers in (both, both[::-1]):
        log = read(json.dumps(containers, indent=indent), tmp_path)
        assert [kill.at for kill in log.kills] == [AT]
        assert log.cgroup_limit_bytes == 440 * GIB
    unlimited = [both[0], inspected(2, memory=0, killed=True)]
    assert read(json.dumps(unlimited, indent=indent), tmp_path).cgroup_limit_bytes is None


def test_a_container_that_still_runs_was_finished_before_its_kill(tmp_path: Path) -> None:
    text = json.dumps([inspected(1, memory=9, killed=True, running=True)], indent=4)
    assert [kill.at for kill in read(text, tmp_path).kills] == [None]


def test_docker_events(tmp_path: Path) -> None:
    container = "f" * 64 + " (image=lmsysorg/sglang:v0.5.5, name=sglang)"
    text = "".join(f"2026-01-20T09:18:02.5+00:00 container {what} {container}\n" for what in ("oom", "die", "start"))
    assert [(kill.reporter, kill.at) for kill in read(text, tmp_path).kills] == [("Docker", AT)]


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        (UNIT + UNIT, 2),
        ((UNIT.split("\n", 2)[2]) * 3, 3),
        (UNIT.replace(HAPPENED, "systemd-oomd killed 9 process(es) in this unit"), 1),
        (UNIT.replace(HAPPENED, "The kernel OOM killer killed some processes in this unit"), 1),
        ("".join(line.partition(": ")[2] + "\n" for line in UNIT.splitlines()), 1),
        (STATUS + UNIT, 1),
        (STATUS, 1),
        (STATUS.replace("failed", "activating (auto-restart)"), 1),
    ],
    ids=["twice", "older, thrice", "oomd", "kernel", "cat", "status", "status alone", "restarting"],
)  # fmt: skip
def test_systemd_says_each_kill_once(text: str, kills: int, tmp_path: Path) -> None:
    log = read(text, tmp_path)
    assert len(log.kills) == kills
    assert kind_of(log.path) == "kernel"
    assert {kill.at for kill in log.kills} <= {AT, AT.replace(second=3), None}


def test_the_journal_in_json(tmp_path: Path) -> None:
    def entry(who: str, message: str) -> str:
        at = str(int(AT.replace(tzinfo=UTC).timestamp() * 1e6))
        return json.dumps({"__REALTIME_TIMESTAMP": at, "SYSLOG_IDENTIFIER": who, "MESSAGE": message}) + "\n"

    systemd = "".join(entry("systemd", line.partition("]: ")[2]) for line in UNIT.splitlines())
    kernel = entry("kernel", "Out of memory: Killed process 77 (sglang::schedul) total-vm:9kB, anon-rss:5kB")
    for text, pid in ((systemd, None), (kernel + systemd, 77)):
        log = read(text, tmp_path)
        assert [(kill.at, kill.pid) for kill in log.kills] == [(AT, pid)]
        assert kind_of(log.path) == "kernel"


def test_a_folder_with_the_pods_yaml_and_the_nodes_log_has_one_kill(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("[2026-01-20 09:17:33 TP0] Decode batch\n")
    (tmp_path / "values.yaml").write_text("resources:\n  limits:\n    memory: 1Gi\n")
    (tmp_path / "pod.yaml").write_text(in_yaml(pod(KILLED)).replace("a\nb", "a"))
    assert [Path(path).name for path in sort_files([str(tmp_path)]).kernel_logs] == ["pod.yaml"]
    assert len(gather([str(tmp_path)]).kills) == 1
    line = "Memory cgroup out of memory: Killed process 77 (sglang::schedul) total-vm:9kB, anon-rss:5kB"
    (tmp_path / "dmesg.txt").write_text(f"[Tue Jan 20 10:18:01 2026] {line}\n")
    assert [kill.pid for kill in gather([str(tmp_path)]).kills] == [77]
    (tmp_path / "dmesg.txt").write_text(f"[Tue Jan 20 10:18:01 2026] {line}\n".replace("sglang::schedul", "java"))
    assert [kill.pid for kill in gather([str(tmp_path)]).kills] == [77, None]


def test_the_same_kill_in_a_table_a_description_and_yaml_is_one(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("[2026-01-20 09:17:33 TP0] Decode batch\n")
    for name, text in (("a.txt", TABLE), ("b.txt", DESCRIBE), ("c.yaml", YAML), ("d.txt", DESCRIBE + "\n" + YAML)):
        (tmp_path / name).write_text(text)
    assert [kill.at for kill in read_kernel_log(str(tmp_path / "d.txt")).kills] == [AT]
    (tmp_path / "d.txt").unlink()
    assert [kill.at for kill in gather([str(tmp_path)]).kills] == [AT]
    # another pod, described alike, was killed in the same second
    (tmp_path / "e.txt").write_text(DESCRIBE.replace("sglang-0", "sglang-1"))
    assert [kill.at for kill in gather([str(tmp_path)]).kills] == [AT, AT]


def test_two_units_and_two_containers_are_killed_in_the_same_second(tmp_path: Path) -> None:
    two = (UNIT + UNIT.replace("s.service", "t.service")).splitlines(keepends=True)
    assert len(read("".join(sorted(two)), tmp_path).kills) == 2
    event = "2026-01-20T09:18:02.5+00:00 container oom {} (image=i, name={})\n"
    assert len(read(event.format("a" * 64, "a") + event.format("b" * 64, "b"), tmp_path).kills) == 2


def test_two_pods_of_an_old_kubectl(tmp_path: Path) -> None:
    old = "Name:\t\tsglang-0\nNamespace:\tdefault\nContainers:\n  sglang:\n    Limits:\n      memory:\t440Gi\n"
    old += "    State:\t\tWaiting\n      Reason:\t\tCrashLoopBackOff\n    Last State:\t\tTerminated\n"
    old += "      Reason:\t\tOOMKilled\n      Exit Code:\t1\n      Finished:\t\tTue, 20 Jan 2026 10:18:02 +0100\n"
    other = old.replace("OOMKilled", "Error").replace("440Gi", "1Gi").replace("sglang-0", "router-0")
    for text in (old + "\n" + other, other + "\n" + old, other + "Volumes:\n" + old):
        log = read(text, tmp_path)
        assert [kill.at for kill in log.kills] == [AT]
        assert log.cgroup_limit_bytes == 440 * GIB


def test_very_long_blanks_are_read_at_once(tmp_path: Path) -> None:
    blank = " " * 300_000
    text = f"{blank}x\n{blank}reason: OOMKilled{blank}x\n" + DESCRIBE
    assert [kill.at for kill in read(text, tmp_path).kills] == [AT]


@pytest.mark.parametrize(
    "text",
    [
        YAML.replace("finishedAt:", "message: 'not ended\n        finishedAt:"),
        YAML.split("\n", 3)[3],
        YAML.replace("spec:", "anchored: &a [1]\nagain: *a\nspec:"),
        YAML.replace("kind: Pod", "deep: " + "[" * 50_000),
        json.dumps(pod(KILLED), indent=4)[:-9],
        json.dumps([inspected(1, memory=9, killed=True)], indent=4)[:-200],
        json.dumps(pod(KILLED), indent=4) + "\n" + "x" * 5_000_000 + "\n",
        "Name:  a\n" + "".join(" " * n + "k:\n" for n in range(2000)) + YAML,
    ],
    ids=["open quote", "no beginning", "alias", "deep", "cut json", "cut docker", "large", "deep description"],
)
def test_a_cut_or_hostile_document_keeps_its_kill(text: str, tmp_path: Path) -> None:
    log = read(text, tmp_path)
    assert len(log.kills) == 1
    assert log.kills[0].reporter in ("Kubernetes", "Docker")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"kind": "Event", "reason": "OOMKilling", "message": "x"}, indent=4),
        json.dumps({"state": {"waiting": {"reason": "OOMKilled"}}}, indent=4),
        json.dumps({"metadata": {"annotations": {"x": '"reason": "OOMKilled"', "y": "reason: OOMKilled"}}}, indent=4),
        "apiVersion: v1\nmetadata:\n  annotations:\n    x: |\n      reason: OOMKilled\n",
    ],
)
def test_a_document_that_only_quotes_a_kill_reports_none(text: str, tmp_path: Path) -> None:
    assert read(text + "\n", tmp_path).kills == ()
