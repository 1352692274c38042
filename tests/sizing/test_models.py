"""The shipped catalogue: complete, in agreement with what its configs derive to, found by any name."""

import json
import sys
from collections import Counter

import pytest

from hicache_lab.base.errors import InputError, UnknownFact
from hicache_lab.base.resources import data_dir
from hicache_lab.sizing.geometry import load_geometry
from hicache_lab.sizing.models import CatalogueEntry, _read, catalogue, find

ENTRIES = catalogue()


def test_every_confirmed_and_secondary_model_is_there() -> None:
    assert Counter(entry.confidence for entry in ENTRIES) == {"confirmed": 67, "secondary": 10}
    assert len({entry.name for entry in ENTRIES}) == 77


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_is_what_it_says(entry: CatalogueEntry) -> None:
    geometry = load_geometry(entry.name)
    assert (geometry.kind, geometry.confidence, geometry.name) == (entry.kind, entry.confidence, entry.name)
    assert entry.source and "/" in entry.hf_id
    for name in entry.names:
        assert find(name) is entry, f"{name} leads to {find(name).name}"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_hub_id_of_an_entry_is_sized_as_its_name(entry: CatalogueEntry) -> None:
    assert load_geometry(entry.hf_id) == load_geometry(entry.name)
    for name in entry.names:
        assert load_geometry(entry.repository(name)) == load_geometry(name), name


@pytest.mark.parametrize("name", ["kimi-k2.5", "moonshotai/Kimi-K2.5", " KIMI-K2.5 ", "nvidia/kimi-k2.5-nvfp4"])
def test_names_are_found_in_any_case(name: str) -> None:
    assert find(name).name == "Kimi-K2.5"


def test_an_unknown_name_is_told_what_is_close_and_what_to_do() -> None:
    with pytest.raises(UnknownFact, match=r"close are Kimi-K2\.5.*config\.json"):
        find("kimi-k2.55")
    with pytest.raises(UnknownFact) as caught:
        find("\x1b[31m<script>" + "x" * 5000)
    assert len(str(caught.value)) < 700 and "\x1b" not in str(caught.value)


def test_a_damaged_catalogue_file_is_named(tmp_path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"name": "X"}')
    with pytest.raises(InputError, match=r"broken\.json"):
        _read(broken)


def test_the_files_are_small_and_named_after_their_model() -> None:
    for path in (data_dir() / "models").iterdir():
        entry = json.loads(path.read_text(encoding="utf-8"))
        assert path.stat().st_size < 8_000
        assert path.stem.replace("-", "") in entry["name"].lower().replace("-", "").replace("/", "")


def test_catalogue_needs_no_heavy_import() -> None:
    assert "hicache_lab.sizing.models" in sys.modules and "torch" not in sys.modules
