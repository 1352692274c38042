"""Host-pool constructors of a tree, found by syntax: how they size, and checks of pools that are sized elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hicache_lab.sglang.source.check import GUARD_WORDS, read_check, refusal, says_refusal
from hicache_lab.sglang.source.facts import UNRECOGNISED, Constructor, Fact, normal_form
from hicache_lab.sglang.source.symbols import KEPT, Scope, definition, number, own_name, walk
from hicache_lab.sglang.source.tree import Line, Module, Tree

RATIO = "host_to_device_ratio"


ROUNDINGS = {
    normal_form("size - size % page_size"): "down",
    normal_form("size // page_size * page_size"): "down",
    normal_form("(size // page_size + 1) * page_size"): "up_a_page",
}
PAGE_SIZES = {normal_form(text) for text in ("page_size", "page_size // dcp_size", "1")}
REQUESTED = normal_form("size * size_per_token")


def constructors(tree: Tree) -> Iterator[tuple[Module, ast.ClassDef, ast.FunctionDef]]:
    """Every ``__init__`` that turns a size or a ratio into its own ``self.size``."""
    for module in tree.containing(RATIO):
        for owner in module.classes:
            init = _method(owner, "__init__")
            if init is None or not any(a.arg == RATIO for a in [*init.args.args, *init.args.kwonlyargs]):
                continue
            sizes = (_new_size(node) for node in ast.walk(init))
            if any(size is not None and RATIO in ast.unparse(size) for size in sizes):
                yield module, owner, init


def checks(tree: Tree, known: set[Line]) -> Iterator[Constructor]:
    """The checks of pools that are sized elsewhere (indexer, paged, state); ``known`` are lines read already."""
    for module in tree.containing(GUARD_WORDS):
        for owner in module.classes:
            for function in (n for n in owner.body if isinstance(n, ast.FunctionDef)):
                said = [node for node in ast.walk(function) if says_refusal(node)]
                if not said:
                    continue
                pool = Constructor(owner.name, f"({ast.unparse(function.args)})", module.line(function))
                read = False
                for statement, scope in walk(function.body, Scope(module)):
                    if refusal(statement) is not None:
                        read = True
                        if module.line(statement) not in known:
                            read_check(pool, statement, scope, None)
                if not read:
                    text = "the refusal is said, but not raised below a comparison"
                    pool.state(Fact("guard", UNRECOGNISED, text, module.line(said[0])))
                if pool.facts:
                    yield pool


def _method(owner: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def _new_size(node: ast.AST) -> ast.expr | None:
    """What a statement sets ``self.size`` to; None when it does not set it."""
    match node:
        case ast.Assign(targets=targets, value=value) if any(_is_self(target, "size") for target in targets):
            return value
        case ast.AugAssign(target=target, op=op, value=value) if _is_self(target, "size"):
            return ast.BinOp(target, op, value)
    return None


def _is_self(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and own_name(node) == name


def read_constructor(module: Module, owner: ast.ClassDef, init: ast.FunctionDef) -> Constructor:
    """Read one constructor, with the methods of its class that it calls."""
    pool = Constructor(owner.name, f"({ast.unparse(init.args)})", module.line(init))
    parameters = {argument.arg for argument in [*init.args.args, *init.args.kwonlyargs]}
    pool.state(Fact("has_size_flag", "host_size" in parameters, line=pool.where))
    pool.state(Fact("draft_exact", "host_token_capacity" in parameters, line=pool.where))
    functions, followed, check = [init], set(), None
    for statement, scope in _with_methods(owner, init, Scope(module), functions):
        followed.add(id(statement))
        _size(pool, statement, scope)
        _not_larger(pool, statement, scope)
        read_check(pool, statement, scope, REQUESTED)
        check = statement if refusal(statement) is not None else check
    _unread(pool, module, functions, followed, check)
    for absent, value in [("rounding", "none"), ("not_larger", "none"), ("guard", "absent")]:
        if absent not in pool.facts:
            pool.state(Fact(absent, value, "nothing of the kind was found", pool.where))
    if pool.facts["has_size_flag"].value and "size_unit_bytes" not in pool.facts:
        pool.state(Fact("size_unit_bytes", UNRECOGNISED, "no tokens are made of host_size", pool.where))
    pool.facts.setdefault("pp_stages_share_tokens", Fact("pp_stages_share_tokens", False))
    pool.sizing.sort(key=lambda line: (line.file, line.number))
    pool.guard.sort(key=lambda line: (line.file != module.path, line.file, line.number))
    return pool


def _unread(
    pool: Constructor, module: Module, functions: list[ast.FunctionDef], followed: set[int], check: ast.stmt | None
) -> None:
    """State what is not followed: a guess would be a false match.

    `symbols` follows plain assignments and branches. A quantity that is also written in another way (in a loop, by a
    ``match``, by ``setattr``, in an exception's handler), or a check that need not be reached, is reported.
    """
    for loop in (n for function in functions for n in ast.walk(function) if isinstance(n, ast.For | ast.While)):
        followed -= {id(node) for node in ast.walk(loop)}
    test = check.test if isinstance(check, ast.If) else ast.Pass()
    names = KEPT | {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    rows_set = 0
    for function in functions:
        nodes = list(ast.walk(function))
        local = {id(node.target) for node in nodes if isinstance(node, ast.comprehension)}
        read = {id(target) for node in nodes for target in _read_targets(node, is_followed=id(node) in followed)}
        for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
            name = _written(node)
            if name not in names or id(node) in local:
                continue
            rows_set += name == "size_per_token"
            if id(node) not in read or (name == "size_per_token" and rows_set > 1):
                line = module.line(node)
                pool.state(Fact("unread", UNRECOGNISED, line.text, line))
    around = _way_round(check, functions) if check is not None else None
    if around is not None:
        line = module.line(around)
        pool.state(Fact("check_reached", UNRECOGNISED, line.text, line))


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


def _way_round(check: ast.stmt, functions: list[ast.FunctionDef]) -> ast.AST | None:
    """What lets the check be passed by: a statement that it stands in, or a return before it; None when nothing."""
    for function in functions:
        for statement in function.body:
            if any(node is check for node in ast.walk(statement)):
                return None if statement is check else statement
            returns = [node for node in ast.walk(statement) if isinstance(node, ast.Return)]
            if returns and any(node is check for node in ast.walk(function)):
                return returns[0]
    return None


def _with_methods(
    owner: ast.ClassDef, init: ast.FunctionDef, scope: Scope, functions: list[ast.FunctionDef]
) -> Iterator[tuple[ast.stmt, Scope]]:
    """Every statement of the constructor and of the methods it calls, which are added to ``functions``."""
    entered = {"__init__"}
    for statement, here in walk(init.body, scope):
        yield statement, here
        call = statement.value if isinstance(statement, ast.Expr) else None
        name = own_name(call.func) if isinstance(call, ast.Call) else None
        method = _method(owner, name) if name else None
        if method is not None and name is not None and name not in entered:
            entered.add(name)
            functions.append(method)
            yield from walk(method.body, here.branch())


def _size(pool: Constructor, statement: ast.stmt, scope: Scope) -> None:
    line = scope.module.line(statement)
    if isinstance(statement, ast.If) and any(_new_size(n) is not None for n in statement.body):
        if "host_size" in ast.unparse(statement.test):
            text = scope.text(statement.test)
            pool.sizing.append(line)
            known = text in ("host_size > 0", "0 < host_size")
            pool.state(Fact("size_when", "above 0" if known else UNRECOGNISED, text, line))
    elif isinstance(statement, ast.Assign):
        if any(_is_self(target, "page_size") for target in statement.targets):
            text = scope.text(statement.value)
            pool.state(Fact("page_size", "page" if text in PAGE_SIZES else UNRECOGNISED, text, line))
            pool.sizing.append(line)
        if any(_is_self(target, "page_num") for target in statement.targets):
            pool.sizing.append(line)
    value = _new_size(statement)
    if value is None:
        return
    pool.sizing.append(line)
    if "host_size" in ast.unparse(value):
        _tokens_by_size(pool, value, scope, line)
        return
    meaning = scope.meaning(value)
    text = ast.unparse(meaning)
    if text in ROUNDINGS:
        pool.state(Fact("rounding", ROUNDINGS[text], text, line))
    elif text == "host_token_capacity" and pool.facts["draft_exact"].value:
        pool.state(Fact("capacity", "as given", text, line))
    elif RATIO in text:
        form = UNRECOGNISED
        match meaning:
            case ast.Call(func=ast.Name(id="int"), args=[ast.BinOp(left=left, op=ast.Mult(), right=right)]):
                sides = {ast.unparse(left), ast.unparse(right)}
                if RATIO in sides and len(sides) == 2 and number(left) is None and number(right) is None:
                    form = "device tokens × ratio, cut"
        pool.state(Fact("ratio_tokens", form, text, line))
    else:
        pool.state(Fact("rounding", UNRECOGNISED, text, line))


def _tokens_by_size(pool: Constructor, value: ast.expr, scope: Scope, line: Line) -> None:
    """``int(host_size * 1e9 // size_per_token)``, perhaps inside a call that lets pipeline stages agree."""
    shared: str | bool = False
    match value:
        case ast.Call(func=ast.Name(id=name), args=[inner, *_]) if name not in ("int", "round", "ceil"):
            home, key = definition(scope.module, name)
            sharing = home.functions.get(key) if home else None
            reductions = {
                node.attr
                for node in (ast.walk(sharing) if sharing else ())
                if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("ReduceOp")
            }
            # whether the named function takes the smallest of the stages
            shared, value = reductions == {"MIN"} or UNRECOGNISED, inner
    meaning = scope.meaning(value)
    text = ast.unparse(meaning)
    unit: float | int | None = None
    match meaning:
        case ast.Call(
            func=ast.Name(id="int"),
            args=[
                ast.BinOp(
                    left=ast.BinOp(left=ast.Name(id="host_size"), op=ast.Mult(), right=factor),
                    op=ast.FloorDiv(),
                    right=ast.Name(id="size_per_token"),
                )
            ],
        ):
            unit = number(factor)
    pool.state(Fact("size_unit_bytes", UNRECOGNISED if unit is None else unit, text, line))
    pool.state(Fact("pp_stages_share_tokens", shared, ast.unparse(value), line))


def _not_larger(pool: Constructor, statement: ast.stmt, scope: Scope) -> None:
    """What is done when the host pool is not larger than the device pool."""
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[op], comparators=[right])):
            text = f"assert {scope.text(statement.test)}"
            sides = scope.text(left), scope.text(right)
            if sides == (RATIO, "1") and isinstance(op, ast.GtE):
                kind = "assert_ratio"
            elif sides[0] == "size":
                kind = "assert_tokens" if isinstance(op, ast.Gt) else UNRECOGNISED
            else:
                return
        case ast.If(test=ast.Compare(left=left, ops=[op]), body=[ast.Expr(value=ast.Call(func=called)), *_]):
            if scope.text(left) != "size" or not ast.unparse(called).endswith(".warning"):
                return
            text = f"if {scope.text(statement.test)}: warning"
            kind = "warn" if isinstance(op, ast.LtE) else UNRECOGNISED
        case _:
            return
    line = scope.module.line(statement)
    pool.sizing.append(line)
    pool.state(Fact("not_larger", kind, text, line))
