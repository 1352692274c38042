"""What a constructor does beside the arithmetic that is followed: other writes to its quantities, ways round its check.

`symbols` follows plain assignments and branches. A quantity that is also written in another way (in a loop, by a
``match``, by ``setattr``, in an exception's handler), or a check that need not be reached, is said and not guessed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from hicache_lab.sglang.source.symbols import KEPT, own_name


def unread_writes(functions: Iterable[ast.FunctionDef], followed: set[int], names: set[str]) -> Iterator[ast.AST]:
    """Writes to `KEPT` quantities, or to ``names``, that were not followed.

    Args:
        functions: the constructor and the methods that it calls.
        followed: the ``id`` of each statement that was read, loops excepted.
        names: further names that the check uses.
    """
    row_is_set = False
    for function in functions:
        for node in sorted(ast.walk(function), key=lambda node: getattr(node, "lineno", 0)):
            for target in _targets(node):
                name = own_name(target)
                if name in KEPT and not (id(node) in followed and _plain(node, target)):
                    yield target if isinstance(node, ast.withitem) else node
                elif name == "size_per_token":
                    if row_is_set:
                        yield node
                    row_is_set = True
                elif name in names - KEPT and not (id(node) in followed and _assigns_one(node)):
                    yield target if isinstance(node, ast.withitem) else node
            if isinstance(node, ast.Call) and _sets_by_name(node) in KEPT | names:
                yield node


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a node binds, tuples taken apart."""
    found: list[ast.expr] = []
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            found = list(targets)
        case ast.AugAssign(target=target) | ast.For(target=target) | ast.NamedExpr(target=target):
            found = [target]
        case ast.AnnAssign(target=target, value=value) if value is not None:
            found = [target]
        case ast.withitem(optional_vars=target) if target is not None:
            found = [target]
        case ast.alias(name=name, asname=alias):
            found = [ast.Name((alias or name).split(".")[0])]
    for target in found:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _assigns_one(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=targets):
            return not any(isinstance(target, ast.Tuple | ast.List) for target in targets)
    return isinstance(node, ast.AugAssign | ast.AnnAssign)


def _plain(node: ast.AST, target: ast.expr) -> bool:
    """Whether a followed write is one that the facts are made of; a parameter is what was given."""
    if not isinstance(target, ast.Attribute):
        return False
    if isinstance(node, ast.AugAssign):
        return target.attr == "size"
    return isinstance(node, ast.Assign) and _assigns_one(node)


def _sets_by_name(call: ast.Call) -> str | None:
    """``x`` of ``setattr(self, "x", …)`` and its kin."""
    if ast.unparse(call.func).split(".")[-1] not in ("setattr", "__setattr__"):
        return None
    words = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return words[0] if words else None


def way_round(check: ast.stmt, functions: Iterable[ast.FunctionDef]) -> ast.AST | None:
    """What lets the check be passed by: a statement that it stands in, or a return before it; None when nothing."""
    for function in functions:
        for statement in function.body:
            inside = any(node is check for node in ast.walk(statement))
            if inside:
                return None if statement is check else statement
            returns = [node for node in ast.walk(statement) if isinstance(node, ast.Return)]
            if returns and any(node is check for node in ast.walk(function)):
                return returns[0]
    return None
