"""What only the whole tree says: bytes per token, auto-sizing, page cache in control groups, shared host copies."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hicache_lab.sglang.source.facts import UNRECOGNISED, Fact
from hicache_lab.sglang.source.tree import Module, Tree


def tree_facts(tree: Tree) -> Iterator[Fact]:
    """The facts that no single constructor states."""
    yield from _row_facts(tree)
    functions = list(_functions(tree, "auto_size_hicache"))
    lines = [module.line(function) for module, function in functions]
    yield Fact("auto_size", bool(lines), *("auto_size_hicache", lines[0]) if lines else ())
    lines = [
        module.line(node)
        for module, function in _functions(tree, "_cgroup_memory_headroom")
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and node.value == "inactive_file"
    ]
    yield Fact("cgroup_credits_page_cache", bool(lines), *("inactive_file", lines[0]) if lines else ())
    yield _host_copies(tree)


def _functions(tree: Tree, name: str) -> Iterator[tuple[Module, ast.FunctionDef]]:
    for module in tree.containing(f"def {name}"):
        if name in module.functions:
            yield module, module.functions[name]


# class, what its bytes per token state, and the factors of each known product
_ROWS: tuple[tuple[str, str, dict[tuple[str, ...], bool]], ...] = (
    (
        "MLATokenToKVPoolHost",
        "mla_bytes_count_layers",
        {
            ("itemsize", "kv_lora_rank + qk_rope_head_dim"): False,
            ("itemsize", "kv_lora_rank + qk_rope_head_dim", "layer_num"): True,
            ("itemsize", "kv_cache_dim", "layer_num"): True,
        },
    ),
    (
        "MHATokenToKVPoolHost",
        "mha_counts_v_head_dim",
        {
            ("2", "head_dim", "head_num", "itemsize", "layer_num"): False,
            ("head_dim + v_head_dim", "head_num", "itemsize", "layer_num"): True,
        },
    ),
)


def _row_facts(tree: Tree) -> Iterator[Fact]:
    """How MHA and MLA bytes per token are multiplied; a tree without the class states nothing of it."""
    for class_name, fact, known in _ROWS:
        owners = [
            (module, owner)
            for module in tree.containing(f"class {class_name}")
            for owner in module.classes
            if owner.name == class_name
        ]
        for module, owner in owners:
            products = list(_row_products(owner))
            for product in products:
                value = known.get(tuple(sorted(_factors(product))), UNRECOGNISED)
                yield Fact(fact, value, ast.unparse(product), module.line(product))
            if not products:
                yield Fact(fact, UNRECOGNISED, f"no product with itemsize in {class_name}", module.line(owner))


def _row_products(owner: ast.ClassDef) -> Iterator[ast.expr]:
    methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
    for function in methods:
        for node in ast.walk(function) if function.name in ("__init__", "get_size_per_token") else ():
            match node:
                case ast.Return(value=ast.expr() as value) if function.name == "get_size_per_token":
                    pass
                case ast.Assign(targets=[target, *_], value=value) if ast.unparse(target).endswith("size_per_token"):
                    pass
                case _:
                    continue
            if "itemsize" in ast.unparse(value):
                yield value


def _factors(node: ast.expr) -> list[str]:
    """The factors of a product by their last names, without a factor of one."""
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _factors(left) + _factors(right)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [" + ".join(sorted(_factors(left) + _factors(right)))]
        case ast.Constant(value=1):
            return []
    return [ast.unparse(node).removeprefix("self.").removeprefix("dtype.")]


def _host_copies(tree: Tree) -> Fact:
    """Whether one host copy per tensor-parallel group is made (0.5.20+ ships it, 0.5.23 still calls it nowhere)."""
    makers: set[str] = set()
    home: Module | None = None
    for path in tree.paths:
        if path.endswith("mla_host_dedup.py") and (home := tree.module(path)) is not None:
            makers |= {name for name in home.functions if "create" in name}
            makers |= {owner.name for owner in home.classes if owner.name.endswith("Context")}
    for module in tree.containing(*makers) if home else ():
        if module is home:
            continue
        for node in ast.walk(module.body):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in makers:
                return Fact("host_copies", "one per group", ast.unparse(node.func), module.line(node))
    return Fact("host_copies", "one per rank")
