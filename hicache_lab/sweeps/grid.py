"""A grid: one YAML file that names a notebook, fixed parameters, axes, repeats and the server side.

Everything in the file is checked here, key by key, except the names and types of notebook parameters, which ``plan``
compares with the notebook.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import inf, prod
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.runs import Limits
from hicache_lab.sweeps.reading import check_keys, mapping, read_yaml, refuse
from hicache_lab.sweeps.server_side import ServerSide, read_server_side

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_KEYS = (
    "label", "notebook", "parameters", "axes", "repeats", "repeat_parameter", "server", "limits", "compare",
)  # fmt: skip
MOST_POINTS = 1000
"""A grid larger than this is refused unless its limits say otherwise: axes multiply faster than one thinks."""


@dataclass(frozen=True)
class Axis:
    """Names that change together, one row of values for each step.

    Attributes:
        names: one name, or several that are zipped.
        rows: the values, one for each name.
        labels: how a row is called in tables; empty text: by its values.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    labels: tuple[str, ...]

    def label(self, row: int) -> str:
        """What this step is called."""
        pairs = list(zip(self.names, self.rows[row], strict=True))
        # a zipped null says that the flag is left out
        given = [pair for pair in pairs if pair[1] is not None] or pairs
        return self.labels[row] or " ".join(f"{name}={_shown(value)}" for name, value in given)


@dataclass(frozen=True)
class Compare:
    """How the sweep's comparison is made: the baseline's label, which metrics, what decides."""

    baseline: str | None = None
    metrics: tuple[str, ...] = ()
    objective: str | None = None


@dataclass(frozen=True)
class Grid:
    """A checked grid file.

    Attributes:
        path, text: the file and what is in it.
        label: names the sweep and its folder.
        notebook: as the file names it: a path (beside the grid file or from here) or a shipped notebook.
        parameters: fixed for all points.
        axes: what varies; the grid is their product.
        repeats: how often each point runs.
        repeat_parameter: an int parameter (a seed) that is raised by one at each repeat.
        server: an existing server, a launch template, the CPU server, or None (offline).
        limits: seconds a cell and a run may take.
        compare: how the comparison is made.
    """

    path: Path
    text: str
    label: str
    notebook: str
    parameters: Mapping[str, Any]
    axes: tuple[Axis, ...]
    repeats: int = 1
    repeat_parameter: str | None = None
    server: ServerSide | None = None
    limits: Limits = field(default_factory=Limits)
    compare: Compare = field(default_factory=Compare)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that vary."""
        return tuple(name for axis in self.axes for name in axis.names)

    def combinations(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Label and settings of every step of the axes' product, the last axis varying fastest; one without axes."""
        combinations = []
        for steps in product(*(range(len(axis.rows)) for axis in self.axes)):
            chosen = list(zip(self.axes, steps, strict=True))
            settings = {
                name: value for axis, row in chosen for name, value in zip(axis.names, axis.rows[row], strict=True)
            }
            combinations.append((", ".join(axis.label(row) for axis, row in chosen) or self.label, settings))
        return tuple(combinations)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def load_grid(path: str | Path) -> Grid:
    """Read and check a grid file.

    Raises:
        InputError: not YAML (with the line).
        UsageError: a key that is unknown (with a suggestion), missing, or of another form; an axis without values, of
            unequal zipped lengths, or twice the same name; more points than the limit.
    """
    path = Path(path)
    raw, text = read_yaml(path)
    check_keys(path, "", raw, _KEYS)
    label = raw.get("label", path.stem)
    if not isinstance(label, str) or not LABEL.fullmatch(label):
        refuse(path, "label", "letters, digits, dot, dash and underscore (it names a folder)", label)
    if not isinstance(raw.get("notebook"), str) or not raw["notebook"]:
        refuse(path, "notebook", "an .ipynb or the name of a shipped notebook", raw.get("notebook"))
    axes = tuple(_axes(path, raw.get("axes") or []))
    parameters = mapping(path, "parameters", raw.get("parameters"))
    _check_names(path, parameters, axes)
    limits, most = _limits(path, mapping(path, "limits", raw.get("limits")))
    repeats = raw.get("repeats", 1)
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        refuse(path, "repeats", "a whole number, 1 or more", repeats)
    points = repeats * prod(len(axis.rows) for axis in axes)
    if points > most:
        raise UsageError(f"{path}: {points:,} points, more than {most:,}; say `limits: {{points: {points}}}` if meant")
    return Grid(
        path=path,
        text=text,
        label=label,
        notebook=raw["notebook"],
        parameters=parameters,
        axes=axes,
        repeats=repeats,
        repeat_parameter=_text(path, "repeat_parameter", raw.get("repeat_parameter")),
        server=read_server_side(path, raw["server"]) if raw.get("server") is not None else None,
        limits=limits,
        compare=_compare(path, mapping(path, "compare", raw.get("compare"))),
    )


def _text(path: Path, key: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        refuse(path, key, "a text", value)
    return value


def _limits(path: Path, raw: dict[str, Any]) -> tuple[Limits, int]:
    check_keys(path, "limits: ", raw, ("cell_seconds", "run_seconds", "points"))
    for key, value in raw.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            refuse(path, f"limits: {key}", "a number above 0", value)
    most = raw.get("points", MOST_POINTS)
    if not isinstance(most, int):
        refuse(path, "limits: points", "a whole number", most)
    return Limits(**{key: float(value) for key, value in raw.items() if key != "points"}), most


def _compare(path: Path, raw: dict[str, Any]) -> Compare:
    check_keys(path, "compare: ", raw, ("baseline", "metrics", "objective"))
    metrics = raw.get("metrics") or []
    if not isinstance(metrics, list) or not all(isinstance(name, str) for name in metrics):
        refuse(path, "compare: metrics", "a list of names", metrics)
    baseline = _text(path, "compare: baseline", raw.get("baseline"))
    return Compare(baseline, tuple(metrics), _text(path, "compare: objective", raw.get("objective")))


def _axes(path: Path, raw: object) -> Iterable[Axis]:
    """A list of axes, each a mapping; several names in one mapping are zipped. A mapping is one axis a name."""
    if isinstance(raw, dict):
        raw = [{name: values} for name, values in raw.items()]
    if not isinstance(raw, list):
        refuse(path, "axes", "a list of `- name: values` lines", raw)
    for entry in raw:
        if not isinstance(entry, dict) or not entry:
            refuse(path, "axes", "`- name: values` lines", entry)
        yield _axis(path, entry)


def _axis(path: Path, entry: dict[str, Any]) -> Axis:
    columns = {name: _values(path, name, values) for name, values in entry.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counted = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(f"{path}: axes: zipped names need equally many values: {counted}")
    # one name may carry the labels of the whole row
    labelled = [[label for label, _ in values] for values in columns.values() if any(label for label, _ in values)]
    rows = tuple(zip(*([value for _, value in values] for values in columns.values()), strict=True))
    labels = tuple(" ".join(filter(None, parts)) for parts in zip(*labelled, strict=True)) or ("",) * len(rows)
    axis = Axis(tuple(columns), rows, labels)
    shown = [axis.label(row) for row in range(len(rows))]
    for text in shown:
        if shown.count(text) > 1:
            raise UsageError(f"{path}: axes: {text} is there twice; `repeats:` runs a point several times")
    return axis


def _values(path: Path, name: str, raw: object) -> list[tuple[str, Any]]:
    """(label, value) pairs of one name."""
    key = f"axes: {name}"
    if not _IDENTIFIER.fullmatch(name):
        refuse(path, "axes", "the name of a parameter or of a {placeholder}", name)
    if isinstance(raw, dict):
        return [("", value) for value in _range(path, key, raw)]
    if not isinstance(raw, list) or not raw:
        refuse(path, key, "a list of values, or {from: 1, to: 4, step: 0.5}", raw)
    pairs: list[tuple[str, Any]] = []
    for item in raw:
        if not isinstance(item, dict) or "label" not in item:
            pairs.append(("", item))
            continue
        check_keys(path, f"{key}: ", item, ("label", "value"))
        if not isinstance(item["label"], str) or not item["label"].strip() or "value" not in item:
            refuse(path, key, "{label: a text, value: …}", item)
        pairs.append((item["label"], item["value"]))
    return pairs


def _range(path: Path, key: str, raw: dict[str, Any]) -> list[int | float]:
    """``{from, to, step}`` with ``to`` included; decimal steps are exact."""
    from decimal import Decimal

    check_keys(path, f"{key}: ", raw, ("from", "to", "step"))
    if not {"from", "to"} <= raw.keys():
        refuse(path, key, "{from: 1, to: 4, step: 0.5}", raw)
    numbers = {part: raw.get(part, 1) for part in ("from", "to", "step")}
    for part, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e15 or value != value:
            refuse(path, f"{key}: {part}", "a number", value)
    # 0.1 + 0.2 in binary would give labels like 0.30000000000000004
    start, stop, step = (Decimal(str(numbers[part])) for part in ("from", "to", "step"))
    if step == 0 or (stop - start) * step < 0:
        refuse(path, key, "a step that leads from `from` to `to`", raw)
    count = int((stop - start) / step) + 1
    if count > MOST_POINTS:
        refuse(path, key, f"at most {MOST_POINTS:,} steps", raw)
    all_ints = all(isinstance(value, int) for value in numbers.values())
    return [int(start + n * step) if all_ints else float(start + n * step) for n in range(count)]


def _check_names(path: Path, parameters: Mapping[str, Any], axes: Iterable[Axis]) -> None:
    places = dict.fromkeys(parameters, "parameters")
    for axis in axes:
        for name in axis.names:
            if name in places:
                raise UsageError(f"{path}: {name}: in axes and in {places[name]}; a name has one place")
            places[name] = "another axis"
