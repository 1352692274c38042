"""A notebook's parameters: names, types, defaults and comments, read before anything runs.

papermill only warns about a name that the notebook does not have and runs with the default: a misspelt size
would rerun the incident's 300. So names and types are compared first. The cell is read with Python's own
parser: papermill's inspection is a line pattern that loses ``str | None`` and cuts a text at ``#``.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError, UsageError, did_you_mean
from hicache_lab.base.resources import notebooks_dir
from hicache_lab.serving.client.problems import checked_key, checked_url

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
    "list": (list, tuple),
    "dict": (dict,),
}


@dataclass(frozen=True)
class Parameter:
    """One line of the cell tagged ``parameters``: ``name: type = default  # comment``."""

    name: str
    type_name: str
    default: Any
    comment: str = ""

    @property
    def base_type(self) -> str:
        """The type without ``| None`` and without what it holds: ``list[str] | None`` is a ``list``."""
        words = [word.strip() for word in self.type_name.split("|")]
        return next((word for word in words if word != "None"), "None").split("[")[0]

    @property
    def optional(self) -> bool:
        """True when None is allowed."""
        return "None" in self.type_name.replace("|", " ").split()

    def accepts(self, value: object) -> bool:
        """True for the declared type; an int may stand for a float, a bool never for a number."""
        if value is None:
            return self.optional
        if isinstance(value, bool) and self.base_type != "bool":
            return self.base_type not in _TYPES
        return isinstance(value, _TYPES.get(self.base_type, (object,)))

    def typed(self, value: Any) -> Any:
        """An accepted value in the declared type: 2 and 2.0 are one value of a float."""
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if is_int and self.base_type == "float" else value

    def __str__(self) -> str:
        line = f"{self.name}: {self.type_name} = {self.default!r}"
        return f"{line}  # {self.comment}" if self.comment else line


def read_notebook(notebook: Path) -> Any:
    """The notebook as nbformat reads it.

    Raises:
        InputError: no such file, or not a Jupyter notebook.
    """
    import nbformat

    try:
        raw = json.loads(notebook.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"notebook {notebook}: expected a Jupyter notebook (.ipynb, JSON); {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("cells"), list) or raw.get("nbformat") != 4:
        raise InputError(f"notebook {notebook}: expected a Jupyter notebook of nbformat 4; this JSON is something else")
    try:
        return nbformat.reads(json.dumps(raw), as_version=4)  # type: ignore[no-untyped-call]
    except (nbformat.ValidationError, AttributeError, KeyError, TypeError) as error:
        raise InputError(f"notebook {notebook}: a cell is not as nbformat 4 says ({error})") from error


def find_notebook(name: str) -> Path:
    """A path as given, or a shipped notebook by its name.

    Raises:
        InputError: neither exists; the message lists what ships.
    """
    path = Path(name)
    if path.exists():
        return path
    shipped = {notebook.stem: notebook for notebook in sorted(notebooks_dir().glob("*.ipynb"))}
    if name.removesuffix(".ipynb") in shipped:
        return shipped[name.removesuffix(".ipynb")]
    raise InputError(f"notebook {name}: no such file, and not one of those that ship ({', '.join(shipped)})")


def inspect_parameters(notebook: Path) -> dict[str, Parameter]:
    """The parameters of ``notebook`` in their order; a notebook without a tagged cell has none.

    Raises:
        InputError: not a notebook, or a parameters cell that is not plain assignments of literals.
    """
    for cell in read_notebook(notebook).cells:
        if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", []):
            return _parse_cell(cell.source, notebook)
    return {}


def _parse_cell(source: str, notebook: Path) -> dict[str, Parameter]:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise InputError(f"notebook {notebook}: its parameters cell is not Python (line {error.lineno})") from error
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    parameters = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
        target, *others = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        if not isinstance(target, ast.Name) or others:
            continue
        try:
            default = ast.literal_eval(node.value)
        except ValueError as error:
            raise InputError(
                f"notebook {notebook}: parameter {target.id} must have a literal default, "
                f"got {ast.unparse(node.value)!r}"
            ) from error
        type_name = ast.unparse(annotation).strip("'\"") if annotation else type(default).__name__
        type_name = type_name.replace("NoneType", "object | None")
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        comment = " ".join(comments[line] for line in lines if line in comments)
        parameters[target.id] = Parameter(target.id, type_name, default, comment)
    return parameters


def check_parameters(notebook: Path, given: Mapping[str, object]) -> dict[str, Any]:
    """Compare ``given`` with the notebook's parameters; return all values of the run, defaults included.

    Raises:
        UsageError: a name the notebook does not have (with a suggestion), a value of another type, or a key where
            an address or the name of the key's variable belongs.
    """
    known = inspect_parameters(notebook)
    for name, value in given.items():
        if not known:
            raise UsageError(f"parameter {name}: {notebook.name} has no parameters")
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(
                f"parameter {name}: {notebook.name} has no such parameter{hint} It has: {', '.join(known)}"
            )
        if not known[name].accepts(value):
            raise UsageError(
                f"parameter {name}: expected {known[name].type_name}, got {type(value).__name__} {value!r} "
                f"({known[name].comment or f'default {known[name].default!r}'})"
            )
    for name, check in _SECRET_PLACES.items():
        if isinstance(value := given.get(name), str) and value:
            check(value)
    return {name: parameter.typed(given.get(name, parameter.default)) for name, parameter in known.items()}


# where people put keys by mistake: refused before a run records its parameters, without repeating the value
_SECRET_PLACES: dict[str, Callable[[str], object]] = {
    "base_url": checked_url,
    "api_key_env": lambda name: checked_key(name, os.environ),
}


def parse_parameter(parameter: Parameter, text: str) -> Any:
    """Turn the ``v`` of ``-p k=v`` into the parameter's type.

    Raises:
        UsageError: the text is not of that type.
    """
    if parameter.optional and text in {"None", "null", ""}:
        return None
    kind = parameter.base_type
    if kind == "str":
        return text
    try:
        if kind == "bool":
            return _WORDS[text.lower()]
        if kind in {"int", "float"}:
            # "2,5" is not 25: a comma only separates thousands
            plain = text.replace(",", "") if _THOUSANDS.fullmatch(text.strip()) else text
            return {"int": int, "float": float}[kind](plain)
        try:
            return json.loads(text)
        except ValueError:
            return ast.literal_eval(text)  # written as Python instead of JSON
    except (ValueError, KeyError, SyntaxError) as error:
        raise UsageError(
            f"parameter {parameter.name}: expected {parameter.type_name}, got {text!r} ({parameter.comment})"
        ) from error
