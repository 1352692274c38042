"""Arithmetic by symbol: follow a function's assignments and say what an expression means in its own inputs.

Only assignments, branches, constants and plain calls are followed. Anything else is left as written, so
that a comparison with a known form fails rather than guesses.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field

from hicache_lab.sglang.source.tree import Line, Module

KEPT = frozenset({"size", "page_size", "size_per_token", "host_size", "host_to_device_ratio"})
"""Quantities that stay symbols: the formulas are compared in these words."""

MAX_DEPTH = 6
MAX_NODES = 200
_FOLD: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: lambda a, b: int(a) << min(int(b), 128),
}


def number(node: ast.AST) -> int | float | None:
    """The value of a numeric constant."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _folded(node: ast.BinOp) -> ast.expr:
    """The same operation with constants computed and commutative operands in a fixed order."""
    left, right = number(node.left), number(node.right)
    if left is not None and right is not None:
        if isinstance(node.op, ast.Pow) and 0 <= right <= 64 and abs(left) <= 2**16:
            return ast.Constant(left**right)
        if type(node.op) in _FOLD and not (isinstance(node.op, ast.FloorDiv) and not right):
            return ast.Constant(_FOLD[type(node.op)](left, right))
    if isinstance(node.op, ast.Mult | ast.Add) and ast.unparse(node.left) < ast.unparse(node.right):
        return ast.BinOp(node.right, node.op, node.left)
    return node


@dataclass
class Scope:
    """Names of one function while it is read; ``names`` maps a local or ``self.x`` to what it stands for."""

    module: Module
    names: dict[str, ast.expr] = field(default_factory=dict)
    seen: list[Line] = field(default_factory=list)
    depth: int = 0
    origin: dict[str, tuple[Line, ...]] = field(default_factory=dict)

    def branch(self) -> Scope:
        """The same scope for one side of an ``if``."""
        return Scope(self.module, dict(self.names), self.seen, self.depth, dict(self.origin))

    def meaning(self, node: ast.expr) -> ast.expr:
        """The expression in the function's own inputs."""
        return _Meaning(self).visit(deepcopy(node))  # type: ignore[no-any-return]

    def text(self, node: ast.expr) -> str:
        """`meaning` as source text."""
        return ast.unparse(self.meaning(node))

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Remember what a name or ``self.x`` stands for from here on."""
        name = own_name(target)
        if name is not None and name not in KEPT:
            reading = Scope(self.module, self.names, [], self.depth, self.origin)
            meaning = reading.meaning(value)
            # an expression this large is not sizing arithmetic; it stays a symbol
            self.names[name] = meaning if sum(1 for _ in ast.walk(meaning)) < MAX_NODES else ast.Name(name)
            self.origin[name] = (self.module.line(value), *reading.seen)
        elif name is None and isinstance(target, ast.Tuple):
            for element in target.elts:
                self.names.pop(own_name(element) or "", None)


def own_name(node: ast.AST) -> str | None:
    """``x`` of ``x`` or ``self.x``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


class _Meaning(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def _named(self, name: str) -> ast.expr:
        scope = self.scope
        if name in KEPT:
            return ast.Name(name)
        if name in scope.names:
            _remember(scope, *scope.origin.get(name, ()))
            return scope.names[name]
        module, key = definition(scope.module, name)
        if module is not None and key in module.constants:
            value = Scope(module).meaning(module.constants[key])
            if number(value) is not None:
                _remember(scope, module.line(module.constants[key]))
                return value
        return ast.Name(name)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._named(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if own_name(node) is not None:
            return self._named(node.attr)
        return ast.Attribute(self.visit(node.value), node.attr)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return _folded(ast.BinOp(self.visit(node.left), node.op, self.visit(node.right)))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        args = [self.visit(argument) for argument in node.args]
        name = node.func.id if isinstance(node.func, ast.Name) else None
        # a tree reads a control group's headroom from files, which cannot be followed: the function stays a name
        if name is not None and "cgroup" not in name and self.scope.depth < MAX_DEPTH:
            module, key = definition(self.scope.module, name)
            if module is not None and key in module.functions:
                value = returned(module, module.functions[key], args, self.scope)
                if value is not None:
                    return value
        func: ast.expr = self.visit(node.func) if isinstance(node.func, ast.Attribute) else node.func
        return ast.Call(func, args, [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords])


def definition(module: Module, name: str, hops: int = 4) -> tuple[Module | None, str]:
    """The module that defines a name, through imports."""
    if name in module.functions or name in module.constants:
        return module, name
    if name in module.imports and hops:
        source, original = module.imports[name]
        behind = module.tree.find(source)
        if behind is not None:
            return definition(behind, original, hops - 1)
    return None, name


def _remember(scope: Scope, *lines: Line) -> None:
    scope.seen += [line for line in lines if line not in scope.seen]


def returned(module: Module, function: ast.FunctionDef, args: list[ast.expr], caller: Scope) -> ast.expr | None:
    """What a function returns at its end, in its caller's words; None when that is not plain arithmetic.

    Earlier returns, which answer special cases, are not followed; a function with a loop is not arithmetic.
    """
    if any(isinstance(node, ast.For | ast.While) for node in ast.walk(function)):
        return None
    scope = Scope(module, {}, caller.seen, caller.depth + 1)
    for parameter, value in zip(function.args.args, args, strict=False):
        scope.names[parameter.arg] = value
    last = function.body[-1]
    if not isinstance(last, ast.Return) or last.value is None:
        return None
    for _ in walk(function.body[:-1], scope):
        pass
    _remember(caller, module.line(last))
    return scope.meaning(last.value)


def walk(statements: list[ast.stmt], scope: Scope) -> Iterator[tuple[ast.stmt, Scope]]:
    """Every statement with the scope as it is just before it; branches that meet again are merged."""
    for statement in statements:
        yield statement, scope
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                scope.assign(target, statement.value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            scope.assign(statement.target, statement.value)
        elif isinstance(statement, ast.AugAssign):
            name = own_name(statement.target)
            if name is not None:
                scope.assign(statement.target, ast.BinOp(deepcopy(statement.target), statement.op, statement.value))
        elif isinstance(statement, ast.If):
            sides = [scope.branch(), scope.branch()]
            for side, body in zip(sides, (statement.body, statement.orelse), strict=True):
                yield from walk(body, side)
            _merge(scope, statement, sides)
        elif isinstance(statement, ast.Try | ast.With):
            yield from walk(statement.body, scope)
        elif isinstance(statement, ast.For | ast.While):
            yield from walk(statement.body, scope.branch())


def _merge(scope: Scope, statement: ast.If, sides: list[Scope]) -> None:
    """After an ``if``: a name that differs by branch becomes ``choice(then, else)``."""
    bodies = zip(sides, (statement.body, statement.orelse), strict=True)
    staying = [side for side, body in bodies if not (body and isinstance(body[-1], ast.Return | ast.Raise))]
    if len(staying) == 1:
        scope.names, scope.origin = staying[0].names, staying[0].origin
        return
    first, second = sides
    for name in sorted(set(first.names) | set(second.names)):
        values = [side.names.get(name, ast.Name(name)) for side in (first, second)]
        texts = [ast.unparse(value) for value in values]
        scope.names[name] = values[0] if texts[0] == texts[1] else ast.Call(ast.Name("choice"), values, [])
        lines = (*first.origin.get(name, ()), *second.origin.get(name, ()))
        scope.origin[name] = tuple(dict.fromkeys(lines))
