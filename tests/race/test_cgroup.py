"""Finding, making and limiting a memory control group, on trees of plain files: cgroup v1 and v2."""

from pathlib import Path

import pytest

from hicache_lab.base.errors import HostError
from hicache_lab.base.units import MB
from hicache_lab.race import _cleanup
from hicache_lab.race.cgroup import (
    PREFIX,
    Group,
    Tree,
    find_controller,
    headroom_bytes,
    memory_group,
    remove_stale,
)

NO_LIMIT_V1 = "9223372036854771712"
KERNEL_FILES = {
    2: {
        "cgroup.procs": "",
        "memory.max": "max",
        "memory.high": "max",
        "memory.current": "4096",
        "memory.swap.max": "max",
        "memory.oom.group": "1",
        "memory.peak": "8192",
        "memory.events": "low 0\nhigh 0\nmax 41\noom 3\noom_kill 2\noom_group_kill 0\n",
    },
    1: {
        "cgroup.procs": "",
        "memory.limit_in_bytes": NO_LIMIT_V1,
        "memory.memsw.limit_in_bytes": NO_LIMIT_V1,
        "memory.usage_in_bytes": "4096",
        "memory.max_usage_in_bytes": "8192",
        "memory.swappiness": "60",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    },
}


class Files(Tree):
    """Plain files that behave like the kernel: a new group comes with its control files."""

    def __init__(self, version: int, forbidden: tuple[Path, ...] = ()) -> None:
        self.version, self.forbidden = version, forbidden

    def make(self, group: Path) -> None:
        if group.parent in self.forbidden:
            raise PermissionError(13, "Permission denied", str(group))
        group.mkdir()
        for name, text in KERNEL_FILES[self.version].items():
            (group / name).write_text(text)

    def write(self, file: Path, text: str) -> None:
        if file.name == "cgroup.subtree_control":
            if (file.parent / "cgroup.procs").read_text() and (file.parent / "memory.max").exists():
                raise OSError(16, "Device or resource busy", str(file))  # no inner processes, but at the root
            file.write_text(f"{file.read_text()} {text.lstrip('+')}")
            return
        file.write_text(text)


def v2_machine(tmp_path: Path, own: str, delegated: dict[str, str]) -> tuple[Path, Path]:
    """A /proc and a v2 mount; ``delegated`` maps each folder to its subtree_control."""
    mount = tmp_path / "cg"
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(f"30 23 0:26 / {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n")
    (proc / "cgroup").write_text(f"0::{own}\n")
    for folder, control in delegated.items():
        here = mount / folder
        here.mkdir(parents=True, exist_ok=True)
        (here / "cgroup.controllers").write_text("cpu memory pids")
        (here / "cgroup.subtree_control").write_text(control)
        (here / "cgroup.procs").write_text("")
        if folder:
            for name, text in KERNEL_FILES[2].items():
                (here / name).write_text(text)
    return tmp_path / "proc", mount


def as_kernel_would_remove(group: Path) -> None:
    for file in group.iterdir():
        file.unlink()


def test_v2_root_makes_a_limited_group_and_reads_its_counters(tmp_path) -> None:
    proc, mount = v2_machine(tmp_path, "/", {"": "cpu memory"})
    controller = find_controller(proc)
    assert (controller.version, controller.mount, controller.own) == (2, mount, mount)
    with memory_group(100 * MB, controller=controller, tree=Files(2)) as group:
        assert group.path.parent == mount
        assert (group.path / "memory.max").read_text() == str(100 * MB)
        assert (group.path / "memory.swap.max").read_text() == "0"
        assert (group.path / "memory.oom.group").read_text() == "0", "one process a kill, not the whole group"
        assert (group.usage_bytes(), group.peak_bytes(), group.oom_kills()) == (4096, 8192, 2)
        (group.path / "memory.peak").unlink()
        assert group.peak_bytes() is None
        as_kernel_would_remove(group.path)
    assert not group.path.exists()
    assert (mount / "cgroup.subtree_control").read_text() == "cpu memory", "what others had enabled stays"


def test_v2_delegated_goes_beside_its_own_group_because_that_holds_processes(tmp_path) -> None:
    own = "user.slice/app.slice/jupyter.service"
    proc, mount = v2_machine(
        tmp_path, f"/{own}", {"": "memory", "user.slice": "memory", "user.slice/app.slice": "memory", own: ""}
    )
    (mount / own / "cgroup.procs").write_text("4711\n")
    with memory_group(100 * MB, controller=find_controller(proc), tree=Files(2)) as group:
        assert group.path.parent == mount / "user.slice/app.slice"
        as_kernel_would_remove(group.path)


def test_v2_the_controller_is_enabled_at_the_root_and_withdrawn_again(tmp_path) -> None:
    proc, mount = v2_machine(tmp_path, "/", {"": ""})
    (mount / "cgroup.procs").write_text("1\n2\n")
    with memory_group(100 * MB, controller=find_controller(proc), tree=Files(2)) as group:
        assert (mount / "cgroup.subtree_control").read_text().split() == ["memory"]
        as_kernel_would_remove(group.path)
    assert (mount / "cgroup.subtree_control").read_text() == "-memory"


def test_v2_every_refusal_is_told_with_its_reason(tmp_path) -> None:
    proc, mount = v2_machine(tmp_path, "/a", {"": "memory", "a": ""})
    (mount / "a/cgroup.procs").write_text("4711\n")
    with (
        pytest.raises(HostError) as refused,
        memory_group(MB, controller=find_controller(proc), tree=Files(2, (mount,))),
    ):
        pass
    assert f"{mount / 'a'}: Device or resource busy" in str(refused.value)
    assert f"{mount}: Permission denied" in str(refused.value)
    assert "Delegate=yes" in str(refused.value)


def test_v2_not_delegated_memory_is_a_reason(tmp_path) -> None:
    proc, mount = v2_machine(tmp_path, "/a", {"": "memory", "a": ""})
    (mount / "a/cgroup.controllers").write_text("cpu pids")
    given = mount / "a"
    with (
        pytest.raises(HostError, match="the memory controller is not delegated to it"),
        memory_group(MB, parent=given, controller=find_controller(proc), tree=Files(2)),
    ):
        pass


def test_never_in_a_group_that_would_run_out_first(tmp_path) -> None:
    proc, mount = v2_machine(tmp_path, "/a/b", {"": "memory", "a": "memory", "a/b": "memory"})
    (mount / "a/memory.max").write_text(str(300 * MB))
    (mount / "a/memory.current").write_text(str(250 * MB))
    controller = find_controller(proc)
    assert headroom_bytes(controller, mount / "a/b") == 50 * MB
    (mount / "a/memory.high").write_text(str(260 * MB))
    assert headroom_bytes(controller, mount / "a/b") == 10 * MB
    # the root has no limit and is therefore taken
    with memory_group(100 * MB, controller=controller, tree=Files(2)) as group:
        assert group.path.parent == mount
        as_kernel_would_remove(group.path)
    with (
        pytest.raises(HostError, match=r"only 0\.01 GB left below its own limit, 0\.10 GB wanted"),
        memory_group(100 * MB, parent=mount / "a", controller=controller, tree=Files(2)),
    ):
        pass
    assert not list(mount.rglob(f"{PREFIX}*"))


def v1_machine(tmp_path: Path, own: str, root: str = "/") -> tuple[Path, Path]:
    mount = tmp_path / "cg 1"
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    escaped = str(mount).replace(" ", "\\040")
    (proc / "mountinfo").write_text(
        f"29 23 0:25 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n"
        f"31 23 0:27 {root} {tmp_path}/cpu rw - cgroup cgroup rw,cpu\n"
        f"30 23 0:26 {root} {escaped} rw,nosuid - cgroup cgroup rw,memory\n"
    )
    (proc / "cgroup").write_text(f"4:memory:{own}\n3:cpu:/\n0::/\n")
    mount.mkdir()
    for name, text in KERNEL_FILES[1].items():
        (mount / name).write_text(text)
    return tmp_path / "proc", mount


def test_v1_limits_memory_and_swap_and_reads_its_counters(tmp_path) -> None:
    proc, mount = v1_machine(tmp_path, "/job")
    tree = Files(1)
    tree.make(mount / "job")
    controller = find_controller(proc)
    assert (controller.version, controller.mount, controller.own) == (1, mount, mount / "job")
    with memory_group(100 * MB, controller=controller, tree=tree) as group:
        assert group.path.parent == mount / "job"
        assert (group.path / "memory.limit_in_bytes").read_text() == str(100 * MB)
        assert (group.path / "memory.memsw.limit_in_bytes").read_text() == str(100 * MB)
        assert (group.path / "memory.swappiness").read_text() == "0"
        assert (group.usage_bytes(), group.peak_bytes(), group.oom_kills()) == (4096, 8192, 2)
        as_kernel_would_remove(group.path)


def test_v1_in_a_container_whose_group_is_what_is_mounted(tmp_path) -> None:
    proc, mount = v1_machine(tmp_path, "/docker/abc", root="/docker/abc")
    assert find_controller(proc).own == mount
    (proc / "self/cgroup").write_text("4:memory:/elsewhere\n0::/\n")
    assert find_controller(proc).own == mount, "outside what is mounted: the mount itself"


def test_a_machine_without_the_controller_or_without_proc(tmp_path) -> None:
    with pytest.raises(HostError, match="needs Linux control groups"):
        find_controller(tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "self/cgroup").write_text("0::/\n")
    with pytest.raises(HostError, match="no memory controller"):
        find_controller(tmp_path / ".")


def test_a_parent_elsewhere_is_refused(tmp_path) -> None:
    proc, _ = v2_machine(tmp_path, "/", {"": "memory"})
    with (
        pytest.raises(HostError, match="--cgroup: expected a group below"),
        memory_group(MB, parent=tmp_path, controller=find_controller(proc), tree=Files(2)),
    ):
        pass


def test_a_parent_that_leads_elsewhere_is_refused(tmp_path) -> None:
    proc, mount = v2_machine(tmp_path, "/", {"": "memory"})
    (tmp_path / "cpu").mkdir()
    (mount / "link").symlink_to(tmp_path / "cpu")
    for parent in (mount / "../cpu", mount / "link"):
        with (
            pytest.raises(HostError, match="--cgroup: expected a group below"),
            memory_group(MB, parent=parent, controller=find_controller(proc), tree=Files(2)),
        ):
            pass
    assert not list((tmp_path / "cpu").iterdir())


def test_the_controller_stays_while_another_replay_has_a_group_there(tmp_path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    (tmp_path / f"{PREFIX}1-aa").mkdir()
    _cleanup.withdraw(tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "memory"
    (tmp_path / f"{PREFIX}1-aa").rmdir()
    _cleanup.withdraw(tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "-memory"


@pytest.mark.parametrize("version", [1, 2])
def test_a_kernel_that_does_not_count_kills_is_refused(tmp_path, version) -> None:
    Files(version).make(tmp_path / "g")
    group = Group(tmp_path / "g", version)
    assert group.oom_kills() == 2
    file = tmp_path / "g" / ("memory.events" if version == 2 else "memory.oom_control")
    file.write_text(file.read_text().replace("oom_kill 2\n", ""))
    with pytest.raises(HostError, match="does not count OOM kills"):
        group.oom_kills()


def test_only_groups_of_dead_replays_are_removed(tmp_path) -> None:
    for name in (f"{PREFIX}1-aa", f"{PREFIX}4194999-bb", f"{PREFIX}x-cc", "other-4194999-dd"):
        (tmp_path / name).mkdir()
    (tmp_path / f"{PREFIX}4194999-full").mkdir()
    (tmp_path / f"{PREFIX}4194999-full/child").mkdir()
    remove_stale(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([f"{PREFIX}1-aa", f"{PREFIX}x-cc", "other-4194999-dd", f"{PREFIX}4194999-full"])
