"""The script that records the options of a release: by the syntax of its source alone."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from hicache_lab.base.errors import InputError
from hicache_lab.base.resources import data_dir
from hicache_lab.sglang.source import open_tree

ROOT = Path(__file__).resolve().parents[2]
TABLE = data_dir() / "options.json"

CALLS = """
import argparse
from sglang.srt.names import LAYOUTS, Detectors

class Gone(argparse.Action):
    def __init__(self, option_strings, dest, nargs=0, **kwargs):
        super().__init__(option_strings, dest, nargs=nargs, **kwargs)
    def __call__(self, parser, namespace, values, option_string=None):
        raise ValueError(self.help)

class ServerArgs:
    size: int = 3
    @staticmethod
    def add_cli_args(parser):
        detectors = list(Detectors.MAP.keys())
        parser.add_argument("--size", "--size-gb", type=int, default=ServerArgs.size)
        parser.add_argument("--layout", choices=LAYOUTS + ["last"])
        parser.add_argument("--detector", choices=detectors)
        parser.add_argument("--graphs", nargs="+", type=int)
        parser.add_argument("--overlap", action=argparse.BooleanOptionalAction)
        parser.add_argument("--old", action=Gone, help="gone")

def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
"""

NAMES = """
LAYOUTS = ["b", "a"]
class Detectors:
    MAP = {"x": int, "y": str}
"""

FIELDS = """
import argparse
from typing import Literal, Optional
from sglang.srt.arg_groups.arg_utils import A, Arg, add_cli_args_from_dataclass

class ServerArgs:
    tp_size: A[int, Arg(help="ranks", cli_name="--tensor-parallel-size", aliases=["--tp-size"])] = 1
    mode: A[Optional[Literal["on", "off"]], "a mode"] = None
    bs: A[Optional[list[int]], Arg(help="sizes")] = None
    fast: A[bool, "fast"] = False
    inner: A[bool, Arg(no_cli=True)] = False
    @staticmethod
    def add_cli_args(parser):
        add_cli_args_from_dataclass(parser, ServerArgs)

def prepare_server_args(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False)
"""


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("record_options", ROOT / "scripts" / "record_options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tree_of(folder: Path, **files: str) -> Any:
    for name, text in files.items():
        path = folder / "sglang" / "srt" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return open_tree(folder)


def test_calls_are_read_with_their_names_types_choices_and_actions(script: Any, tmp_path: Path) -> None:
    tree = tree_of(tmp_path, server_args=CALLS, names=NAMES)
    options = script.read_options(tree)
    assert options["--size"] == {"type": "int", "default": 3}
    assert options["--size-gb"] == {"dest": "size", "type": "int", "default": 3}
    assert options["--layout"] == {"choices": ["b", "a", "last"]}
    assert options["--detector"] == {"choices": ["x", "y"]}
    assert options["--graphs"] == {"type": "int", "values": "+"}
    assert options["--no-overlap"] == {"dest": "overlap", "action": "BooleanOptionalAction", "values": "0"}
    assert options["--old"] == {"action": "stops", "values": "0"}
    assert script.abbreviated(tree)


def test_annotated_fields_are_read_once_their_derivation_is_known(script: Any, tmp_path: Path) -> None:
    derive = "def add_cli_args_from_dataclass(parser, cls):\n    'Adds.'\n    return parser\n"
    tree = tree_of(tmp_path, server_args=FIELDS, arg_groups__arg_utils=derive)
    with pytest.raises(InputError, match=r"add_cli_args_from_dataclass is new \((\w+)\)") as error:
        script.read_options(tree)
    script.READ_DERIVATIONS.add(str(error.value).partition("(")[2].partition(")")[0])
    options = script.read_options(tree)
    assert options["--tp-size"] == {"type": "int", "default": 1}
    assert options["--tensor-parallel-size"] == {"dest": "tp_size", "type": "int", "default": 1}
    assert options["--mode"] == {"choices": ["on", "off"], "default": None}
    assert options["--bs"] == {"type": "int", "values": "+", "default": None}
    assert options["--fast"]["action"] == "store_true"
    assert "--inner" not in options
    assert not script.abbreviated(tree)


def test_options_added_in_another_way_stop_the_script(script: Any, tmp_path: Path) -> None:
    other = CALLS.replace('parser.add_argument("--old"', 'more_args(parser)\n        parser.add_argument("--old"')
    with pytest.raises(InputError, match=r"more_args\(parser\) adds options in a way that is not read yet"):
        script.read_options(tree_of(tmp_path, server_args=other, names=NAMES))


def test_the_table_is_what_the_script_writes_and_small(script: Any) -> None:
    text = TABLE.read_text()
    raw = json.loads(text)
    (span,) = raw["abbreviated"]
    assert span == [raw["releases"][0], raw["releases"][-1]]
    assert script.compact(script.expand(raw), dict.fromkeys(raw["releases"], True)) == text
    assert len(text) <= 300_000
