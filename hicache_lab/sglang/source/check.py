"""The check of host memory: what is compared, with which budget, and which number its refusal prints."""

from __future__ import annotations

import ast

from hicache_lab.base.units import GB
from hicache_lab.sglang.source.facts import UNRECOGNISED, Constructor, Fact, normal_form
from hicache_lab.sglang.source.symbols import Scope, number
from hicache_lab.sglang.source.tree import Line, Module

GUARD_WORDS = "Not enough host memory"
HOST_AVAILABLE = normal_form("psutil.virtual_memory().available")
SIGNS: dict[type[ast.cmpop], str] = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<="}
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}


def says_refusal(node: ast.AST) -> bool:
    """Whether a string is the refusal of a pool (other messages merely begin like it)."""
    return isinstance(node, ast.JoinedStr) and GUARD_WORDS in _words(node) and "but only have" in _words(node)


def read_check(pool: Constructor, statement: ast.stmt, scope: Scope, requested: str | None) -> None:
    """Read one check; ``requested`` is what it must compare, None when any amount will do."""
    raised = refusal(statement)
    if raised is None or not isinstance(statement, ast.If):
        return
    module = scope.module
    line = module.line(statement)
    reading = Scope(module, scope.names, [], scope.depth, scope.origin)
    test = reading.meaning(statement.test)
    sides = _sides(test, requested)
    sign = f"requested {SIGNS.get(sides[1], UNRECOGNISED)} budget" if sides else UNRECOGNISED
    pool.state(Fact("guard", sign, ast.unparse(test), line))
    budget = sides[2] if sides else None
    for fact in read_budget(budget, ast.unparse(budget) if budget is not None else "", line):
        pool.state(fact)
    pool.state(_shown(raised, reading, sides, module))
    pool.guard += dict.fromkeys([line, *reading.seen])


def refusal(statement: ast.stmt) -> ast.Call | None:
    """The exception raised directly below an ``if``, when it is the one about host memory."""
    for inner in statement.body if isinstance(statement, ast.If) else []:
        if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call) and GUARD_WORDS in _words(inner.exc):
            return inner.exc
    return None


def _words(node: ast.AST) -> str:
    return "".join(str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant))


def _sides(test: ast.expr, requested: str | None) -> tuple[ast.expr, type[ast.cmpop], ast.expr] | None:
    """Requested, comparison, budget of a check, whichever way round it is written."""
    match test:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SIGNS:
            if _is_budget(right) if requested is None else ast.unparse(left) == requested:
                return left, type(op), right
            if _is_budget(left) if requested is None else ast.unparse(right) == requested:
                return right, _FLIPPED[type(op)], left
    return None


def _is_budget(node: ast.expr) -> bool:
    """Whether an expression is available memory less a reserve, divided or not."""
    return all(fact.value != UNRECOGNISED for fact in read_budget(node, "", Line("", 0, "")))


def read_budget(budget: ast.expr | None, text: str, line: Line) -> list[Fact]:
    """Reserve, division by ranks and view of memory of a budget expression."""
    divides: bool | str = False
    rest = budget
    match budget:
        case ast.BinOp(left=left, op=op, right=right) if not isinstance(op, ast.Sub):
            divides = (isinstance(op, ast.FloorDiv) and _is_ranks(right)) or UNRECOGNISED
            rest = left
    reserve: float | int | str = UNRECOGNISED
    sees: bool | str = UNRECOGNISED
    match rest:
        case ast.BinOp(left=available, op=ast.Sub(), right=right):
            amount = number(right)
            reserve = UNRECOGNISED if amount is None else amount
            sees = _view(available)
    return [
        Fact("reserve_bytes", reserve, text, line),
        Fact("guard_divides_by_ranks", divides, text, line),
        Fact("guard_reads_cgroup", sees, text, line),
    ]


def _is_ranks(node: ast.expr) -> bool:
    """``max(world // nnodes, 1)``."""
    match node:
        case ast.Call(func=ast.Name(id="max"), args=[ast.BinOp(op=ast.FloorDiv(), right=nodes), least]):
            return number(least) == 1 and ast.unparse(nodes).endswith("nnodes")
    return False


def _view(node: ast.expr) -> bool | str:
    """False: the machine's available memory; True: the smaller of that and the control groups' headroom."""
    if ast.unparse(node) == HOST_AVAILABLE:
        return False
    match node:
        case ast.Call(func=ast.Name(id="choice"), args=[ast.Call(func=ast.Name(id="min"), args=both), other]):
            texts = [ast.unparse(argument) for argument in both]
            if ast.unparse(other) == HOST_AVAILABLE and HOST_AVAILABLE in texts and len(both) == 2:
                return any("cgroup" in text for text in texts) or UNRECOGNISED
    return UNRECOGNISED


def _shown(
    raised: ast.Call, scope: Scope, sides: tuple[ast.expr, type[ast.cmpop], ast.expr] | None, module: Module
) -> Fact:
    """Which number the refusal prints as free."""
    printed = [node.value for node in ast.walk(raised) if isinstance(node, ast.FormattedValue)][-2:]
    line = module.line(printed[-1] if printed else raised)
    amounts = []
    for value in printed:
        match scope.meaning(value):
            case ast.BinOp(left=amount, op=ast.Div(), right=unit) if number(unit) == GB:
                amounts.append(ast.unparse(amount))
    text = " and ".join(scope.text(value) for value in printed)
    if sides is None or len(amounts) != 2 or amounts[0] != ast.unparse(sides[0]):
        return Fact("shown", UNRECOGNISED, text, line)
    kinds = {ast.unparse(sides[2]): "allowance", HOST_AVAILABLE: "available"}
    return Fact("shown", kinds.get(amounts[1], UNRECOGNISED), text, line)
