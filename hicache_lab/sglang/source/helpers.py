"""The functions below a check that are not plain arithmetic: fingerprints, compared with those of examined releases.

`symbols` follows what a helper returns at its end. It does not follow loops, early returns, conditions and
handlers, of which the headroom of a control group mostly consists. Such a function is compared statement by statement:
each is written down without names of locals, annotations, comments and log lines, and hashed. The hashes of
the examined releases are data (``guard_helpers.json``, made by ``scripts/record_helpers.py``).
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import lru_cache

from hicache_lab.base.resources import data_dir
from hicache_lab.sglang.releases import ReleaseRules, parse_version
from hicache_lab.sglang.source.facts import UNRECOGNISED, Fact
from hicache_lab.sglang.source.symbols import Scope, definition, number
from hicache_lab.sglang.source.tree import Line, Module

PREFIX = "helper "
_LOGGERS = ("logger", "log", "logging")
# fields that change nothing of what is computed
_IGNORED = {"ctx", "kind", "type_comment", "type_params", "annotation", "returns", "lineno", "simple"}


@lru_cache(maxsize=1)
def known_forms() -> Mapping[str, dict[str, tuple[str, ...]]]:
    """How each helper stands: from which examined release on, one hash a statement, oldest first."""
    stored = json.loads((data_dir() / "guard_helpers.json").read_text(encoding="utf-8"))
    return {name: {form["since"]: tuple(form["hashes"].split()) for form in forms} for name, forms in stored.items()}


def expected_helpers(rules: ReleaseRules) -> dict[str, str]:
    """Which form of each helper a release has, by fact; helpers that came later are left out."""
    release = parse_version(rules.version)
    return {
        PREFIX + name: f"as in {since}"
        for name, forms in known_forms().items()
        for since in forms
        if parse_version(since) <= release
    }


def reached(lines: Iterable[tuple[Module, Line]]) -> Iterator[tuple[Module, ast.FunctionDef]]:
    """The functions below the given lines, without plain arithmetic unless something else stands above it."""
    pending = [
        (*called, False)
        for module, line in lines
        for node in ast.walk(module.body)
        if isinstance(node, ast.expr) and node.lineno == line.number
        for called in _named(module, node)
    ]
    opaque_by_function: dict[int, bool] = {}
    while pending:
        module, function, is_below = pending.pop(0)
        # the memory that a control group leaves stays a name in the arithmetic, so its function is always compared
        is_opaque = is_below or not _is_plain(function) or "cgroup" in function.name
        before = opaque_by_function.get(id(function))
        if before or before == is_opaque:
            continue
        opaque_by_function[id(function)] = is_opaque
        if is_opaque:
            yield module, function
        pending += [(*called, is_opaque) for called in _named(module, function)]


def _named(module: Module, node: ast.AST) -> list[tuple[Module, ast.FunctionDef]]:
    """The functions of the tree that are named in a node."""
    names = dict.fromkeys(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    homes = [definition(module, name) for name in names]
    return [(home, home.functions[key]) for home, key in homes if home is not None and key in home.functions]


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


def helper_fact(module: Module, function: ast.FunctionDef) -> Fact:
    """Which release's form a helper has, or where it first differs from the form that is nearest."""
    name = PREFIX + function.name
    rows = fingerprint(module, function)
    hashes = tuple(digest for digest, _ in rows)
    forms = known_forms().get(function.name, {})
    if function.name in module.constants:
        line = module.line(module.constants[function.name])
        return Fact(name, UNRECOGNISED, f"defined, and then set to {line.text}", line)
    for since, form in forms.items():
        if form == hashes:
            return Fact(name, f"as in {since}", function.name, module.line(function))
    if not forms:
        return Fact(name, UNRECOGNISED, "no examined release has such a function", module.line(function))
    matchers = [SequenceMatcher(None, form, hashes, autojunk=False) for form in forms.values()]
    nearest = max(matchers, key=SequenceMatcher.ratio)
    kind, _, _, at, _ = next(code for code in nearest.get_opcodes() if code[0] != "equal")
    line = rows[min(at, len(rows) - 1)][1]
    place = "before" if at < len(rows) else "after"
    return Fact(
        name, UNRECOGNISED, f"something is missing {place}: {line.text}" if kind == "delete" else line.text, line
    )


def fingerprint(module: Module, function: ast.FunctionDef) -> list[tuple[str, Line]]:
    """A function's statements in order, hashed, and the constants of its module that it uses.

    Args:
        module: the file that it stands in.
        function: the function itself; its own name does not count.

    Returns:
        A hash and a line for the parameters, for each statement, and for each constant.
    """
    canonical = _Canonical(function)
    rows = [_row(module, function, f"def {canonical.text([*function.decorator_list, function.args])}")]
    rows += _block(module, function.body, canonical, "")
    for name in list(canonical.used):
        home, key = definition(module, name)
        if home is not None and key in home.constants and name not in canonical.local:
            constant = home.constants[key]
            value = Scope(home).meaning(constant)
            amount = number(value)
            text = f"{amount:g}" if amount is not None else _Canonical(value).text([constant])
            rows.append(_row(home, constant, f"constant {name} {text}"))
    return rows


def _row(module: Module, node: ast.AST, text: str) -> tuple[str, Line]:
    return hashlib.sha256(text.encode()).hexdigest()[:10], module.line(node)


def _blocks(node: ast.AST) -> list[tuple[str, list[ast.stmt]]]:
    """A statement's blocks by name (a handler and a case are blocks with a head)."""
    return [
        (field, value)
        for field, value in ast.iter_fields(node)
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt | ast.ExceptHandler | ast.match_case)
    ]


def _block(module: Module, body: list[ast.stmt], canonical: _Canonical, path: str) -> Iterator[tuple[str, Line]]:
    """Rows of a block; ``path`` says which blocks it stands in."""
    for statement in body:
        if _is_text(statement) or _is_log(statement):
            continue
        blocks = _blocks(statement)
        line_of = statement if hasattr(statement, "lineno") else blocks[0][1][0]
        yield _row(module, line_of, f"{path} {canonical.text([statement])}")
        for field, block in blocks:
            yield from _block(module, block, canonical, f"{path}/{type(statement).__name__}.{field}")


class _Canonical:
    """Nodes as text, in which a local goes by the place where it first occurs.

    The same on every Python, unlike ``ast.dump`` and ``ast.unparse``. ``used`` collects the names that occur.
    """

    def __init__(self, scope: ast.AST) -> None:
        self.local: set[str] = set()
        self.used: dict[str, None] = {}
        self._numbers: dict[str, int] = {}
        nodes = list(ast.walk(scope))
        keyword_only = {arg.arg for node in nodes if isinstance(node, ast.arguments) for arg in node.kwonlyargs}
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.local.add(node.id)
            elif isinstance(node, ast.arg) and node.arg not in keyword_only:
                self.local.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                self.local.add(node.name)
        self.local -= {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}

    def text(self, nodes: list[ast.AST]) -> str:
        """Nodes without their blocks."""
        return " ".join(self._text(node) for node in nodes)

    def _text(self, value: object) -> str:
        match value:
            case ast.AnnAssign(target=target, value=assigned) if assigned is not None:
                return self._text(ast.Assign([target], assigned))
            case ast.AST():
                if isinstance(value, ast.Name):
                    self.used[value.id] = None
                return f"{type(value).__name__}({' '.join(self._fields(value))})"
            case list():
                return f"[{' '.join(self._text(one) for one in value)}]"
            case str() if value in self.local:
                return f"local {self._numbers.setdefault(value, len(self._numbers))}"
        return repr(value)

    def _fields(self, node: ast.AST) -> Iterator[str]:
        blocks = {field for field, _ in _blocks(node)} if isinstance(node, ast.stmt) else {"body"}
        if isinstance(node, ast.Constant):
            yield repr(node.value)  # never the name of a local, even where the text is the same
            return
        for field, value in ast.iter_fields(node):
            keeps_body = isinstance(node, ast.IfExp | ast.Lambda)
            if field in _IGNORED or value in (None, []) or (field in blocks and not keeps_body):
                continue
            is_name = field in ("id", "arg", "name") and not isinstance(node, ast.keyword)
            yield f"{field}={self._text(value) if is_name or not isinstance(value, str) else repr(value)}"
