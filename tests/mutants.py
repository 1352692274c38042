"""One change at a time in one function: every operator, every constant, every name of an attribute, every statement."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.FloorDiv,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
CALLS = {"min": "max", "max": "min", "sum": "max", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """A module's text with one change, and the lines on which the changed statement stands."""

    what: str
    first: int
    last: int
    text: str


def mutants(text: str, name: str) -> Iterator[Mutant]:
    """Every single change of the named function, its log lines and its documentation left alone."""
    function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    untouched = {
        id(inner)
        for node in ast.walk(function)
        if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_log(node))
        for inner in ast.walk(node)
    } | {id(n) for n in _annotations(function)}
    for node in ast.walk(function):
        if id(node) in untouched or not isinstance(node, ast.expr | ast.stmt):
            continue
        for what, changed in _changes(node):
            first, last = node.lineno, node.end_lineno or node.lineno
            yield Mutant(what, first, last, _spliced(text, node, changed))


def _is_log(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith("logger.")


def _annotations(function: ast.FunctionDef) -> Iterator[ast.AST]:
    for note in [function.returns, *(a.annotation for a in [*function.args.args, *function.args.kwonlyargs])]:
        yield from ast.walk(note) if note else ()


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    def without(**fields: object) -> str:
        changed = deepcopy(node)
        for field, value in fields.items():
            setattr(changed, field, value)
        return f"({ast.unparse(changed)})"

    match node:
        case ast.Constant(value=str(value)):
            yield f"constant {value!r}", f"({value + 'x'!r})"
        case ast.Constant(value=bool(value)):
            yield f"constant {value!r}", repr(not value)
        case ast.Constant(value=None):
            yield "constant None", "0"
        case ast.Constant(value=value):
            yield f"constant {value!r}", f"({value!r} + 1)"
        case ast.BinOp(op=op) | ast.BoolOp(op=op):
            yield f"operator {type(op).__name__}", without(op=OPERATORS[type(op)]())
        case ast.Compare(ops=[op]):
            yield f"comparison {type(op).__name__}", without(ops=[OPERATORS[type(op)]()])
        case ast.UnaryOp(operand=operand):
            yield f"operator {type(node.op).__name__}", f"({ast.unparse(operand)})"
        case ast.IfExp(body=body, orelse=orelse):
            yield "branches of a conditional", without(body=orelse, orelse=body)
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield f"call {name}", without(func=ast.Name(CALLS[name]))
        case ast.Attribute(attr=name) if isinstance(node.ctx, ast.Load):
            yield f"attribute {name}", without(attr=name + "_")
        case ast.Break() | ast.Continue() | ast.Return() | ast.Raise() | ast.Assign() | ast.AugAssign() | ast.Expr():
            yield f"statement {ast.unparse(node)}", "pass"


def _spliced(text: str, node: ast.expr | ast.stmt, changed: str) -> str:
    """The text with a node written anew; its lines stay where they are."""
    lines = text.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = b"".join([*lines[:first], lines[first][: node.col_offset]])
    after = b"".join([lines[last][node.end_col_offset :], *lines[last + 1 :]])
    kept = "" if isinstance(node, ast.stmt) else "\n" * (last - first)
    whole = before + (changed[:-1] + kept + changed[-1] if kept else changed).encode() + after
    ast.parse(whole)
    return whole.decode()
