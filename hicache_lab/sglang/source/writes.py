"""What a constructor does beside the arithmetic that is followed: other writes to its quantities, ways round its check.

`symbols` follows plain assignments and branches. A quantity that is also written in another way (in a loop, by a
``match``, by ``setattr``, in an exception's handler), or a check that need not be reached, is reported and not guessed.
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
    rows_set = 0
    for function in functions:
        nodes = list(ast.walk(function))
        local = {id(node.target) for node in nodes if isinstance(node, ast.comprehension)}
        read = {id(target) for node in nodes for target in _read_targets(node, is_followed=id(node) in followed)}
        for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
            name = _written(node)
            if name not in KEPT | names or id(node) in local:
                continue
            rows_set += name == "size_per_token"
            if id(node) not in read or (name == "size_per_token" and rows_set > 1):
                yield node


def _written(node: ast.AST) -> str | None:
    """The name that a node binds or deletes: a target, an import, or ``x`` of ``setattr(self, "x", …)``."""
    match node:
        case ast.Name(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
            return own_name(node)
        case ast.alias(name=name, asname=alias):
            return (alias or name).split(".")[0]
        case ast.Call(func=func, args=args) if ast.unparse(func).split(".")[-1] in ("setattr", "__setattr__"):
            constants = [word.value for word in args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            return constants[0] if constants else None
    return None


def _read_targets(node: ast.AST, *, is_followed: bool) -> list[ast.expr]:
    """The targets of a statement whose values the facts are made of; a parameter is what was given."""
    match node:
        case ast.AnnAssign(target=target, value=None):
            return [target]
        case ast.Assign(targets=targets) if not any(isinstance(target, ast.Tuple | ast.List) for target in targets):
            kept = KEPT
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            targets, kept = [target], frozenset({"size"} if isinstance(node, ast.AugAssign) else ())
        case _:
            return []
    plain = [t for t in targets if own_name(t) not in KEPT or (isinstance(t, ast.Attribute) and t.attr in kept)]
    return plain if is_followed else []


def way_round(check: ast.stmt, functions: Iterable[ast.FunctionDef]) -> ast.AST | None:
    """What lets the check be passed by: a statement that it stands in, or a return before it; None when nothing."""
    for function in functions:
        for statement in function.body:
            if any(node is check for node in ast.walk(statement)):
                return None if statement is check else statement
            returns = [node for node in ast.walk(statement) if isinstance(node, ast.Return)]
            if returns and any(node is check for node in ast.walk(function)):
                return returns[0]
    return None
