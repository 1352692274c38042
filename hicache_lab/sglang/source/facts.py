"""What one host-pool constructor does, found by syntax tree: its sizing, its check, and the lines that say so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from hicache_lab.base.units import GB
from hicache_lab.sglang.source.symbols import Scope, number, own_name, walk
from hicache_lab.sglang.source.tree import Line, Module, Tree
from hicache_lab.sglang.source.writes import unread_writes, way_round

GUARD_WORDS = "Not enough host memory"
RATIO = "host_to_device_ratio"
UNRECOGNISED = "not recognised"


def _form(text: str) -> str:
    """A formula in the words of `symbols`, in its normal order."""
    empty = Module("", text, ast.parse(text), Tree("", "", [], lambda _: ""))
    return Scope(empty).text(ast.parse(text, mode="eval").body)


ROUNDINGS = {
    _form("size - size % page_size"): "down",
    _form("size // page_size * page_size"): "down",
    _form("(size // page_size + 1) * page_size"): "up_a_page",
}
HOST_AVAILABLE = _form("psutil.virtual_memory().available")
PAGE_SIZES = {_form(text) for text in ("page_size", "page_size // dcp_size", "1")}
REQUESTED = _form("size * size_per_token")
SIGNS: dict[type[ast.cmpop], str] = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<="}
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}


@dataclass(frozen=True)
class Fact:
    """One thing the constructor does.

    Attributes:
        name: what is stated, e.g. ``rounding``.
        value: what the source does; `UNRECOGNISED` when it is in no known form.
        says: the source's expression, in the constructor's own words.
        line: where it stands; None when the fact is an absence.
    """

    name: str
    value: str | int | float | bool
    says: str = ""
    line: Line | None = None


@dataclass
class Constructor:
    """A host-pool constructor.

    Attributes:
        class_name: its class.
        signature: its parameters as they are written.
        where: its first line.
        sizing: the lines that make tokens of a size or a ratio.
        guard: the lines of the check, in whichever file they stand.
        facts: what they do, by name.
    """

    class_name: str
    signature: str
    where: Line
    sizing: list[Line] = field(default_factory=list)
    guard: list[Line] = field(default_factory=list)
    facts: dict[str, Fact] = field(default_factory=dict)

    def state(self, fact: Fact) -> None:
        """Add a fact; a second, different one of the same name is a contradiction and not recognised."""
        before = self.facts.get(fact.name)
        if before is not None and before.value != fact.value:
            says = f"{before.says}; and elsewhere {fact.says}"
            fact = Fact(fact.name, UNRECOGNISED, says, fact.line)
        self.facts[fact.name] = fact


def constructors(tree: Tree) -> Iterator[tuple[Module, ast.ClassDef, ast.FunctionDef]]:
    """Every ``__init__`` that turns a size or a ratio into its own ``self.size``."""
    for module in tree.containing(RATIO):
        for owner in module.classes:
            init = _method(owner, "__init__")
            if init is None or not any(a.arg == RATIO for a in [*init.args.args, *init.args.kwonlyargs]):
                continue
            if any(RATIO in ast.unparse(value) for _, value in _size_assignments(init)):
                yield module, owner, init


def checks(tree: Tree, known: set[Line]) -> Iterator[Constructor]:
    """The checks of pools that are sized elsewhere (indexer, paged, state); ``known`` are lines read already."""
    for module in tree.containing(GUARD_WORDS):
        for owner in module.classes:
            for function in (n for n in owner.body if isinstance(n, ast.FunctionDef)):
                said = [node for node in ast.walk(function) if _says_refusal(node)]
                if not said:
                    continue
                found = Constructor(owner.name, f"({ast.unparse(function.args)})", module.line(function))
                read = False
                for statement, scope in walk(function.body, Scope(module)):
                    if _refusal(statement) is not None:
                        read = True
                        if module.line(statement) not in known:
                            _guard(found, statement, scope, None)
                if not read:
                    text = "the refusal is said, but not raised below a comparison"
                    found.state(Fact("guard", UNRECOGNISED, text, module.line(said[0])))
                if found.facts:
                    yield found


def _says_refusal(node: ast.AST) -> bool:
    """Whether a string is the refusal of a pool (other messages merely begin like it)."""
    words = "".join(str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant))
    return isinstance(node, ast.JoinedStr) and GUARD_WORDS in words and "but only have" in words


def _method(owner: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def _size_assignments(function: ast.FunctionDef) -> list[tuple[ast.Assign | ast.AugAssign, ast.expr]]:
    found: list[tuple[ast.Assign | ast.AugAssign, ast.expr]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(_is_self(target, "size") for target in node.targets):
            found.append((node, node.value))
        elif isinstance(node, ast.AugAssign) and _is_self(node.target, "size"):
            found.append((node, ast.BinOp(node.target, node.op, node.value)))
    return found


def _is_self(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and own_name(node) == name


def read_constructor(module: Module, owner: ast.ClassDef, init: ast.FunctionDef) -> Constructor:
    """Read one constructor, with the methods of its class that it calls."""
    found = Constructor(owner.name, f"({ast.unparse(init.args)})", module.line(init))
    parameters = {argument.arg for argument in [*init.args.args, *init.args.kwonlyargs]}
    found.state(Fact("has_size_flag", "host_size" in parameters, line=module.line(init)))
    found.state(Fact("draft_exact", "host_token_capacity" in parameters, line=module.line(init)))
    functions, followed, check = [init], set(), None
    for statement, scope in _with_methods(owner, init, Scope(module), functions):
        followed.add(id(statement))
        _size(found, statement, scope)
        _not_larger(found, statement, scope)
        _guard(found, statement, scope, REQUESTED)
        check = statement if _refusal(statement) is not None else check
    _unread(found, module, functions, followed, check)
    _absences(found, module.line(init))
    found.sizing.sort(key=lambda line: (line.file, line.number))
    found.guard.sort(key=lambda line: (line.file != module.path, line.file, line.number))
    return found


def _unread(
    found: Constructor, module: Module, functions: list[ast.FunctionDef], followed: set[int], check: ast.stmt | None
) -> None:
    """State what is not followed: a guess would be a false match."""
    for loop in (n for function in functions for n in ast.walk(function) if isinstance(n, ast.For | ast.While)):
        followed -= {id(node) for node in ast.walk(loop)}
    test = check.test if isinstance(check, ast.If) else None
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} if test is not None else set()
    for node in unread_writes(functions, followed, names):
        line = module.line(node)
        found.state(Fact("unread", UNRECOGNISED, line.text, line))
    around = way_round(check, functions) if check is not None else None
    if around is not None:
        line = module.line(around)
        found.state(Fact("check_reached", UNRECOGNISED, line.text, line))


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


def _size(found: Constructor, statement: ast.stmt, scope: Scope) -> None:
    module = scope.module
    if isinstance(statement, ast.If) and _sets_size(statement):
        _size_condition(found, statement, scope)
    if isinstance(statement, ast.Assign) and any(_is_self(t, "page_size") for t in statement.targets):
        text = scope.text(statement.value)
        found.state(Fact("page_size", "page" if text in PAGE_SIZES else UNRECOGNISED, text, module.line(statement)))
        found.sizing.append(module.line(statement))
    if isinstance(statement, ast.Assign) and any(_is_self(t, "page_num") for t in statement.targets):
        found.sizing.append(module.line(statement))
    if isinstance(statement, ast.Assign) and any(_is_self(t, "size") for t in statement.targets):
        value: ast.expr = statement.value
    elif isinstance(statement, ast.AugAssign) and _is_self(statement.target, "size"):
        value = ast.BinOp(statement.target, statement.op, statement.value)
    else:
        return
    line = module.line(statement)
    found.sizing.append(line)
    if "host_size" in ast.unparse(value):
        _tokens_by_size(found, value, scope, line)
        return
    meaning = scope.meaning(value)
    text = ast.unparse(meaning)
    if text in ROUNDINGS:
        found.state(Fact("rounding", ROUNDINGS[text], text, line))
    elif text == "host_token_capacity" and found.facts["draft_exact"].value:
        found.state(Fact("capacity", "as given", text, line))
    elif RATIO in text:
        found.state(Fact("ratio_tokens", _ratio_form(meaning), text, line))
    else:
        found.state(Fact("rounding", UNRECOGNISED, text, line))


def _sets_size(statement: ast.If) -> bool:
    return any(
        isinstance(n, ast.Assign) and any(_is_self(t, "size") for t in n.targets) for n in statement.body
    ) and "host_size" in ast.unparse(statement.test)


def _size_condition(found: Constructor, statement: ast.If, scope: Scope) -> None:
    line, text = scope.module.line(statement), scope.text(statement.test)
    found.sizing.append(line)
    known = {"host_size > 0", "0 < host_size"}
    found.state(Fact("size_when", "above 0" if text in known else UNRECOGNISED, text, line))


def _ratio_form(meaning: ast.expr) -> str:
    match meaning:
        case ast.Call(func=ast.Name(id="int"), args=[ast.BinOp(left=left, op=ast.Mult(), right=right)]):
            sides = {ast.unparse(left), ast.unparse(right)}
            if RATIO in sides and len(sides) == 2 and all(number(side) is None for side in (left, right)):
                return "device tokens × ratio, cut"
    return UNRECOGNISED


def _tokens_by_size(found: Constructor, value: ast.expr, scope: Scope, line: Line) -> None:
    """``int(host_size * 1e9 // size_per_token)``, perhaps inside a call that lets pipeline stages agree."""
    shared: str | bool = False
    match value:
        case ast.Call(func=ast.Name(id=name), args=[inner, *_]) if name not in ("int", "round", "ceil"):
            shared, value = _sharing(scope, name), inner
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
    found.state(Fact("size_unit_bytes", UNRECOGNISED if unit is None else unit, text, line))
    found.state(Fact("pp_stages_share_tokens", shared, ast.unparse(value), line))


def _sharing(scope: Scope, name: str) -> str | bool:
    """Whether the named function takes the smallest of the stages."""
    module = scope.module
    for _ in range(4):
        if name in module.functions:
            reductions = {
                node.attr
                for node in ast.walk(module.functions[name])
                if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("ReduceOp")
            }
            return True if reductions == {"MIN"} else UNRECOGNISED
        if name not in module.imports:
            break
        source, name = module.imports[name]
        behind = module.tree.find(source)
        if behind is None:
            break
        module = behind
    return UNRECOGNISED


def _not_larger(found: Constructor, statement: ast.stmt, scope: Scope) -> None:
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
    found.sizing.append(line)
    found.state(Fact("not_larger", kind, text, line))


def _guard(found: Constructor, statement: ast.stmt, scope: Scope, requested: str | None) -> None:
    """Read one check; ``requested`` is what it must compare, None when any amount will do."""
    raised = _refusal(statement)
    if raised is None or not isinstance(statement, ast.If):
        return
    module = scope.module
    line = module.line(statement)
    reading = Scope(module, scope.names, [], scope.depth, scope.origin)
    test = reading.meaning(statement.test)
    sides = _sides(test, requested)
    sign = f"requested {SIGNS.get(sides[1], UNRECOGNISED)} budget" if sides else UNRECOGNISED
    found.state(Fact("guard", sign, ast.unparse(test), line))
    budget = sides[2] if sides else None
    for fact in read_budget(budget, ast.unparse(budget) if budget is not None else "", line):
        found.state(fact)
    found.state(_shown(raised, reading, sides, module))
    found.guard += dict.fromkeys([line, *reading.seen])


def _refusal(statement: ast.stmt) -> ast.Call | None:
    """The exception raised directly below an ``if``, when it is the one about host memory."""
    for inner in statement.body if isinstance(statement, ast.If) else []:
        if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
            words = "".join(
                str(node.value) for node in ast.walk(inner.exc) if isinstance(node, ast.Constant) and node.value
            )
            if GUARD_WORDS in words:
                return inner.exc
    return None


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
    amounts = [_in_gb(scope.meaning(value)) for value in printed]
    said = " and ".join(scope.text(value) for value in printed)
    if sides is None or len(amounts) != 2 or amounts[0] != ast.unparse(sides[0]):
        return Fact("shown", UNRECOGNISED, said, line)
    kinds = {ast.unparse(sides[2]): "allowance", HOST_AVAILABLE: "available"}
    return Fact("shown", kinds.get(amounts[1] or "", UNRECOGNISED), said, line)


def _in_gb(value: ast.expr) -> str | None:
    """What a number printed in GB is a number of."""
    match value:
        case ast.BinOp(left=amount, op=ast.Div(), right=unit) if number(unit) == GB:
            return ast.unparse(amount)
    return None


def _absences(found: Constructor, line: Line) -> None:
    for name, value in [("rounding", "none"), ("not_larger", "none"), ("guard", "absent")]:
        if name not in found.facts:
            found.state(Fact(name, value, "nothing of the kind was found", line))
    if found.facts["has_size_flag"].value and "size_unit_bytes" not in found.facts:
        found.state(Fact("size_unit_bytes", UNRECOGNISED, "no tokens are made of host_size", line))
    found.facts.setdefault("pp_stages_share_tokens", Fact("pp_stages_share_tokens", False))
