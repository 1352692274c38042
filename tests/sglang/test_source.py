"""Reading a source tree: the era it follows, what is changed in it, and trees that are none."""

import ast
import json
import zipfile
from dataclasses import replace

import pytest
from mutants import Mutant, mutants
from source_trees import AUTO, GROUPS, HOST_ONLY, I_ERA, MACHINE, MACHINE_PARTS, NO_CACHE, PARTS, POOL, C, F, G, write

from hicache_lab.base.errors import HostError, InputError, UsageError
from hicache_lab.cli import main
from hicache_lab.sglang import source
from hicache_lab.sglang.source import helpers
from hicache_lab.sglang.source.facts import UNRECOGNISED
from hicache_lab.sglang.source.reader import rule_facts
from hicache_lab.sglang.source.tree import Module, Tree


def machine_module(machine=None) -> Module:
    text = MACHINE.format(**MACHINE_PARTS | (machine or {}))
    return Module("machine.py", text, ast.parse(text), Tree("", "", [], lambda _: ""))


def own_form(name: str, machine=None) -> tuple[str, ...]:
    module = machine_module(machine)
    return tuple(digest for digest, _ in helpers.fingerprint(module, module.functions[name]))


@pytest.fixture(autouse=True)
def own_helpers(monkeypatch):
    """The helpers of the tree above, in place of those of the releases."""
    headroom = "_cgroup_memory_headroom"
    forms = {
        headroom: {"0.5.21": own_form(headroom, NO_CACHE), "0.5.22": own_form(headroom, GROUPS)},
        "seen": {"0.5.21": own_form("seen")},
        "neighbours": {"0.5.19": own_form("neighbours")},
        "smallest_stage": {"0.5.15": own_form("smallest_stage")},
    }
    monkeypatch.setattr(helpers, "known_forms", lambda: forms)
    source.eras.cache_clear()
    yield
    source.eras.cache_clear()


def read(*args, **kwargs) -> source.Reading:
    return source.read_source(source.open_tree(write(*args, **kwargs)))


@pytest.mark.parametrize(
    ("era", "version", "parts", "machine", "more"),
    [
        ("C", "0.4.6", C, NO_CACHE, {}),
        ("D", "0.5.2", {"round": "self.size -= self.size % self.page_size"}, NO_CACHE, {}),
        ("E", "0.5.8", {}, NO_CACHE, {}),
        ("F", "0.5.17", F, NO_CACHE, {}),
        ("G", "0.5.19", G, NO_CACHE | HOST_ONLY, {}),
        ("H", "0.5.21", G, NO_CACHE, AUTO),
        ("I", "0.5.22", I_ERA, GROUPS, AUTO),
        (
            "J",
            "0.5.23",
            I_ERA | {"signature": PARTS["signature"] + ", host_token_capacity=None"},
            GROUPS,
            AUTO,
        ),
    ],
)
def test_each_era_is_recognised_in_other_words(tmp_path, era, version, parts, machine, more) -> None:
    reading = read(tmp_path, parts, machine, version=version, more=more)
    assert [str(difference) for difference in reading.differences] == []
    assert reading.era is not None
    assert reading.era.name == era
    assert version in reading.era.releases
    assert reading.matches
    assert reading.contradiction is None
    assert reading.primary.class_name == "HostKVCache"
    assert reading.primary.where.file == "sglang/srt/mem_cache/pool_of_host.py"
    assert any("host_size * 1e9" in line.text for line in reading.primary.sizing)
    reserve = "KEEP_FREE =" if "budget_of_rank" not in parts.get("budget", "") else "RESERVED ="
    assert any(reserve in line.text for line in reading.primary.guard), "the reserve is shown where it is defined"


def test_eras_are_told_apart_by_their_facts() -> None:
    known = source.eras()
    assert [era.name for era in known] == list("ABCDEFGHIJ")
    assert len({tuple(sorted(era.facts.items(), key=str)) for era in known}) == len(known)
    for era in known:
        for release in era.releases:
            assert rule_facts(source.reader.rules_for(release)) == era.facts, release


CHANGES = [
    ("size_unit_bytes", {"by_size": "int(host_size * 2**30 // self.size_per_token)"}, {}),
    ("size_unit_bytes", {"by_size": "int(host_size * 1e9 / self.size_per_token)"}, {}),
    ("size_unit_bytes", {"by_size": "int(host_size * 1e9 // ranks // self.size_per_token)"}, {}),
    ("size_when", {"when": "host_size >= 0"}, {}),
    ("ratio_tokens", {"by_ratio": "int(device_pool.size * host_to_device_ratio * 2)"}, {}),
    ("ratio_tokens", {"by_ratio": "round(device_pool.size * host_to_device_ratio)"}, {}),
    ("rounding", {"round": "self.size = self.size // self.page_size * self.page_size + 1"}, {}),
    ("rounding", {"round": "self.size = (self.size // self.page_size + 2) * self.page_size"}, {}),
    ("not_larger", {"not_larger": "assert self.size >= device_pool.size"}, {}),
    ("not_larger", {"not_larger": "pass"}, {}),
    ("reserve_bytes", {"reserve": "8 * 2**30"}, {}),
    ("reserve_bytes", {"reserve": "10 * 1e9"}, {}),
    ("reserve_bytes", {"budget": "memory.available"}, {}),
    ("guard", {"test": "needed >= budget"}, {}),
    ("guard", {"test": "needed < budget"}, {}),
    ("guard", {"test": "False and needed > budget"}, {}),
    ("guard", {"needed": "self.size * self.size_per_token // 2"}, {}),
    ("guard", {"refuse": "logger.warning"}, {}),
    ("guard_reads_cgroup", {"budget": "memory.free - KEEP_FREE"}, {}),
    ("guard_divides_by_ranks", G, {"divided": "/ neighbours()"}),
    ("guard_divides_by_ranks", G, {"divided": "// 4"}),
    ("guard_divides_by_ranks", G, {"neighbours": "max(world(), 1)"}),
    ("guard_reads_cgroup", G, {"smaller": "max(found, limit)"}),
    ("pp_stages_share_tokens", G, {"reduction": "MAX"}),
    ("shown", {"shown": "needed"}, {}),
    ("mla_bytes_count_layers", {"mla_row": PARTS["mla_row"] + " * 2"}, {}),
    ("mha_counts_v_head_dim", {"mha_row": PARTS["mha_row"].replace("2", "3")}, {}),
]


@pytest.mark.parametrize(("fact", "parts", "machine"), CHANGES)
def test_one_change_is_said_loudly_with_its_line(tmp_path, fact, parts, machine, capsys) -> None:
    root = write(tmp_path, parts, NO_CACHE | machine)
    reading = source.read_source(source.open_tree(root))
    assert reading.era is None
    assert not reading.matches
    assert fact in {difference.fact.name for difference in reading.differences}
    assert main(["read-source", str(root)]) == 3
    out = capsys.readouterr().out
    assert "NO MATCH" in out
    assert source.MEANING[fact] in out


HELPERS = [
    mutant
    for name in ("_cgroup_memory_headroom", "seen", "neighbours", "smallest_stage")
    for mutant in mutants(MACHINE.format(**MACHINE_PARTS | GROUPS), name)
]


def test_every_change_of_a_helper_is_seen_where_it_stands(tmp_path) -> None:
    assert len(HELPERS) > 60
    root = write(tmp_path, I_ERA, GROUPS, version="0.5.22", more=AUTO)
    file = root / "sglang/srt/mem_cache/machine.py"
    assert source.read_source(source.open_tree(root)).matches
    for mutant in HELPERS:
        file.write_text(mutant.text)
        reading = source.read_source(source.open_tree(root))
        assert not reading.matches, mutant.what
        assert any(stands_on(mutant, difference) for difference in reading.differences), mutant.what


def stands_on(mutant: Mutant, difference: source.Difference) -> bool:
    # a statement that is gone is said at the next one; an expression of a statement at the statement's first line
    at = difference.fact.line
    return at is not None and at.file.endswith("machine.py") and mutant.first - 3 <= at.number <= mutant.last + 1


def test_a_changed_helper_is_said_with_its_line(tmp_path, capsys) -> None:
    changed = {"cgroup": GROUPS["cgroup"].replace("max(0,", "max(1,")}
    root = write(tmp_path, I_ERA, changed, version="0.5.22", more=AUTO)
    text = (root / "sglang/srt/mem_cache/machine.py").read_text()
    number = 1 + text[: text.index("max(1,")].count("\n")
    assert main(["read-source", str(root)]) == 3
    out = capsys.readouterr().out
    assert "NO MATCH" in out
    assert f"machine.py:{number}: helper _cgroup_memory_headroom: the source has 'not recognised'" in out
    assert "[left = max(1, int(text) - used)], the rules have 'as in 0.5.22'" in out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("least", "smallest"),
        ("    for group", "    # each of them\n    for group"),
        ("'%d of %d', used", "'%d and %d', used"),
        ("1024", "2**20"),
        ("(text) - used", "(text) - (used)"),
    ],
)
def test_names_comments_and_log_lines_of_a_helper_do_not_count(tmp_path, old, new) -> None:
    same = {"cgroup": GROUPS["cgroup"].replace(old, new)}
    assert same != GROUPS
    assert read(tmp_path, I_ERA, same, version="0.5.22", more=AUTO).matches


def test_a_helper_of_another_era_or_of_none_is_no_match(tmp_path) -> None:
    exact = I_ERA | {"signature": PARTS["signature"] + ", host_token_capacity=None"}
    reading = read(tmp_path / "older", exact, NO_CACHE, version="0.5.23", more=AUTO)
    assert ("helper _cgroup_memory_headroom", "as in 0.5.21", "as in 0.5.22") in {
        (d.fact.name, d.fact.value, d.expected) for d in reading.differences
    }
    unknown = MACHINE_PARTS | GROUPS | {"view": "seen_twice() if twice else seen()"}
    assert not read(tmp_path / "more", I_ERA, unknown, version="0.5.22", more=AUTO).matches
    root = write(tmp_path / "set", I_ERA, GROUPS, version="0.5.22", more=AUTO)
    file = root / "sglang/srt/mem_cache/machine.py"
    file.write_text(file.read_text() + "\nneighbours = lambda: 1\n")
    [difference] = source.read_source(source.open_tree(root)).differences
    assert (difference.fact.name, difference.fact.value) == ("helper neighbours", UNRECOGNISED)


def test_the_recorded_helpers_cover_what_the_rules_say(monkeypatch) -> None:
    monkeypatch.undo()
    source.eras.cache_clear()
    known = helpers.known_forms()
    by_release = {era.name: era.facts for era in source.eras()}
    name = "helper _cgroup_memory_headroom"
    assert [era for era, facts in by_release.items() if name in facts] == ["H", "I", "J"]
    assert (by_release["H"][name], by_release["I"][name], by_release["J"][name]) == (
        "as in 0.5.21",
        "as in 0.5.22",
        "as in 0.5.22",
    )
    assert by_release["G"]["helper ranks_per_host"] == "as in 0.5.19"
    for forms in known.values():
        assert len(set(forms.values())) == len(forms)
    for era in source.eras():
        for release in era.releases:
            assert rule_facts(source.reader.rules_for(release)) == era.facts, release


WRITES = [
    "setattr(self, 'size', 5)",
    "self.size, self.spare = 5, 6",
    "self.size: int = 5",
    "self.size_per_token *= 2",
    "self.size_per_token = 2 * self.size_per_token",
    "self.page_size *= 2",
    "host_size = host_size // 8",
    "del self.size",
    "match page_size:\n            case 1:\n                self.size = 5",
    "try:\n            pass\n        except OSError:\n            self.size = 5",
]
# (what is said, how many lines below its first it stands, what is put before the check)
CHECKED_OTHERWISE = [
    ("unread", 1, "for more in pools:\n            budget += more"),
    ("unread", 0, "self.spare = (budget := 10**15)"),
    ("unread", 0, "with machine() as budget:\n            pass"),
    ("unread", 3, "try:\n            pass\n        finally:\n            needed = 0"),
    ("unread", 0, "import machine as budget"),
    ("unread", 0, "for budget in pools:\n            pass"),
    ("check_reached", 1, "if self.dummy:\n            return"),
    ("check_reached", 0, "if pinned:\n         "),
    ("check_reached", 0, "with suppress(ValueError):\n         "),
]


@pytest.mark.parametrize("write_", WRITES)
def test_a_quantity_written_in_another_way_is_no_match(tmp_path, write_) -> None:
    reading = read(tmp_path, {"not_larger": f"{write_}\n        {PARTS['not_larger']}"}, NO_CACHE)
    assert not reading.matches
    [difference] = [difference for difference in reading.differences if difference.fact.name == "unread"]
    assert difference.fact.line is not None
    assert difference.fact.line.text.split()[0] == write_.split()[0] or "self.size = 5" in difference.fact.line.text


@pytest.mark.parametrize(("fact", "below", "before"), CHECKED_OTHERWISE)
def test_a_check_that_is_changed_or_passed_by_is_no_match(tmp_path, fact, below, before, capsys) -> None:
    root = write(tmp_path, {}, NO_CACHE)
    file = root / "sglang/srt/mem_cache/pool_of_host.py"
    text = file.read_text()
    head, check = text.split("        if needed > budget:\n", 1)
    gap = "\n        if needed > budget:\n" if not before.endswith(" ") else "   if needed > budget:\n    "
    file.write_text(f"{head}        {before}{gap}{check}")
    assert main(["read-source", str(root)]) == 3
    out = capsys.readouterr().out
    assert "NO MATCH" in out
    assert f"pool_of_host.py:{1 + head.count(chr(10)) + below}: {source.MEANING[fact]}" in out


def test_code_of_another_era_than_the_version_says(tmp_path, capsys) -> None:
    root = write(tmp_path, {}, NO_CACHE, version="0.5.19")
    reading = source.read_source(source.open_tree(root))
    assert reading.era is not None
    assert reading.era.name == "E"
    assert not reading.matches
    assert "calls itself 0.5.19, which is era G" in str(reading.contradiction)
    assert "divides by the ranks" in str(reading.contradiction)
    assert main(["read-source", str(root)]) == 3
    assert "BUT  the tree calls itself 0.5.19" in capsys.readouterr().out


def test_an_unexamined_version_is_a_note(tmp_path) -> None:
    reading = read(tmp_path, {}, NO_CACHE, version="0.5.8.dev7+gabc")
    assert reading.matches
    assert "not verified" in str(reading.warning)


def test_a_second_pool_and_its_check_are_read_too(tmp_path) -> None:
    side = POOL.format(**PARTS | {"reserve": "9 * 2**30"}).split("class MLA")[0].replace("HostKVCache", "StateHost")
    other = """
import psutil
class PagedHost:
    def __init__(self, pages):
        total = pages * self.item_bytes
        rest = psutil.virtual_memory().available - 10 * 2**30
        if total >= rest:
            raise ValueError(f"Not enough host memory. {total / 1e9} but only have {rest / 1e9}")
"""
    more = {"sglang/srt/mem_cache/side.py": side, "sglang/srt/mem_cache/paged.py": other}
    reading = read(tmp_path, {}, NO_CACHE, more=more)
    assert {one.class_name for one in reading.others} == {"StateHost", "PagedHost"}
    assert {(d.owner, d.fact.name) for d in reading.differences} == {
        ("StateHost", "reserve_bytes"),
        ("PagedHost", "guard"),
    }
    assert all(
        d.fact.line is not None and d.fact.line.file.endswith(("side.py", "paged.py")) for d in reading.differences
    )


def test_one_host_copy_per_group_is_noticed(tmp_path) -> None:
    shared = "def maybe_create_shared_context():\n    pass\n"
    more = {"sglang/srt/mem_cache/mla_host_dedup.py": shared}
    assert read(tmp_path / "a", {}, NO_CACHE, more=more).matches, "shipped, but called nowhere"
    caller = "from x import maybe_create_shared_context\ncontext = maybe_create_shared_context()\n"
    reading = read(tmp_path / "b", {}, NO_CACHE, more=more | {"sglang/srt/mem_cache/caller.py": caller})
    [difference] = reading.differences
    assert (difference.fact.name, difference.fact.value) == ("host_copies", "one per group")
    assert str(difference.fact.line) == "sglang/srt/mem_cache/caller.py:2"


def test_a_wheel_and_the_json(tmp_path, capsys) -> None:
    root = write(tmp_path / "tree", {}, NO_CACHE)
    wheel = tmp_path / "sglang-0.5.8-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in root.rglob("*.py"):
            archive.write(file, file.relative_to(root).as_posix())
        archive.writestr("sglang-0.5.8.dist-info/METADATA", "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.8\n")
    assert main(["read-source", str(wheel), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["version"], told["era"], told["matches"], told["kind"]) == ("0.5.8", "E", True, "wheel")
    assert told["constructor"]["class"] == "HostKVCache"
    assert "host_to_device_ratio" in told["constructor"]["signature"]
    assert {line["line"] for line in told["sizing"]} >= {12, 13, 15}
    assert told["facts"]["reserve_bytes"]["value"] == 10 * 2**30
    assert told["differences"] == []


def test_nothing_of_the_tree_runs(tmp_path) -> None:
    trap = tmp_path / "ran"
    boom = f"open({str(trap)!r}, 'w')\n"
    root = write(tmp_path / "tree", {}, NO_CACHE)
    for file in root.rglob("*.py"):
        file.write_text(boom + file.read_text())
    assert source.read_source(source.open_tree(root)).era is not None
    assert not trap.exists()


def test_unparsable_files_are_noted_and_do_not_stop_the_reading(tmp_path) -> None:
    more = {
        "sglang/srt/mem_cache/broken.py": "host_to_device_ratio = (",
        "sglang/srt/mem_cache/deep.py": "host_to_device_ratio = " + "(" * 5000,
        "sglang/srt/mem_cache/nul.py": "host_to_device_ratio = 1\0",
    }
    reading = read(tmp_path, {}, NO_CACHE, more=more)
    assert reading.matches
    assert len(reading.tree.unreadable) == 3


def test_what_is_no_source_tree(tmp_path, monkeypatch, capsys) -> None:
    with pytest.raises(InputError, match="no such file"):
        source.open_tree(tmp_path / "nowhere")
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(InputError, match="expected a folder or a wheel"):
        source.open_tree(tmp_path / "note.txt")
    with pytest.raises(InputError, match="holds no Python"):
        source.open_tree(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(InputError, match="no host-pool constructor found in 1 Python files"):
        source.read_source(source.open_tree(tmp_path))
    (tmp_path / "cut.whl").write_bytes(b"PK\x05\x06" + b"\0" * 18)
    with pytest.raises(InputError, match="holds no Python"):
        source.open_tree(tmp_path / "cut.whl")
    with pytest.raises(UsageError, match="one of PATH"):
        source.tree_from(None, False)
    with pytest.raises(UsageError, match="one of PATH"):
        source.tree_from("x", True)
    monkeypatch.setattr(source.tree.util, "find_spec", lambda name: None)
    with pytest.raises(HostError, match="not installed"):
        source.installed_tree()
    assert main(["read-source"]) == 2
    assert "PATH" in capsys.readouterr().err


def test_the_installed_package_is_found_without_importing_it(tmp_path, monkeypatch) -> None:
    write(tmp_path, {}, NO_CACHE)
    (tmp_path / "sglang/__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = source.installed_tree()
    assert (tree.kind, tree.version) == ("installed", "0.5.8")
    assert source.read_source(tree).matches


def test_a_contradiction_inside_one_constructor_is_not_recognised() -> None:
    line = source.Line("f.py", 1, "")
    one = source.Constructor("X", "()", line)
    one.state(source.Fact("rounding", "down", "a", line))
    one.state(source.Fact("rounding", "up_a_page", "b", line))
    assert one.facts["rounding"].value == UNRECOGNISED
    assert one.facts["rounding"] != replace(one.facts["rounding"], value="down")
