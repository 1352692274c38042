import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.base.units import GB, GIB, KIB, MIB
from hicache_lab.host import (
    CgroupLevel,
    CgroupMemory,
    HostMemory,
    memory_cgroup_headroom,
    read_cgroup,
    read_host,
    read_meminfo,
)

BASELINE = Path(__file__).parents[1] / "baselines" / "cgroup_headroom.jsonl"
RECORDS = [json.loads(line) for line in BASELINE.read_text().splitlines()]
V1_UNLIMITED = 9223372036854771712
MEMINFO = """MemTotal:       438476562 kB
MemFree:        100000000 kB
MemAvailable:   434570312 kB
Buffers:            20000 kB
Cached:         300000000 kB
Active(file):     4000000 kB
Inactive(file): 296000000 kB
SReclaimable:     1000000 kB
Shmem:            2000000 kB
SwapTotal:        8000000 kB
SwapFree:         7000000 kB
HugePages_Total:      100
HugePages_Free:        40
HugePages_Rsvd:         0
Hugepagesize:        2048 kB
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cgroup_tree(root: Path, version: int, levels: list[dict[str, str]]) -> Path:
    """A /proc with one memory hierarchy whose groups are l1, l2, … below the mount."""
    mount = directory = root / "cg"
    membership = ""
    mount.mkdir()
    for number, files in enumerate(levels):
        if number:
            membership += f"/l{number}"
            directory = directory / f"l{number}"
            directory.mkdir()
        for name, text in files.items():
            write(directory / name, text)
    own = membership or "/"
    kind, entry = ("cgroup2", f"0::{own}\n") if version == 2 else ("cgroup", f"4:memory:{own}\n3:cpu:/\n")
    write(root / "proc/self/cgroup", entry)
    write(
        root / "proc/self/mountinfo",
        f"30 23 0:26 / {mount} rw - {kind} {kind} rw{',memory' * (version == 1)}\n",
    )
    return root / "proc"


def v2(limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    stat = f"anon 1\nactive_file {cache // 2}\ninactive_file {cache - cache // 2}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": stat}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", MEMINFO)
    return tmp_path


def read(root: Path) -> HostMemory:
    return read_host(proc_root=root / "proc", sys_root=root / "sys")


# the recorded walks of the releases themselves


@pytest.mark.parametrize("record", RECORDS, ids=[f"{r['release']}-{r['case_id']}" for r in RECORDS])
def test_headroom_equals_what_the_release_computed(record: dict, tmp_path: Path) -> None:
    proc = cgroup_tree(tmp_path, record["cgroup"]["version"], record["cgroup"]["levels"])
    assert record["outcome"] == "ok"
    credited = record["release"] != "0.5.21"
    assert memory_cgroup_headroom(proc, credit_page_cache=credited) == record["headroom"]


def test_a_group_outside_every_mount_is_the_releases_own_error(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/gone\n")
    write(tmp_path / "proc/self/mountinfo", f"30 23 0:26 / {tmp_path / 'cg'} rw - cgroup2 cgroup2 rw\n")
    with pytest.raises(HostError) as caught:
        memory_cgroup_headroom(tmp_path / "proc", credit_page_cache=True)
    assert str(caught.value) == "Cannot locate the process memory cgroup in mounted cgroup filesystems"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_group_above_its_namespace_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/../other\n")
    write(tmp_path / "proc/self/mountinfo", f"30 23 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    with pytest.raises(HostError, match=r"Cannot resolve cgroup memory path: /\.\./other") as caught:
        memory_cgroup_headroom(tmp_path / "proc", credit_page_cache=False)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_limit_without_a_readable_usage_never_passes_for_no_limit(tmp_path: Path) -> None:
    proc = cgroup_tree(tmp_path, 2, [{}, {"memory.max": "1000\n"}])
    with pytest.raises(HostError, match=r"memory\.current") as caught:
        memory_cgroup_headroom(proc, credit_page_cache=False)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_without_procfs_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_cgroup_headroom(tmp_path, credit_page_cache=True) is None


def test_a_cgroup_namespace_counts_from_its_own_root(tmp_path: Path) -> None:
    write(tmp_path / "cg/memory.max", "500\n")
    write(tmp_path / "cg/memory.current", "100\n")
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    line = f"30 23 0:26 /kubepods/pod1 {tmp_path}/cg rw - cgroup2 cgroup2 rw\n"
    write(tmp_path / "proc/self/mountinfo", line)
    assert memory_cgroup_headroom(tmp_path / "proc", credit_page_cache=False) == 400


def test_mount_points_with_blanks_are_unescaped(tmp_path: Path) -> None:
    root = tmp_path / "with blank"
    root.mkdir()
    proc = cgroup_tree(root, 2, [{}, v2("1000", 250)])
    mountinfo = proc / "self/mountinfo"
    mountinfo.write_text(mountinfo.read_text().replace("with blank", r"with\040blank"))
    assert memory_cgroup_headroom(proc, credit_page_cache=True) == 750


# properties of levels


level = st.builds(
    CgroupLevel,
    st.just("/g"),
    st.just("memory.max"),
    st.integers(0, 10**13),
    st.integers(0, 10**13),
    st.integers(0, 10**13),
)


@given(st.lists(level, min_size=1, max_size=4))
def test_crediting_cache_never_lowers_the_headroom_and_more_groups_never_raise_it(
    levels: list[CgroupLevel],
) -> None:
    group = CgroupMemory(tuple(levels))
    without, credited = (group.headroom_bytes(credit_page_cache=c) for c in (False, True))
    assert without is not None and credited is not None
    assert 0 <= without <= credited
    shorter = CgroupMemory(tuple(levels[1:])).headroom_bytes(credit_page_cache=True)
    assert shorter is None or credited <= shorter


# whole hosts


def test_bare_metal(host: Path) -> None:
    facts = read(host)
    assert facts.total_bytes == 438476562 * KIB
    assert facts.available_bytes == 434570312 * KIB
    assert facts.notes == ()
    assert facts.cgroup is None
    assert facts.effective_available_bytes == facts.available_bytes
    assert facts.hugepages_reserved_bytes == 200 * MIB
    assert facts.hugepages_free_bytes == 80 * MIB
    assert facts.swap_used_bytes == 1000000 * KIB
    assert facts.source.startswith("measured")


def test_v1_container(host: Path) -> None:
    stat = "cache 1\ntotal_active_file 1000000000\ntotal_inactive_file 2000000000\n"
    files = {
        "memory.limit_in_bytes": f"{100 * GB}\n",
        "memory.usage_in_bytes": f"{30 * GB}\n",
        "memory.stat": stat,
    }
    top = {
        "memory.limit_in_bytes": f"{V1_UNLIMITED}\n",
        "memory.usage_in_bytes": f"{31 * GB}\n",
        "memory.stat": stat,
    }
    cgroup_tree(host, 1, [top, files])
    facts = read(host)
    assert facts.cgroup is not None
    assert (facts.cgroup.limit_bytes, facts.cgroup.usage_bytes) == (100 * GB, 30 * GB)
    binding = facts.cgroup.binding_level(credit_page_cache=False)
    assert binding == CgroupLevel(f"{host}/cg/l1", "memory.limit_in_bytes", 100 * GB, 30 * GB, 3 * GB)
    assert facts.container_headroom_bytes(credit_page_cache=False) == 70 * GB
    assert facts.effective_available_bytes == 73 * GB
    assert facts.effective_total_bytes == 100 * GB


def test_v1_without_a_limit_is_not_a_limit_of_nine_exabytes(host: Path) -> None:
    stat = "total_active_file 0\ntotal_inactive_file 0\n"
    files = {
        "memory.limit_in_bytes": f"{V1_UNLIMITED}\n",
        "memory.usage_in_bytes": "5\n",
        "memory.stat": stat,
    }
    cgroup_tree(host, 1, [files])
    facts = read(host)
    assert facts.cgroup is not None
    assert facts.cgroup.limit_bytes is None and facts.cgroup.binding_level(credit_page_cache=False) is None
    assert facts.container_headroom_bytes(credit_page_cache=True) is None
    assert facts.effective_available_bytes == facts.available_bytes


def test_v2_nested_the_pod_binds_although_the_container_has_room(host: Path) -> None:
    cgroup_tree(host, 2, [{}, v2(f"{50 * GB}", 30 * GB), v2(f"{100 * GB}", 10 * GB)])
    facts = read(host)
    assert facts.cgroup is not None
    binding = facts.cgroup.binding_level(credit_page_cache=False)
    assert binding is not None
    assert (binding.path, binding.limit_file) == (f"{host}/cg/l1", "memory.max")
    assert facts.container_headroom_bytes(credit_page_cache=True) == 20 * GB


def test_hybrid_takes_the_hierarchy_with_the_memory_controller(host: Path) -> None:
    stat = "total_active_file 0\ntotal_inactive_file 0\n"
    limit = {"memory.limit_in_bytes": "1000\n", "memory.usage_in_bytes": "400\n", "memory.stat": stat}
    for name, text in limit.items():
        write(host / "sys/fs/cgroup/memory/job" / name, text)
    (host / "sys/fs/cgroup/unified/job").mkdir(parents=True)
    write(host / "proc/self/cgroup", "4:memory:/job\n3:cpu,cpuacct:/\n0::/job\n")
    mounts = (
        "34 30 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "35 30 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "36 30 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    write(host / "proc/self/mountinfo", mounts)
    facts = read(host)
    assert facts.cgroup is not None
    assert [level.limit_file for level in facts.cgroup.levels] == ["memory.limit_in_bytes"]
    assert facts.cgroup.limit_bytes == 1000
    assert facts.effective_available_bytes == 600


def test_an_unreadable_group_is_said_and_not_taken_for_no_limit(host: Path) -> None:
    cgroup_tree(host, 2, [{}, {"memory.max": "1000\n"}])
    facts = read(host)
    assert facts.cgroup is None
    assert any("container limit is not known" in note for note in facts.notes)


def test_huge_pages_of_every_size_count(host: Path) -> None:
    for size, total, free in ((2048, 100, 40), (1048576, 800, 800)):
        folder = host / f"sys/kernel/mm/hugepages/hugepages-{size}kB"
        write(folder / "nr_hugepages", f"{total}\n")
        write(folder / "free_hugepages", f"{free}\n")
    facts = read(host)
    assert facts.hugepages_reserved_bytes == 800 * GIB + 200 * MIB
    assert facts.hugepages_free_bytes == 800 * GIB + 80 * MIB


def test_without_memavailable_the_estimate_is_marked(host: Path) -> None:
    (host / "proc/meminfo").write_text(MEMINFO.replace("MemAvailable:   434570312 kB\n", ""))
    facts = read(host)
    assert facts.available_bytes == (100000000 + 300000000) * KIB
    assert any("no MemAvailable" in note for note in facts.notes)


@pytest.fixture
def psutil_root(host: Path) -> Iterator[Path]:
    before = psutil.PROCFS_PATH
    psutil.PROCFS_PATH = str(host / "proc")
    yield host
    psutil.PROCFS_PATH = before


def test_the_estimate_equals_psutils(psutil_root: Path) -> None:
    from psutil import _pslinux

    write(
        psutil_root / "proc/zoneinfo",
        "Node 0, zone Normal\n  pages free 1\n        min 10\n        low 20000\n",
    )
    (psutil_root / "proc/meminfo").write_text(MEMINFO.replace("MemAvailable:   434570312 kB\n", ""))
    rows = {f"{name}:".encode(): size for name, size in read_meminfo(psutil_root / "proc/meminfo").items()}
    assert read(psutil_root).available_bytes == _pslinux.calculate_avail_vmem(rows)


def test_lxc_whose_memavailable_is_the_hosts(host: Path) -> None:
    (host / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 300 kB\nMemAvailable: 5000 kB\n")
    facts = read(host)
    assert facts.available_bytes == 300 * KIB
    assert "MemAvailable exceeds MemTotal" in facts.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("MemTotal 5\n", "meminfo:1: expected"), ("MemFree: 5 kB\n", "no MemTotal"), ("", "no MemTotal")],
)
def test_a_malformed_meminfo_is_named(host: Path, text: str, message: str) -> None:
    (host / "proc/meminfo").write_text(text)
    with pytest.raises(HostError, match=message):
        read(host)


def test_a_missing_meminfo_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"cannot read .*meminfo"):
        read(tmp_path)


def test_malformed_huge_pages_are_named(host: Path) -> None:
    write(host / "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "many\n")
    with pytest.raises(HostError, match="hugepages-2048kB"):
        read(host)


def test_this_machine_agrees_with_psutil() -> None:
    facts, seen = read_host(), psutil.virtual_memory()
    assert facts.total_bytes == seen.total
    assert abs(facts.available_bytes - seen.available) < seen.total / 4


# stated facts


def test_stated_available_is_total_without_huge_pages() -> None:
    facts = HostMemory.stated(total_bytes=449 * GB, hugepages_bytes=100 * GB)
    assert facts.available_bytes == 349 * GB
    exact = HostMemory.stated(total_bytes=449 * GB, available_bytes=445 * GB)
    assert exact.available_bytes == 445 * GB
    assert exact.source == "stated"


def test_a_limit_without_its_usage_is_noted() -> None:
    assert "taken as 0" in HostMemory.stated(total_bytes=5, cgroup_limit_bytes=4).notes[0]


def test_stated_cgroup() -> None:
    facts = HostMemory.stated(total_bytes=449 * GB, cgroup_limit_bytes=200 * GB, cgroup_usage_bytes=30 * GB)
    assert facts.effective_available_bytes == 170 * GB
    assert facts.cgroup is not None and facts.cgroup.levels == (CgroupLevel("stated", "limit", 200 * GB, 30 * GB),)


@pytest.mark.parametrize(
    ("facts", "flag"),
    [
        ({"total_bytes": 0}, "--host-ram"),
        ({"total_bytes": 5, "available_bytes": 6}, "--available"),
        ({"total_bytes": 5, "available_bytes": -1}, "--available"),
        ({"total_bytes": 5, "hugepages_bytes": 6}, "--hugepages"),
        ({"total_bytes": 5, "cgroup_usage_bytes": 1}, "--cgroup-limit"),
        ({"total_bytes": 5, "cgroup_limit_bytes": 0}, "--cgroup-limit"),
        ({"total_bytes": 5, "cgroup_limit_bytes": 4, "cgroup_usage_bytes": -1}, "--cgroup-usage"),
    ],
)
def test_contradicting_facts_are_refused(facts: dict[str, int], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        HostMemory.stated(**facts)


@given(st.integers(1, 10**13), st.integers(1, 10**13), st.integers(0, 10**13))
def test_a_container_never_gets_more_than_the_host(total: int, limit: int, usage: int) -> None:
    facts = HostMemory.stated(total_bytes=total, cgroup_limit_bytes=limit, cgroup_usage_bytes=usage)
    assert 0 <= facts.effective_available_bytes <= min(total, limit)
    assert facts.effective_total_bytes == min(total, limit) or limit >= 2**62


def test_read_cgroup_of_a_machine_without_controllers(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "3:cpu:/\n")
    write(tmp_path / "proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n")
    assert read_cgroup(tmp_path / "proc") is None
