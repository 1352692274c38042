"""Record the options of SGLang's launch command: ``record_options.py [RELEASE | RELEASE=PATH_OR_WHEEL] …``.

Without arguments every release that ``releases.py`` or the table knows is fetched (one wheel at a time, into a
temporary folder) and read again; with arguments only those are, and the rest of ``data/options.json`` stays. The
source is read by its syntax: nothing is imported or executed. Texts of SGLang (helps, messages) are not stored.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.base.files import atomic_write
from hicache_lab.base.resources import data_dir
from hicache_lab.sglang.releases import READ, READ_EQUAL, VERIFIED, parse_version
from hicache_lab.sglang.source import Tree, open_tree
from hicache_lab.sglang.source.tree import Module

ABOUT = (
    "Options of SGLang's launch command, written by scripts/record_options.py from each release's ServerArgs. "
    "Per option name: [first release, last release, what it is], oldest first. Left out where usual: dest (the name "
    "itself), type (str), values (how many it takes, 1), action (store). choices: a row of the list 'choices'. "
    "default: only where the source writes it out. abbreviated: runs of releases whose argparse completes prefixes."
)
# arg_utils.add_cli_args_from_dataclass as read: another body makes options from fields in another way
READ_DERIVATIONS = {"4ef8ec64e2cf", "e9d7a70efa12"}
_UNKNOWN = object()
_NO_VALUE = {"store_true", "store_false", "BooleanOptionalAction", "help"}

Spec = dict[str, Any]


class Reader:
    """The expressions of one release, folded as far as their text allows."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        module = tree.find("sglang.srt.server_args")
        if module is None:
            raise InputError(f"{tree.label}: sglang/srt/server_args.py is not in it")
        self.module = module
        self.server_args = self.class_named("ServerArgs", module)[0]
        self.fields = self._fields()

    def class_named(self, name: str, module: Module, hops: int = 4) -> tuple[ast.ClassDef, Module]:
        """A class by its name in a module, through imports."""
        own = next((one for one in module.classes if one.name == name), None)
        if own is not None:
            return own, module
        source, original = module.imports.get(name, ("", name))
        behind = self.tree.find(source) if source and hops else None
        if behind is None:
            raise InputError(f"{self.tree.label}: no class {name} in {module.path}")
        return self.class_named(original, behind, hops - 1)

    def _fields(self) -> dict[str, tuple[ast.AnnAssign, Module]]:
        """Fields of ServerArgs, its namespace classes included, each with the module it stands in."""
        namespaces = self.module.constants.get("_INPUT_NAMESPACES", ast.List([], ast.Load()))
        assert isinstance(namespaces, ast.List)
        classes = [self.class_named(ast.unparse(one), self.module) for one in namespaces.elts]
        return {
            node.target.id: (node, module)
            for owner, module in [*classes, (self.server_args, self.module)]
            for node in owner.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    def value(self, node: ast.expr, module: Module, names: dict[str, ast.expr] | None = None) -> Any:
        """What an expression is: a plain value, a list of them, or ``_UNKNOWN``."""
        names = names or {}
        try:
            plain = ast.literal_eval(node)
            return sorted(plain) if isinstance(plain, set) else plain
        except ValueError:
            pass
        match node:
            case ast.Name(id) if id in names:
                return self._added(self.value(names[id], module, names), id, module)
            case ast.Name(id) if id in module.constants:
                return self._added(self.value(module.constants[id], module), id, module)
            case ast.Name(id) if id in module.imports:
                place, original = module.imports[id]
                behind = self.tree.find(place)
                return _UNKNOWN if behind is None else self.value(ast.Name(original), behind)
            case ast.List(elts) | ast.Tuple(elts) | ast.Set(elts):
                items = []
                for one in elts:
                    part = self.value(one.value if isinstance(one, ast.Starred) else one, module, names)
                    items += part if isinstance(one, ast.Starred) and isinstance(part, list) else [part]
                return _UNKNOWN if _UNKNOWN in items else items
            case ast.BinOp(left, ast.Add(), right):
                parts = [self.value(one, module, names) for one in (left, right)]
                return [*parts[0], *parts[1]] if all(isinstance(one, list | tuple) for one in parts) else _UNKNOWN
            case ast.Attribute(ast.Name(owner), field):
                return self._class_value(owner, field, module)
            case ast.ListComp(elt=ast.Call(ast.Attribute(_, "lower"))):
                source = node.generators[0].iter
                members = self._members(source, module) if isinstance(source, ast.Name) else self.value(source, module)
                return [one.lower() for one in members] if isinstance(members, list) else _UNKNOWN
            case ast.Call():
                return self._call(node, module, names)
        return _UNKNOWN

    def _call(self, node: ast.Call, module: Module, names: dict[str, ast.expr]) -> Any:
        match node:
            case ast.Call(ast.Name("_declared_default"), [ast.Constant(str(name))]) if name in self.fields:
                return self.default(name)
            case ast.Call(ast.Name("list" | "set" | "sorted" | "tuple" | "frozenset"), [inside]):
                items = self.value(inside, module, names)
                return list(items) if isinstance(items, list | tuple) else self._members(inside, module)
            case ast.Call(ast.Attribute(inside, "keys")):
                return self.keys(inside, module)
            case ast.Call(ast.Name(id), []) if id in module.functions:
                # the last way out is the one without a plugin
                end = module.functions[id].body[-1]
                return self.value(end.value, module) if isinstance(end, ast.Return) and end.value else _UNKNOWN
        return _UNKNOWN

    def keys(self, node: ast.expr, module: Module) -> Any:
        """The keys of a dictionary that a class attribute writes out."""
        match node:
            case ast.Attribute(ast.Name(owner), field):
                holder, _ = self.class_named(owner, module)
                for one in holder.body:
                    if isinstance(one, ast.AnnAssign | ast.Assign) and field in ast.unparse(one).split("=")[0]:
                        keys = one.value.keys if isinstance(one.value, ast.Dict) else []
                        return [key.value for key in keys if isinstance(key, ast.Constant)] or _UNKNOWN
        return _UNKNOWN

    def _members(self, node: ast.expr, module: Module) -> Any:
        """The names of an enumeration's members."""
        if isinstance(node, ast.Attribute):
            return self.keys(node, module)
        if not isinstance(node, ast.Name) or not node.id[0].isupper():
            return _UNKNOWN
        owner, _ = self.class_named(node.id, module)
        return [one.targets[0].id for one in owner.body if isinstance(one, ast.Assign)]  # type: ignore[attr-defined]

    def _class_value(self, owner: str, field: str, module: Module) -> Any:
        if owner == "ServerArgs":
            return self.default(field)
        if owner not in {*module.imports, *(one.name for one in module.classes)}:
            return _UNKNOWN
        holder, place = self.class_named(owner, module)
        written = {ast.unparse(one.targets[0]): one.value for one in holder.body if isinstance(one, ast.Assign)}
        return self.value(written[field], place, written) if field in written else _UNKNOWN

    def _added(self, value: Any, name: str, module: Module) -> Any:
        """A list together with what an ``add`` beside it puts in under some condition."""
        if not isinstance(value, list):
            return value
        more = [
            node.args[0].value
            for node in ast.walk(module.body)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) == f"{name}.add"
            and isinstance(node.args[0], ast.Constant)
        ]
        return [*value, *more]

    def default(self, name: str) -> Any:
        """A field's default where it is a plain value."""
        node, module = self.fields[name]
        return _UNKNOWN if node.value is None else self.value(node.value, module)

    def options(self) -> Iterator[tuple[list[str], Spec]]:
        """Every option: its names, and what it is."""
        yield ["--help"], {"dest": "help", "action": "help", "values": "0"}
        function = next(
            one for one in self.server_args.body if isinstance(one, ast.FunctionDef) and one.name == "add_cli_args"
        )
        names = {
            node.targets[0].id: node.value
            for node in function.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "add_cli_args_from_dataclass":
                yield from self._derived()
            elif isinstance(node, ast.Call) and any(ast.unparse(one) == "parser" for one in node.args):
                raise InputError(f"{self.tree.label}: {ast.unparse(node)} adds options in a way that is not read yet")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.add_argument":
                keywords = {one.arg or "**": one.value for one in node.keywords}
                options = [self.value(one, self.module) for one in node.args]
                yield options, self._spec(options, keywords, self.module, names)

    def _derived(self) -> Iterator[tuple[list[str], Spec]]:
        """Options made from annotated fields, as ``add_cli_args_from_dataclass`` makes them."""
        source = self.tree.find("sglang.srt.arg_groups.arg_utils")
        function = source.functions["add_cli_args_from_dataclass"] if source else None
        digest = hashlib.sha256("".join(map(ast.dump, function.body[1:])).encode()).hexdigest() if function else ""
        if digest[:12] not in READ_DERIVATIONS:
            raise InputError(
                f"{self.tree.label}: add_cli_args_from_dataclass is new ({digest[:12]}): read it, then name it here"
            )
        for name, (node, module) in self.fields.items():
            annotation = self._annotation(node.annotation)
            if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) not in {"A", "Annotated"}:
                continue
            assert isinstance(annotation.slice, ast.Tuple)
            kind, *rest = annotation.slice.elts
            keywords = next(
                ({one.arg or "**": one.value for one in arg.keywords} for arg in rest if self._is_arg(arg)), {}
            )
            if not self._is_off(keywords.get("no_cli")):
                yield self._from_field(name, kind, keywords, module)

    def _annotation(self, node: ast.expr) -> ast.expr:
        return ast.parse(node.value, mode="eval").body if isinstance(node, ast.Constant) else node

    def _is_arg(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) == "Arg"

    def _is_off(self, node: ast.expr | None) -> bool:
        return isinstance(node, ast.Constant) and node.value is True

    def _from_field(
        self, name: str, kind: ast.expr, keywords: dict[str, ast.expr], module: Module
    ) -> tuple[list[str], Spec]:
        first = self.value(keywords["cli_name"], module) if "cli_name" in keywords else "--" + name.replace("_", "-")
        options = [first, *(self.value(keywords["aliases"], module) if "aliases" in keywords else [])]
        kind = _optional(module.constants.get(ast.unparse(kind), kind))
        made: dict[str, ast.expr] = {"dest": ast.Constant(name)}
        made |= {key: keywords[key] for key in ("choices", "nargs", "action") if key in keywords}
        if isinstance(extra := keywords.get("action_kwargs"), ast.Dict):
            made |= {k.value: v for k, v in zip(extra.keys, extra.values, strict=True) if isinstance(k, ast.Constant)}
        parser = keywords.get("type_parser")
        head = ast.unparse(kind.value) if isinstance(kind, ast.Subscript) else ast.unparse(kind)
        inside = kind.slice if isinstance(kind, ast.Subscript) else None
        if "action" not in keywords:
            if head == "Literal" and inside is not None:
                literals = inside if isinstance(inside, ast.Tuple) else ast.List([inside], ast.Load())
                made.setdefault("choices", literals)
                made.pop("nargs", None)
            elif head in {"List", "list"} and parser is None:
                made.setdefault("nargs", ast.Constant("+"))
                kind = inside or ast.Name("str")
            elif head == "bool":
                made = {"dest": made["dest"], "action": ast.Constant("store_true")}
            made["type"] = parser or (kind if ast.unparse(kind) in {"int", "float"} else ast.Name("str"))
        spec = self._spec(options, made, module, {})
        if (default := self.default(name)) is not _UNKNOWN:
            spec["default"] = default
        return options, spec

    def _spec(
        self, options: Sequence[str], keywords: dict[str, ast.expr], module: Module, names: dict[str, ast.expr]
    ) -> Spec:
        """What ``add_argument`` makes of its keywords, defaults left out."""
        if "**" in keywords or not all(isinstance(one, str) for one in options):
            raise InputError(f"{self.tree.label}: the options {options} are written in a way that is not read yet")
        spec: Spec = {"dest": self.value(keywords["dest"], module) if "dest" in keywords else None}
        spec["dest"] = spec["dest"] or options[0].lstrip("-").replace("-", "_")
        action = keywords.get("action")
        name = "store" if action is None else action.value if isinstance(action, ast.Constant) else _last(action)
        values = str(self.value(keywords["nargs"], module)) if "nargs" in keywords else None
        if isinstance(action, ast.Name | ast.Attribute) and name != "BooleanOptionalAction":
            name, values = self._custom(name, values, keywords)
        spec["action"] = name
        spec["values"] = "0" if name in _NO_VALUE else "1" if values in {None, "None"} else values
        if (kind := keywords.get("type")) is not None and name not in _NO_VALUE:
            spec["type"] = _last(kind)
        if "choices" in keywords:
            choices = self.value(keywords["choices"], module, names)
            if choices is _UNKNOWN:
                print(f"{self.tree.label}: choices of {options[0]} are not written out", file=sys.stderr)
            elif choices:
                spec["choices"] = list(dict.fromkeys(map(str, choices)))
        default = self.value(keywords["default"], module, names) if "default" in keywords else _UNKNOWN
        if default is not _UNKNOWN and spec["values"] != "0":
            spec["default"] = default
        return spec

    def _custom(self, name: str, values: str | None, keywords: dict[str, ast.expr]) -> tuple[str, str | None]:
        """A release's own action: whether it stops the start, and how many values it takes."""
        owner, _ = self.class_named(name, self.module)
        methods = {one.name: one for one in owner.body if isinstance(one, ast.FunctionDef)}
        if values is None and (init := methods.get("__init__")) is not None:
            written = dict(zip([one.arg for one in init.args.args][::-1], init.args.defaults[::-1], strict=False))
            values = ast.unparse(written["nargs"]) if "nargs" in written else None
        body = methods["__call__"].body
        first = body[0]
        stops = isinstance(first, ast.Raise) or (
            isinstance(first, ast.If) and "error_message" in ast.unparse(first.test) and "error_message" in keywords
        )
        # whatever else it does, a switch takes no value and anything else stores one
        return "stops" if stops else "store_true" if values == "0" else "store", values


def _last(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _optional(node: ast.expr) -> ast.expr:
    """``X`` of ``Optional[X]``, ``Union[X, None]`` and ``X | None``."""
    parts: list[ast.expr] = []
    match node:
        case ast.Subscript(ast.Name("Optional"), inside):
            return inside
        case ast.Subscript(ast.Name("Union"), ast.Tuple(elts)):
            parts = elts
        case ast.BinOp(left, ast.BitOr(), right):
            parts = [left, right]
    given = [one for one in parts if ast.unparse(one) != "None"]
    return given[0] if len(given) == 1 else node


def read_options(tree: Tree) -> dict[str, Spec]:
    """Option name → what it is, the ``--no-`` forms included."""
    options: dict[str, Spec] = {}
    for names, spec in Reader(tree).options():
        forms = list(names)
        if spec["action"] == "BooleanOptionalAction":
            forms += ["--no-" + name.removeprefix("--") for name in names if name.startswith("--")]
        for name in forms:
            own = dict(spec)
            if own["dest"] == name.lstrip("-").replace("-", "_"):
                del own["dest"]
            for key, usual in (("type", "str"), ("values", "1"), ("action", "store")):
                if own.get(key) == usual:
                    del own[key]
            options[name] = own
    return options


def abbreviated(tree: Tree) -> bool:
    """Whether the release's argparse completes prefixes."""
    module = tree.find("sglang.srt.server_args")
    assert module is not None
    maker = module.functions["prepare_server_args"]
    calls = [node for node in ast.walk(maker) if isinstance(node, ast.Call) and _last(node.func) == "ArgumentParser"]
    off = [one for call in calls for one in call.keywords if one.arg == "allow_abbrev"]
    if not calls:
        raise InputError(f"{tree.label}: prepare_server_args makes no ArgumentParser")
    return not off


def expand(raw: dict[str, Any]) -> dict[str, dict[str, Spec]]:
    """Release → its options, from the stored table."""
    releases = raw["releases"]
    table: dict[str, dict[str, Spec]] = {release: {} for release in releases}
    for name, runs in raw["options"].items():
        for first, last, spec in runs:
            own = spec | ({"choices": raw["choices"][spec["choices"]]} if "choices" in spec else {})
            for release in releases[releases.index(first) : releases.index(last) + 1]:
                table[release][name] = own
    return table


def compact(table: dict[str, dict[str, Spec]], completes: dict[str, bool]) -> str:
    """The stored form: one line an option name, choices once."""
    releases = sorted(table, key=parse_version)
    choices: list[list[str]] = []
    lines = []
    for name in sorted({name for options in table.values() for name in options}):
        runs: list[list[Any]] = []
        for at, release in enumerate(releases):
            if name not in table[release]:
                continue
            spec = dict(table[release][name])
            if "choices" in spec:
                if spec["choices"] not in choices:
                    choices.append(spec["choices"])
                spec["choices"] = choices.index(spec["choices"])
            if runs and runs[-1][2] == spec and runs[-1][1] == releases[at - 1]:
                runs[-1][1] = release
            else:
                runs.append([release, release, spec])
        lines.append(f"{json.dumps(name)}: {json.dumps(runs)}")
    spans: list[list[str]] = []
    for at, release in enumerate(releases):
        if completes[release] and spans and spans[-1][1] == releases[at - 1]:
            spans[-1][1] = release
        elif completes[release]:
            spans.append([release, release])
    rows = ",\n".join(json.dumps(one) for one in choices)
    head = {"about": ABOUT, "releases": releases, "abbreviated": spans}
    start = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    options = ",\n".join(lines)
    return f'{{\n{start},\n"choices": [\n{rows}\n],\n"options": {{\n{options}\n}}\n}}\n'


def fetched(release: str, folder: Path) -> Path:
    """The release's wheel, downloaded."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), f"sglang=={release}"], check=True)
    return next(folder.glob("*.whl"))


def main(arguments: list[str]) -> int:
    """Read the releases and write the table."""
    file = data_dir() / "options.json"
    raw = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    table = expand(raw) if raw else {}
    completes = {
        release: any(parse_version(a) <= parse_version(release) <= parse_version(b) for a, b in raw["abbreviated"])
        for release in (raw["releases"] if raw else ())
    }
    wanted = arguments or sorted({*VERIFIED, *READ_EQUAL, *READ, *table}, key=parse_version)
    for release, _, path in (one.partition("=") for one in wanted):
        with tempfile.TemporaryDirectory() as folder:
            tree = open_tree(Path(path) if path else fetched(release, Path(folder)))
            table[release], completes[release] = read_options(tree), abbreviated(tree)
        print(f"{release}: {len(table[release])} option names")
    atomic_write(file, compact(table, completes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
