"""The functions below a check that are no plain arithmetic: fingerprints, compared with those of examined releases.

`symbols` follows what a helper returns at its end. Loops, early returns, conditions and handlers it does not follow,
and the headroom of a control group is little else. Such a function is compared statement by statement: each is written
down in a form that knows no names of locals, no annotations, no comments and no log lines, and hashed. The hashes of
the examined releases are data (``guard_helpers.json``, made by ``scripts/record_helpers.py``).
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

from hicache_lab.base.resources import data_dir
from hicache_lab.sglang.releases import ReleaseRules, parse_version
from hicache_lab.sglang.source.facts import UNRECOGNISED, Fact
from hicache_lab.sglang.source.symbols import Scope, definition, number
from hicache_lab.sglang.source.tree import Line, Module

PREFIX = "helper "
_LOGGERS = ("logger", "log", "logging")
# what says nothing of what is computed
_SILENT = {"ctx", "kind", "type_comment", "type_params", "annotation", "returns", "lineno", "simple"}


@dataclass(frozen=True)
class Form:
    """How one helper stands in the releases from ``since`` on: one hash a statement, in order."""

    since: str
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        return f"as in {self.since}"


@lru_cache(maxsize=1)
def known_forms() -> Mapping[str, tuple[Form, ...]]:
    """The forms of each helper in the examined releases, oldest first."""
    stored = json.loads((data_dir() / "guard_helpers.json").read_text(encoding="utf-8"))
    return {
        name: tuple(Form(form["since"], tuple(form["hashes"].split())) for form in forms)
        for name, forms in stored.items()
    }


def expected_helpers(rules: ReleaseRules) -> dict[str, str]:
    """Which form of each helper a release has, by fact; helpers that came later are left out."""
    release = parse_version(rules.version)
    expected = {}
    for name, forms in known_forms().items():
        for form in forms:
            if parse_version(form.since) <= release:
                expected[PREFIX + name] = str(form)
    return expected


def helper_facts(lines: Iterable[tuple[Module, Line]]) -> Iterator[Fact]:
    """One fact for each helper that is called from the given lines and that `symbols` does not follow."""
    for module, function in reached(lines):
        yield _fact(module, function)


def reached(lines: Iterable[tuple[Module, Line]]) -> Iterator[tuple[Module, ast.FunctionDef]]:
    """The functions below the given lines, plain arithmetic left out unless something that is none stands above it."""
    pending = [
        (*found, False)
        for module, line in lines
        for node in ast.walk(module.body)
        if isinstance(node, ast.expr) and node.lineno == line.number
        for found in _named(module, node)
    ]
    seen: set[tuple[int, bool]] = set()
    told: set[int] = set()
    while pending:
        module, function, below = pending.pop(0)
        # a control group's grant stays a name in the arithmetic, so even a plain one is not followed
        opaque = below or not _is_plain(function) or "cgroup" in function.name
        if (id(function), opaque) in seen:
            continue
        seen.add((id(function), opaque))
        if opaque and id(function) not in told:
            told.add(id(function))
            yield module, function
        pending += [(*found, opaque) for found in _named(module, function)]


def _named(module: Module, node: ast.AST) -> list[tuple[Module, ast.FunctionDef]]:
    """The functions of the tree that are named in a node."""
    found = []
    for name in dict.fromkeys(n.id for n in ast.walk(node) if isinstance(n, ast.Name)):
        home, key = definition(module, name)
        if home is not None and key in home.functions:
            found.append((home, home.functions[key]))
    return found


def _is_plain(function: ast.FunctionDef) -> bool:
    """Whether a function is assignments and a last return, which `symbols` follows whole."""
    body = [statement for statement in function.body if not _is_text(statement)]
    *before, last = body or [ast.Pass()]
    return (
        isinstance(last, ast.Return)
        and not function.decorator_list
        and all(isinstance(statement, ast.Assign | ast.AnnAssign) for statement in before)
    )


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_log(statement: ast.stmt) -> bool:
    """A log line, unless its arguments could do more than be shown."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=args, keywords=keywords)):
            inner = [node for argument in (*args, *keywords) for node in ast.walk(argument)]
            return name in _LOGGERS and not any(isinstance(n, ast.Call | ast.NamedExpr | ast.Await) for n in inner)
    return False


@dataclass(frozen=True)
class _Row:
    """One statement of a helper, as it is compared and where it stands."""

    digest: str
    line: Line


def _fact(module: Module, function: ast.FunctionDef) -> Fact:
    name = PREFIX + function.name
    rows = fingerprint(module, function)
    hashes = tuple(row.digest for row in rows)
    forms = known_forms().get(function.name, ())
    if function.name in module.constants:
        line = module.line(module.constants[function.name])
        return Fact(name, UNRECOGNISED, f"defined, and then set to {line.text}", line)
    for form in forms:
        if form.hashes == hashes:
            return Fact(name, str(form), function.name, module.line(function))
    if not forms:
        return Fact(name, UNRECOGNISED, "no examined release has such a function", module.line(function))
    nearest = max(forms, key=lambda form: _alike(form.hashes, hashes).ratio())
    return _first_difference(name, nearest, rows)


def _alike(known: tuple[str, ...], found: tuple[str, ...]) -> SequenceMatcher[str]:
    return SequenceMatcher(None, known, found, autojunk=False)


def _first_difference(name: str, form: Form, rows: list[_Row]) -> Fact:
    matcher = _alike(form.hashes, tuple(row.digest for row in rows))
    kind, _, _, at, _ = next(code for code in matcher.get_opcodes() if code[0] != "equal")
    line = rows[min(at, len(rows) - 1)].line
    if kind == "delete":
        place = "before" if at < len(rows) else "after"
        return Fact(name, UNRECOGNISED, f"something is missing {place}: {line.text}", line)
    return Fact(name, UNRECOGNISED, line.text, line)


def fingerprint(module: Module, function: ast.FunctionDef) -> list[_Row]:
    """A function's statements in order, hashed, and the constants of its module that it uses.

    Args:
        module: the file that it stands in.
        function: the function itself; its own name does not count.

    Returns:
        One row for the parameters, one for each statement, one for each constant.
    """
    names = _Names(function)
    parameters = names.words([*function.decorator_list, function.args])
    rows = [_row(module, function, f"def {parameters}")]
    rows += _block(module, function.body, names, "")
    for name in _used(function):
        home, key = definition(module, name)
        if home is not None and key in home.constants and name not in names.local:
            value = Scope(home).meaning(home.constants[key])
            amount = number(value)
            said = f"{amount:g}" if amount is not None else _Names(value).words([home.constants[key]])
            rows.append(_row(home, home.constants[key], f"constant {name} {said}"))
    return rows


def _row(module: Module, node: ast.AST, words: str) -> _Row:
    return _Row(hashlib.sha256(words.encode()).hexdigest()[:10], module.line(node))


def _used(function: ast.FunctionDef) -> dict[str, None]:
    """The names that a function uses beside its log lines, in order."""
    parts: list[ast.AST] = [function.args]
    for statement in _statements(function.body):
        if not _is_log(statement):
            parts += _parts(statement)[0]
    return dict.fromkeys(node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for _, block in _parts(statement)[1]:
            yield from _statements(block)


def _parts(node: ast.AST) -> tuple[list[ast.AST], list[tuple[str, list[ast.stmt]]]]:
    """A statement's own expressions, and its blocks by name (a handler and a case are blocks with a head)."""
    own: list[ast.AST] = []
    blocks: list[tuple[str, list[ast.stmt]]] = []
    for field, value in ast.iter_fields(node):
        if field in _SILENT:
            continue
        values = value if isinstance(value, list) else [value]
        if values and isinstance(values[0], ast.stmt | ast.ExceptHandler | ast.match_case):
            blocks.append((field, values))
        else:
            own += [one for one in values if isinstance(one, ast.AST)]
    return own, blocks


def _block(module: Module, body: list[ast.stmt], names: _Names, path: str) -> Iterator[_Row]:
    """Rows of a block; ``path`` says which blocks it stands in."""
    for statement in body:
        if _is_text(statement) or _is_log(statement):
            continue
        _, blocks = _parts(statement)
        line_of = statement if hasattr(statement, "lineno") else blocks[0][1][0]
        yield _row(module, line_of, f"{path} {names.words([statement])}")
        for field, block in blocks:
            yield from _block(module, block, names, f"{path}/{type(statement).__name__}.{field}")


class _Names:
    """Nodes as words, in which a local goes by the place where it first occurs."""

    def __init__(self, scope: ast.AST) -> None:
        self.local: set[str] = set()
        self._numbers: dict[str, int] = {}
        keyword_only = {
            argument.arg for node in ast.walk(scope) if isinstance(node, ast.arguments) for argument in node.kwonlyargs
        }
        for node in ast.walk(scope):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.local.add(node.id)
            elif isinstance(node, ast.arg) and node.arg not in keyword_only:
                self.local.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                self.local.add(node.name)
        for node in ast.walk(scope):
            if isinstance(node, ast.Global | ast.Nonlocal):
                self.local -= set(node.names)

    def words(self, nodes: list[ast.AST]) -> str:
        """Nodes without their blocks; the same on every Python, unlike ``ast.dump`` and ``ast.unparse``."""
        return " ".join(self._word(node) for node in nodes)

    def _word(self, value: object) -> str:
        match value:
            case ast.AnnAssign(target=target, value=given) if given is not None:
                return self._word(ast.Assign([target], given))
            case ast.AST():
                return f"{type(value).__name__}({' '.join(self._fields(value))})"
            case list():
                return f"[{' '.join(self._word(one) for one in value)}]"
            case str() if value in self.local:
                return f"local {self._numbers.setdefault(value, len(self._numbers))}"
        return repr(value)

    def _fields(self, node: ast.AST) -> Iterator[str]:
        blocks = {field for field, _ in _parts(node)[1]} if isinstance(node, ast.stmt) else {"body"}
        if isinstance(node, ast.Constant):
            yield repr(node.value)  # a text that happens to be a local's name is none
            return
        for field, value in ast.iter_fields(node):
            keeps_body = isinstance(node, ast.IfExp | ast.Lambda)
            if field in _SILENT or value in (None, []) or (field in blocks and not keeps_body):
                continue
            named = field in ("id", "arg", "name") and not isinstance(node, ast.keyword)
            yield f"{field}={self._word(value) if named or not isinstance(value, str) else repr(value)}"
