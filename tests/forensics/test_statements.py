"""The table of log lines: every entry is whole, and a wrong one is named."""

import re
from pathlib import Path

import pytest

from hicache_lab.base.errors import InputError
from hicache_lab.base.resources import data_dir
from hicache_lab.forensics.logs.events import HostPool, Rank, SourceLine
from hicache_lab.forensics.logs.statements import STATEMENTS, Statement, match_message, read_table
from hicache_lab.forensics.logs.summary import event_json
from hicache_lab.sglang.releases import VERIFIED

ENTRY = """
[keys.step]
elapsed = "elapsed_s__float"

[line.weights]
event = "milestone"
begins = 'Weights are here in {elapsed_s__float} s'
groups = ["step"]
const = { name = "weights_end" }

[batch_columns]
"""


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=list(STATEMENTS))
def test_an_entry_is_whole(statement: Statement) -> None:
    assert statement.head.pattern or statement.printed
    assert len(statement.readers) == len(statement.keys)
    for wording, *releases in statement.printed:
        assert re.compile(wording) and 1 <= len(releases) <= 2
        assert sorted(releases, key=VERIFIED.index) == releases


def test_a_line_form_is_an_entry_of_the_table_alone(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(ENTRY)
    statements, _ = read_table(path)
    assert statements["weights"].match("Weights are here in 1.5 s") == {"name": "weights_end", "elapsed_s": 1.5}
    assert statements["weights"].match("Weights are there") is None


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ('event = "milestone"', 'event = "milestones"', "line.weights.*milestones"),
        ('groups = ["step"]', 'groups = ["steps"]', "line.weights.*steps"),
        ("elapsed_s__float} s", "elapsed__float} s", "line.weights.*Milestone.*elapsed"),
        ('"elapsed_s__float"', '"elapsed_s__hours"', "line.weights.*Milestone.*elapsed_s"),
        ("{ name =", "{ nom =", "line.weights.*Milestone.*nom"),
        ("const =", "constant =", "line.weights.*constant"),
        ("[batch_columns]", "", "batch_columns"),
        ("[line.weights]", "[line.weights", "table.toml"),
    ],
)
def test_a_wrong_entry_is_named(right: str, wrong: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(ENTRY.replace(right, wrong))
    with pytest.raises(InputError, match=named):
        read_table(path)


def test_a_wrong_regular_expression_is_named_where_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(ENTRY.replace("Weights are", "(Weights are"))
    statements, _ = read_table(path)
    with pytest.raises(InputError, match=r"line\.weights.*not a regular expression"):
        statements["weights"].match("Weights are here")


def test_entries_of_one_word_are_tried_in_the_tables_order() -> None:
    text = (data_dir() / "log_statements.toml").read_text(encoding="utf-8")
    assert text.index("[line.weights_deferred]") < text.index("[line.weights_end]")
    message = "Load weight end. Committed real weights after capture in 1.0 s (capture overlap window 2.0 s, "
    found = match_message(message + "startup overlap total 3.0 s)")
    assert found is not None and found[0].variant == "weights_deferred"


def test_an_event_as_json_holds_what_its_line_carries() -> None:
    head = SourceLine("a.log", 7)
    event = HostPool(where=head, rank=Rank((("tp", 3),)), text="…", variant="host.kv", pool="kv", bytes=5)
    assert event_json(event) == {
        "kind": "host_pool", "at": None, "rank": "TP3", "file": "a.log", "line": 7, "variant": "host.kv", "pool": "kv",
        "bytes": 5, "text": "…",
    }  # fmt: skip
