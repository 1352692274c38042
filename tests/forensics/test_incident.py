"""Each cause from lines that show it, in the right order, and nothing where nothing is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache_lab.base.errors import InputError
from hicache_lab.base.resources import data_dir
from hicache_lab.base.units import GB, GIB, KIB, MIB
from hicache_lab.cli import main
from hicache_lab.forensics.incident import RULES, Diagnosis, Facts, diagnose, gather, read_memory
from hicache_lab.forensics.incident.kernel import read_kernel_log
from hicache_lab.forensics.incident.timeline import timeline
from hicache_lab.forensics.incident.watch import CrashSafeFile, process_share, samples
from hicache_lab.preflight import advise, ask, assess

FIXTURES = Path(__file__).parents[1] / "fixtures" / "logs"
SEED = data_dir() / "incidents" / "kimi-k25-hicache-300"
TINY_LLAMA = str(data_dir() / "tiny_models" / "tiny-llama.json")
AT = "[2026-01-02 03:04:{:02d} {}] "


def server(tmp_path: Path, *lines: str, args: str = "tp_size=2, hicache_size=0", name: str = "server.log") -> str:
    path = tmp_path / name
    head = f"[2026-01-02 03:04:00] server_args=ServerArgs(model_path='m', {args}, enable_hierarchical_cache=True)"
    path.write_text("\n".join([head, *lines]) + "\n")
    return str(path)


def pool(rank: str, gb: float, second: int = 5) -> str:
    return AT.format(second, rank) + f"Allocating {gb:.2f} GB host memory for hierarchical KV cache."


def refusal(rank: str, asked: float, free: float, second: int = 6) -> str:
    return (
        AT.format(second, rank) + "Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "memory_pool_host.py", line 1, in __init__\n'
        f"ValueError: Not enough host memory available. Requesting {asked:.2f} GB but only have {free:.2f} GB free. "
        "Please reduce the size of the hierarchical cache."
    )


def found(log: str, **more: object) -> list[tuple[str, str]]:
    return [(f.cause, f.role) for f in result(log, **more).findings]


def result(log: str, **more: object) -> Diagnosis:
    return diagnose(gather([log], **more))  # type: ignore[arg-type]


def test_the_seed_incident() -> None:
    d = result(str(SEED / "server.log"), kernel_logs=[str(SEED / "kernel.log")], memory=[str(SEED / "memory.csv")])
    first = d.first
    assert first is not None
    assert (first.cause, first.role, first.confidence) == ("per_rank_size", "cause", "high")
    assert "8 × 300 GB = 2,400.00 GB" in first.explanation
    lines = {(Path(e.file).name, e.line) for e in first.evidence}
    assert ("server.log", 1) in lines
    assert {("server.log", n) for n in range(75, 83)} <= lines
    assert {("kernel.log", n) for n in (3, 6, 9)} <= lines
    for evidence in first.evidence:
        if evidence.file.endswith(("server.log", "kernel.log")) and evidence.line > 1:
            line = Path(evidence.file).read_text().splitlines()[evidence.line - 1]
            assert line.startswith(evidence.text.split(" Exit code")[0])
    roles = {f.cause: f.role for f in d.findings}
    assert roles["aggregate_overcommit"] == "contributing"
    assert roles["kernel_oom_kill"] == roles["process_died"] == "consequence"


def test_real_two_rank_log_overcommits_and_smaller_one_does_not() -> None:
    log = str(FIXTURES / "0.5.10-guard-tp2-size6-touched.server.log")
    assert found(log) == [("aggregate_overcommit", "cause")]
    series = [str(FIXTURES / "0.5.10-guard-tp2-size6-touched.memory.csv")]
    d = result(log, memory=series, model=TINY_LLAMA)
    assert d.first is not None
    assert (d.first.cause, d.first.confidence) == ("aggregate_overcommit", "high")
    assert d.first.remedy.startswith("--hicache-size 4 (2 ranks take 8.0 GB in all)")
    assert "the bound, with only the 10 GiB reserve left: --hicache-size 5" in d.first.remedy
    assert "every release from 0.5.10 to 0.5.12 that could have printed this log" in d.first.remedy
    # the model's path in the log is not one of the catalogue: no size is named, and the reader learns what to give
    first = result(log, memory=series).first
    assert first is not None
    assert "the shape of the model 'modelsw/tiny-llama' (--model names one" in first.remedy
    assert "all host pools of this host together at most 10.79 GB" in first.remedy
    assert "--hicache-size" not in first.remedy
    assert found(str(FIXTURES / "0.5.10-guard-tp2-size5.server.log")) == []


def test_real_refusals_say_what_their_number_means() -> None:
    d = result(str(FIXTURES / "0.5.23-guard-tp2-size5.server.log"), model=TINY_LLAMA)
    assert d.first is not None
    assert d.first.cause == "guard_refusal"
    assert "one rank's share" in d.first.explanation
    assert "8.70 GB" in d.first.explanation
    # 4 would pass if both ranks look at once; 8.70 / 3 = 2.9 GB pass in whatever order they look
    assert d.first.remedy.startswith("--hicache-size 2 (2 ranks take 4.0 GB in all)")


@pytest.mark.parametrize(
    ("release", "asked", "free", "says"),
    [
        ("0.4.9", 40, 44.87, "not subtracted in it: 34.13 GB could be taken"),
        ("0.5.8", 300, 120, "available memory − 10 GiB, not divided"),
        ("0.5.19", 300, 54, "one rank's share"),
    ],
)
def test_meaning_of_a_refusal_by_release(tmp_path: Path, release: str, asked: float, free: float, says: str) -> None:
    d = result(server(tmp_path, refusal("TP0", asked, free), args="tp_size=8, hicache_size=300"), release=release)
    assert d.first is not None
    assert d.first.cause == "guard_refusal"
    assert says in d.first.explanation


def test_nothing_wrong_lists_what_was_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    log = str(FIXTURES / "0.5.23-llama-tp2-hicache.server.log")
    assert main(["diagnose", log]) == 0
    text = capsys.readouterr().out
    assert text.startswith("no finding")
    assert all(rule.cause in text for rule in RULES)
    assert main(["diagnose", log, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["findings"] == []
    assert out["checked"] == [rule.cause for rule in RULES]
    assert out["recognised_lines"] > 200


def test_unrecognised_input_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nginx.log"
    path.write_text('10.0.0.1 - - [02/Jan/2026:03:04:05 +0000] "GET / HTTP/1.1" 200 612\nkilled by -9\n')
    for command in (["parse", str(path)], ["diagnose", str(path)], ["parse", str(path), "--json"]):
        assert main(command) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "nginx.log" in captured.err
    empty = tmp_path / "empty.log"
    empty.write_text("")
    assert main(["diagnose", str(empty)]) == 1


@pytest.mark.parametrize("code", [-3, -6, 1])
def test_boilerplate_about_oom_is_not_a_kill(tmp_path: Path, code: int) -> None:
    text = (
        f"RuntimeError: Rank 0 scheduler died during initialization (exit code: {code}). If exit code is -9 "
        f"(SIGKILL), a common "
        "cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."
    )
    assert found(server(tmp_path, text)) == [("process_died", "cause")]
    killed = found(server(tmp_path, text.replace(f"code: {code}", "code: -9"), name="b.log"))
    assert killed == [("kernel_oom_kill", "cause")]


def test_number_of_a_kill_may_be_137(tmp_path: Path) -> None:
    line = (
        AT.format(9, "TP0")
        + "Subprocess scheduler_3 (pid=4242) crashed with exit code 137. Triggering SIGQUIT for cleanup..."
    )
    assert ("kernel_oom_kill", "cause") in found(server(tmp_path, line))


def test_staggered_refusal_wins_over_the_refusal(tmp_path: Path) -> None:
    log = server(tmp_path, pool("TP0", 48), refusal("TP1", 48, 42.28), args="tp_size=8, hicache_size=48")
    causes = found(log)
    assert causes[0] == ("staggered_refusal", "cause")
    assert ("guard_refusal", "consequence") in causes


def test_side_pool_refused_on_top_of_the_flag(tmp_path: Path) -> None:
    side = (
        AT.format(6, "TP0") + "Scheduler hit an exception: Traceback (most recent call last):\n"
        "ValueError: Not enough host memory for DSA indexer hierarchical cache. Requesting 34.38 GB but only have "
        "20.00 GB free."
    )
    log = server(tmp_path, pool("TP0", 150), side, args="tp_size=1, hicache_size=150")
    assert found(log) == [("side_pools", "cause"), ("guard_refusal", "contributing")]
    first = result(log).first
    assert first is not None
    assert "150.00 GB of KV pools and then 34.38 GB of dsa_indexer, which the check refused" in first.explanation
    assert "the shape of the model 'm'" in first.remedy
    # what the rank held by then, 150 GB and 10 GB free, was there for its pools; the indexer is counted
    asked = ask("deepseek-v3.2", "0.5.14", tp_size=1, page_size=64, hicache_size=150, available="170.73GB")
    indexer = assess(asked).ranks[0].pools[1].requested_bytes
    side = side.replace("34.38", f"{indexer / GB:.2f}").replace("20.00 GB", "10.00 GB")
    log = server(tmp_path, pool("TP0", 150), side, args="tp_size=1, page_size=64, hicache_size=150", name="b.log")
    first = result(log, release="0.5.14", model="deepseek-v3.2").first
    assert first is not None
    comfortable, bound = advise(asked).size_gb, advise(asked, accepted=("FITS", "TIGHT")).size_gb
    assert comfortable is not None
    assert bound == int(160 / (1 + indexer / (150 * GB)))
    assert first.remedy.startswith(f"--hicache-size {comfortable} (")
    assert f"the bound, with only the 10 GiB reserve left: --hicache-size {bound}" in first.remedy
    # another model keeps no indexer: what the log shows is not explained, and no size is named
    first = result(log, release="0.5.14", model="deepseek-v3").first
    assert first is not None
    assert f"what explains the {150 + indexer / GB:.2f} GB of host pools that one rank asked for" in first.remedy


def test_pools_larger_than_the_whole_host_need_no_series(tmp_path: Path) -> None:
    dead = "[2026-01-02 03:04:20] Rank 3 scheduler is dead. Exit code: -9"
    log = server(tmp_path, *(pool(f"TP{n}", 65.9) for n in range(4)), dead, args="tp_size=4, hicache_size=0")
    first = result(log, host_ram_bytes=256 * GB).first
    assert first is not None
    assert (first.cause, first.confidence) == ("aggregate_overcommit", "high")
    assert "263.60 GB (245.50 GiB); there are 256.00 GB (stated) in all" in first.explanation
    # on a larger host they are not the reason, and the reader is told where to look
    first = result(log, host_ram_bytes=1000 * GB).first
    assert first is not None
    assert first.cause == "kernel_oom_kill"
    assert "The host pools alone (263.60 GB) fit 1,000.00 GB (stated)" in first.explanation


def test_a_statement_right_behind_an_exception_is_not_swallowed(tmp_path: Path) -> None:
    oom = (
        AT.format(6, "TP1") + "Scheduler hit an exception: Traceback (most recent call last):\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    nccl = (
        "[rank0]:[E102 03:14:05.678 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    )
    assert found(server(tmp_path, oom, nccl)) == [("gpu_oom", "cause"), ("collective_timeout", "consequence")]


def test_side_pools_decide_where_the_flag_alone_fits(tmp_path: Path) -> None:
    lines = []
    for rank in ("TP0", "TP1", "TP2", "TP3"):
        lines.append(pool(rank, 150))
        lines.append(AT.format(6, rank) + "Allocating 34.38 GB host memory for DSA indexer (layout=page_first).")
    ready = "[2026-01-02 03:04:09] The server is fired up and ready to roll!"
    log = server(tmp_path, *lines, ready, args="tp_size=4, hicache_size=150")
    d = result(log, available_bytes=700 * GB, host_ram_bytes=750 * GB)
    assert d.first is not None
    assert d.first.cause == "side_pools"
    assert found(log, available_bytes=800 * GB, host_ram_bytes=850 * GB) == []


def test_power_of_two_rounding_of_old_releases(tmp_path: Path) -> None:
    lines = [pool(f"TP{rank}", 40) for rank in range(4)]
    dead = (
        "[2026-01-02 03:04:09] Rank 0 scheduler is dead. Please check if there are relevant logs.\n[2026-01-02 "
        "03:04:09] Exit code: -9"
    )
    log = server(tmp_path, *lines, dead, args="tp_size=4, hicache_size=40")
    d = result(log, host_ram_bytes=256 * GB, available_bytes=250 * GB, release="0.5.3")
    causes = {f.cause: f for f in d.findings}
    assert "64.00 GiB" in causes["power_of_two_rounding"].explanation
    later = result(log, host_ram_bytes=256 * GB, available_bytes=250 * GB, release="0.5.8")
    assert "power_of_two_rounding" not in {f.cause for f in later.findings}


KERNEL_CGROUP = "".join(
    f"Jan 02 03:04:07 node kernel: {line}\n"
    for line in (
        "sglang::schedul invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=984",
        "memory: usage 209715200kB, limit 209715200kB, failcnt 91",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/kubepods/pod1,"
        "task_memcg=/kubepods/pod1,task=sglang::schedul,pid=77,uid=0",
        "Memory cgroup out of memory: Killed process 77 (sglang::schedul) total-vm:10kB, anon-rss:100000kB, "
        "file-rss:0kB, shmem-rss:50000kB, UID:0",
    )
)


def test_container_limit_from_the_kernel(tmp_path: Path) -> None:
    kernel = tmp_path / "journal.txt"
    kernel.write_text(KERNEL_CGROUP)
    read = read_kernel_log(str(kernel), year=2026)
    assert (read.cgroup_limit_bytes, read.cgroup, len(read.kills)) == (200 * GIB, "/kubepods/pod1", 1)
    assert read.kills[0].at is not None
    assert read.kills[0].resident_bytes == 150000 * KIB
    log = server(tmp_path, pool("TP0", 150), pool("TP1", 150), args="tp_size=2, hicache_ratio=2.0")
    d = result(log, kernel_logs=[str(kernel)], host_ram_bytes=1000 * GB)
    assert d.first is not None
    assert (d.first.cause, d.first.role) == ("container_limit", "cause")
    assert {f.cause: f.role for f in d.findings}["kernel_oom_kill"] == "consequence"


CGROUP_KILL = (
    "Jan 02 {time} node1 kernel: [12345.678901] Memory cgroup out of memory: Killed process 999 ({comm}) "
    "total-vm:8000000kB, anon-rss:4000000kB, file-rss:0kB, shmem-rss:0kB\n"
)


def test_a_foreign_container_killed_meanwhile_is_no_cause(tmp_path: Path) -> None:
    log = server(
        tmp_path, pool("TP0", 30), pool("TP1", 30), AT.format(20, "TP0") + "The server is fired up and ready to roll!"
    )
    kernel = tmp_path / "kern.log"
    kernel.write_text(CGROUP_KILL.format(time="03:04:10", comm="java"))
    assert found(log, kernel_logs=[str(kernel)]) == []
    kernel.write_text(CGROUP_KILL.format(time="03:04:10", comm="sglang::schedul"))
    assert found(log, kernel_logs=[str(kernel)])[0] == ("container_limit", "cause")


FREE = (
    "               total        used        free      shared  buff/cache   available\n"
    "Mem:          428199       22000      380000         100       26199      385284\n"
)


def test_a_folder_and_a_heap_of_files_are_sorted_by_their_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"server.log": "server.log", "kernel.log": "what-the-kernel-said.txt", "memory.csv": "numbers.txt"}
    for name, copy in names.items():
        (tmp_path / copy).write_bytes((SEED / name).read_bytes())
    (tmp_path / "notes.md").write_text("Allocating 300.00 GB host memory for hierarchical KV cache.\n")
    expected = [(f.cause, f.role, f.confidence) for f in diagnose(_seed_facts()).findings]
    assert [(f.cause, f.role, f.confidence) for f in result(str(tmp_path)).findings] == expected
    heap = diagnose(gather([str(tmp_path / copy) for copy in reversed(names.values())]))
    assert [(f.cause, f.role, f.confidence) for f in heap.findings] == expected
    assert {f.run for f in heap.findings} == {1}
    assert main(["parse", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "run 2" not in captured.out
    assert "what-the-kernel-said.txt: a kernel log or memory series, left out" in captured.err
    (tmp_path / "numbers.txt").write_text(FREE)
    first = result(str(tmp_path)).first
    assert first is not None
    assert "there are 449.00 GB (memory samples)" in first.explanation
    # the wording leaves releases that take a power of two for each pool
    assert first.remedy.startswith("--hicache-size 34 (8 ranks take 274.9 GB in all)")
    assert "assumed: all RAM was available (--available states what was)" in first.remedy


def test_a_server_log_in_a_folder_needs_no_name(tmp_path: Path) -> None:
    (tmp_path / "stdout").write_bytes((SEED / "server.log").read_bytes())
    (tmp_path / "core.4123").write_bytes(bytes(range(256)) * 99)
    assert found(str(tmp_path), host_ram_bytes=449 * GB)[0] == ("per_rank_size", "cause")


def _seed_facts() -> Facts:
    return gather([str(SEED / "server.log")], kernel_logs=[str(SEED / "kernel.log")], memory=[str(SEED / "memory.csv")])


def test_a_journal_of_the_whole_machine_is_a_server_log_too(tmp_path: Path) -> None:
    journal = tmp_path / "journal.txt"
    kernel = "Jan 02 03:04:{:02d} node1 kernel: [{}.000000] usb 1-1: new device\n"
    lines = [pool("TP0", 300), pool("TP1", 300)]
    kill = CGROUP_KILL.format(time="03:04:30", comm="sglang::schedul").replace("Memory cgroup out", "Out")
    journal.write_text(
        "".join(kernel.format(n % 60, n) for n in range(2000))
        + "".join(f"Jan 02 03:04:05 node1 python3[17]: {line}\n" for line in lines)
        + kill
    )
    assert found(str(journal), host_ram_bytes=449 * GB)[0] == ("per_rank_size", "cause")


@pytest.mark.parametrize("uid", ["", ", UID 0,"])
def test_kill_of_an_old_kernel_takes_its_sizes_from_the_next_line(uid: str, tmp_path: Path) -> None:
    path = tmp_path / "dmesg.txt"
    path.write_text(
        "[12345.678904] Out of memory: Kill process 4123 (python3) score 905 or sacrifice child\n"
        f"[12345.678905] Killed process 4123{uid} (python3) total-vm:9kB, anon-rss:53kB, file-rss:4kB, shmem-rss:1kB\n"
    )
    (kill,) = read_kernel_log(str(path)).kills
    assert (kill.pid, kill.comm, kill.resident_bytes, kill.where.line) == (4123, "python3", 58 * KIB, 1)


def test_a_kernel_log_that_is_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nginx.log"
    path.write_text('10.0.0.1 - - [02/Jan/2026:03:04:05 +0000] "GET / HTTP/1.1" 200 612\n')
    assert read_kernel_log(str(path)).kills == ()
    assert "no line of it looks like the kernel's" in capsys.readouterr().err
    path.write_text("Jan 20 09:17:50 gpu1 kernel: usb 1-1: new device\n")
    read_kernel_log(str(path))
    path.write_text("")
    read_kernel_log(str(path))
    assert capsys.readouterr().err == ""


def test_kernel_clock_in_another_zone(tmp_path: Path) -> None:
    log = server(tmp_path, pool("TP0", 300), pool("TP1", 300), args="tp_size=2, hicache_size=300")
    kernel = tmp_path / "kern.log"
    line = "[Fri Jan  2 {time} 2026] Out of memory: Killed process 4123 ({comm}) total-vm:1kB, anon-rss:9000000kB\n"
    kernel.write_text(line.format(time="12:04:30", comm="sglang::schedul"))
    facts = gather([log], kernel_logs=[str(kernel)])
    first, second, *_ = diagnose(facts).findings
    assert (first.cause, second.cause, second.confidence) == ("per_rank_size", "kernel_oom_kill", "medium")
    assert "9 h after the end of the server log" in second.explanation
    (kill,) = [moment for moment in timeline(facts) if moment.source == "kernel"]
    assert f"{kill.at:%H:%M:%S}" == "03:04:30"
    assert "its clock says 12:04:30" in kill.what
    # a clock that no zone explains is said, not dropped; another machine's database is neither
    kernel.write_text(line.format(time="12:17:30", comm="sglang::schedul"))
    (distant,) = [f for f in result(log, kernel_logs=[str(kernel)]).findings if f.cause == "kernel_oom_kill"]
    assert (distant.weight, distant.confidence) == ("note", "low")
    assert "2026-01-02 12:17:30" in distant.explanation
    kernel.write_text(line.format(time="12:04:30", comm="mysqld"))
    assert ("kernel_oom_kill", "cause") not in found(log, kernel_logs=[str(kernel)])


def test_undated_kill_belongs_to_the_launch_that_was_killed(tmp_path: Path) -> None:
    dead = [pool("TP0", 300), pool("TP1", 300), AT.format(9, "").rstrip() + " Rank 0 scheduler is dead. Exit code: -9"]
    one = Path(server(tmp_path, *dead, args="tp_size=2, hicache_size=300", name="a.log")).read_text()
    two = Path(server(tmp_path, pool("TP0", 30), pool("TP1", 30), args="tp_size=2, hicache_size=30", name="b.log"))
    log = tmp_path / "both.log"
    log.write_text(
        one
        + two.read_text().replace("03:04", "03:14")
        + "[2026-01-02 03:15:00] The server is fired up and ready to roll!\n"
    )
    kernel = tmp_path / "dmesg.txt"
    kernel.write_text(
        "[12345.678901] Out of memory: Killed process 4123 (sglang::schedul) total-vm:1kB, anon-rss:9kB\n"
    )
    findings = result(str(log), kernel_logs=[str(kernel)], host_ram_bytes=449 * GB).findings
    assert findings[0].cause == "per_rank_size"
    assert {finding.run for finding in findings} == {1}


def test_a_request_that_fails_is_not_a_server_that_fails(tmp_path: Path) -> None:
    error = (
        "[2026-01-02 03:05:00] Exception in ASGI application\nTraceback (most recent call last):\nValueError: too long"
    )
    ready = "[2026-01-02 03:04:30] The server is fired up and ready to roll!"
    after = "[2026-01-02 03:06:00 TP0] Decode batch, #running-req: 8, #token: 500, token usage: 0.43"
    (finding,) = result(server(tmp_path, ready, error, after)).findings
    assert (finding.cause, finding.weight, finding.confidence) == ("unclassified_exception", "note", "low")
    assert "it went on serving" in finding.explanation
    quit_line = "[2026-01-02 03:06:01] Received sigquit from a child process. It usually means the child failed."
    first = result(server(tmp_path, ready, error, after, quit_line)).first
    assert first is not None
    assert (first.cause, first.weight) == ("unclassified_exception", "failure")


def test_per_rank_size_is_suspected_where_a_launch_died_and_nothing_else_says_why(tmp_path: Path) -> None:
    pools = [pool("TP0", 300), pool("TP1", 300)]
    quit_line = "[2026-01-02 03:04:09] Received sigquit from a child process. It usually means the child failed."
    args = "tp_size=2, hicache_size=300"
    first = result(server(tmp_path, *pools, quit_line, args=args)).first
    assert first is not None
    assert (first.cause, first.confidence) == ("per_rank_size", "low")
    # a log that merely ends there may be the head of a healthy one
    (only,) = result(server(tmp_path, *pools, args=args)).findings
    assert (only.cause, only.confidence) == ("stopped_during_allocation", "low")
    assert "2 × 300 GB: the flag is per rank" in only.explanation


def test_hugepages_hide_memory(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo.txt"
    memory.write_text(
        f"2026-01-02 03:04:01\nMemTotal:       {1772 * MIB} kB\nMemFree:        {120 * MIB} kB\nMemAvailable:   "
        f"{110 * MIB} kB\n"
        "HugePages_Total:    1582\nHugePages_Free:     1582\nHugepagesize:    1048576 kB\n"
    )
    (sample,) = read_memory(str(memory))
    assert sample.hugepages_free_bytes == 1582 * GIB
    log = server(tmp_path, refusal("TP0", 176.71, 105.82), args="tp_size=8, hicache_size=0")
    d = result(log, memory=[str(memory)], release="0.5.18")
    assert d.first is not None
    assert (d.first.cause, d.first.confidence) == ("hugepages", "high")


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["RuntimeError: cudaHostRegister failed (rc=1, invalid argument) for ptr=0x7f size=34760392704; host "
        "buffer is not pinned"], "pinning_failure"),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 616.00 MiB. GPU 0 has a total capacity of "
        "94.97 GiB of which 300.00 MiB is free."], "gpu_oom"),
        (["AssertionError: The host memory should be larger than the device memory with the current protocol"],
         "host_smaller_than_device"),
        ([AT.format(5, "TP0") + "HiCache kv host pool (50048 tokens) is smaller than the device pool (116032 "
        "tokens);L2 cache effectiveness is reduced."], "host_smaller_than_device"),
        ([AT.format(5, "TP0") + "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: "
        "2187, #new_token_ratio: 0.0980 -> 0.2747"], "kv_pool_full"),
        ([AT.format(5, "TP0") + "Page first layout is not compatible, switching to page_first_direct layout for "
        "direct io backend"], "settings_rewritten"),
        ([AT.format(5, "TP0") + "Watchdog timeout (self.watchdog_timeout=300)"], "watchdog"),
        (["[rank3]:[E102 03:04:05.678901234 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=120, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran "
        "for 600060 milliseconds"], "collective_timeout"),
        ([AT.format(5, "TP0") + "load_back: FAILED to load 512 tokens for node 42 even after eviction "
        "(evictable_size=0)"], "host_pool_pressure"),
        ([AT.format(5, "TP0") + "Write page to storage: 16 pages failed."], "storage_failure"),
        ([AT.format(5, "TP0") + "Scheduler hit an exception: Traceback (most recent call last):", "KeyError: 'x'"],
         "unclassified_exception"),
    ],
)  # fmt: skip
def test_single_causes(tmp_path: Path, lines: list[str], cause: str) -> None:
    assert found(server(tmp_path, *lines)) == [(cause, "cause")]


def test_consequences_come_after_their_cause(tmp_path: Path) -> None:
    log = server(
        tmp_path,
        "[2026-01-02 03:04:07] Received sigquit from a child process. It usually means the child failed.",
        AT.format(5, "TP1") + "Scheduler hit an exception: Traceback (most recent call last):",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 616.00 MiB.",
        AT.format(50, "TP0") + "Watchdog timeout (self.watchdog_timeout=300)",
    )
    assert found(log) == [("gpu_oom", "cause"), ("process_died", "consequence"), ("watchdog", "consequence")]


def test_low_reuse_needs_more_tokens_than_the_tiers(tmp_path: Path) -> None:
    prefill = (
        "Prefill batch, #new-seq: 1, #new-token: {}, #cached-token: {}, token usage: 0.50, #running-req: 1, "
        "#queue-req: 0"
    )
    head = [
        AT.format(1, "TP0") + "max_total_num_tokens=1000, context_len=4096, available_gpu_mem=6.10 GB",
        pool("TP0", 1),
    ]
    cold = [AT.format(10, "TP0") + prefill.format(500, 5) for _ in range(60)]
    warm = [AT.format(10, "TP0") + prefill.format(500, 500) for _ in range(60)]
    assert found(server(tmp_path, *head, *cold, args="tp_size=1")) == [("low_reuse", "cause")]
    assert found(server(tmp_path, *head, *warm, args="tp_size=1", name="warm.log")) == []


def test_log_that_stops_while_allocating(tmp_path: Path) -> None:
    log = server(tmp_path, pool("TP0", 300), pool("TP1", 300), args="tp_size=2, hicache_size=300")
    d = result(log)
    assert [(f.cause, f.confidence) for f in d.findings] == [("stopped_during_allocation", "low")]
    with_ram = result(log, host_ram_bytes=449 * GB, available_bytes=445 * GB)
    assert with_ram.first is not None
    assert (with_ram.first.cause, with_ram.first.confidence) == ("per_rank_size", "medium")


def test_projection_when_ranks_are_missing(tmp_path: Path) -> None:
    log = server(tmp_path, pool("TP0", 300), args="tp_size=8, hicache_size=300")
    d = result(log, host_ram_bytes=449 * GB, available_bytes=445 * GB)
    assert d.first is not None
    assert "8 × 300 GB" in d.first.explanation


MEMORY_FORMS = {
    "free": "               total        used        free      shared  buff/cache   available\n"
    "Mem:          428199      418000        8583        1000        2000        8583\nSwap: 0 0 0\n",
    "free_h": "               total        used        free      shared  buff/cache   available\n"
    "Mem:           418Gi       408Gi       8.4Gi       1.0Gi       2.0Gi       8.4Gi\n",
    "vmstat": "procs -----------memory---------- ---swap-- -----io---- -system-- ------cpu-----\n"
    " r  b   swpd   free   buff  cache   si   so    bi    bo   in   cs us sy id wa st\n"
    " 1  0      0 8789062   1000   2000    0    0     0     0    0    0  0  0 100  0  0\n",
    "node": "# TYPE node_memory_MemTotal_bytes gauge\nnode_memory_MemTotal_bytes 4.49e+11 1767323045000\n"
    "node_memory_MemAvailable_bytes 9e+09 1767323045000\nnode_memory_MemTotal_bytes 4.49e+11 1767323047000\n"
    "node_memory_MemAvailable_bytes 8e+09 1767323047000\n",
    "csv": "Time, Mem total GB, available_gib\n2026-01-02T03:04:05Z, 449, 8.4\n",
    "meminfo": "MemTotal:  438476562 kB\nMemFree: 1 kB\nMemAvailable: 8789062 kB\nMemTotal:  438476562 "
    "kB\nMemAvailable: 8789062 kB\n",
}


@pytest.mark.parametrize("form", MEMORY_FORMS)
def test_memory_forms(form: str, tmp_path: Path) -> None:
    path = tmp_path / form
    path.write_text(MEMORY_FORMS[form])
    read = read_memory(str(path))
    assert len(read) == (2 if form in ("node", "meminfo") else 1)
    for sample in read:
        assert sample.left_bytes == pytest.approx(9 * GB, rel=0.13)
        if form != "vmstat":
            assert sample.total_bytes == pytest.approx(449 * GB, rel=0.01)
    if form == "node":
        assert [s.at.second for s in read if s.at] == [5, 7]


VMSTAT = " r  b   swpd   free   buff  cache   si   so\n 1  0      0 {} {} {}    0    0\n 1  0      0 {} 1 1    0    0\n"


def test_unit_of_vmstat_is_told_by_what_was_ever_free(tmp_path: Path) -> None:
    path = tmp_path / "vmstat.txt"
    path.write_text(VMSTAT.format(389120000, 1024, 26827776, 5120000))
    assert [s.free_bytes for s in read_memory(str(path))] == [389120000 * KIB, 5120000 * KIB]
    path.write_text(VMSTAT.format(380000, 1, 26199, 5000))
    assert [s.free_bytes for s in read_memory(str(path))] == [380000 * MIB, 5000 * MIB]


def test_damaged_numbers_in_a_memory_series_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "series"
    path.write_text("time;total_bytes;available_bytes\n2026-01-20 09:14:01;inf;nan\n2026-01-20 09:14:02;449;1e9x\n")
    (sample,) = read_memory(str(path))
    assert (sample.total_bytes, sample.available_bytes) == (449, None)
    held = [{"pid": None, "rss_bytes": 6}, {"pid": 7, "rss_bytes": 5, "pss_bytes": "x"}, 3]
    path.write_text(
        json.dumps({"total_bytes": 449, "processes": held}) + "\n" + json.dumps({"total_bytes": 1, "processes": 3})
    )
    samples_read = read_memory(str(path))
    assert [[(p.pid, p.rss_bytes, p.pss_bytes) for p in s.processes] for s in samples_read] == [[(7, 5, None)], []]
    path.write_text("node_memory_MemTotal_bytes 1e\nnode_memory_MemAvailable_bytes 4e9\n")
    assert read_memory(str(path))[0].available_bytes == 4 * GB


def test_unknown_memory_form_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("hello\n1,2,3\n")
    with pytest.raises(InputError, match="known forms"):
        read_memory(str(path))


def test_watch_file_survives_a_torn_line_and_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    import os

    for _ in range(2):
        file = CrashSafeFile(path)
        for sample in samples(0.01, pids=[os.getpid()], count=2, sleep=lambda _s: None):
            file.write(sample)
        file.close()
        with path.open("a") as torn:
            torn.write('{"schema":"hicache-lab/wa')
    read = read_memory(str(path))
    assert len(read) == 4
    assert read[0].total_bytes
    assert read[0].processes[0].pid == os.getpid()
    assert read[0].processes[0].rss_bytes > MIB
    assert process_share(2**22 + 1) is None


def test_watch_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "w.jsonl"
    assert main(["watch", "--output", str(out), "--interval", "0.01", "--samples", "2"]) == 0
    assert len(read_memory(str(out))) == 2
    assert main(["watch", "--output", str(out), "--interval", "0"]) == 2
    assert main(["watch", "--output", str(out), "--pid", "4194305"]) == 2
    capsys.readouterr()


def test_timeline_of_the_seed_is_in_order() -> None:
    facts = gather(
        [str(SEED / "server.log")], kernel_logs=[str(SEED / "kernel.log")], memory=[str(SEED / "memory.csv")]
    )
    moments = timeline(facts)
    timed = [m.at for m in moments if m.at is not None]
    assert timed == sorted(timed)
    words = [m.what for m in moments]
    assert any("8 rank(s) ask for host pools, 2,400.00 GB" in w for w in words)
    assert sum(w.startswith("the kernel kills pid 41") for w in words) == 3
    assert any(w.startswith("least memory left: 9.00 GB") for w in words)


def test_terminal_escapes_in_a_log_are_shown_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = server(
        tmp_path,
        AT.format(5, "TP0") + "Scheduler hit an exception: Traceback (most recent call last):",
        "KeyError: '\x1b]0;owned\x07\x9b2J'",
    )
    assert main(["diagnose", log]) == 3
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x9b" not in out


def test_a_crash_loop_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = (FIXTURES / "0.5.23-guard-tp2-size5.server.log").read_text()
    (tmp_path / "loop.log").write_text(one * 20)
    assert main(["diagnose", str(tmp_path / "loop.log"), "--json"]) == 3
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 40
    assert main(["diagnose", str(tmp_path / "loop.log")]) == 3
    text = capsys.readouterr().out
    assert text.count("guard_refusal  [cause") == 1
    assert "run 1, and in 19 more: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 …" in text


def test_a_release_that_was_not_examined_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    log = str(FIXTURES / "0.5.23-guard-tp2-size5.server.log")
    assert main(["diagnose", log, "--sglang-version", "0.9.9", "--json"]) == 3
    captured = capsys.readouterr()
    assert "0.9.9" in captured.err
    assert json.loads(captured.out)["warning"] == captured.err.strip()
    assert main(["diagnose", log, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["warning"] is None
