"""Which era's rules a source tree follows, and why; or, loudly, what it does that no known release does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from hicache_lab.base.errors import InputError, UnknownFact
from hicache_lab.base.units import GB
from hicache_lab.sglang.releases import RESERVE_BYTES, VERIFIED, ReleaseRules, rules_for
from hicache_lab.sglang.source.constructor import checks, constructors, read_constructor
from hicache_lab.sglang.source.facts import UNRECOGNISED, Constructor, Fact
from hicache_lab.sglang.source.helpers import expected_helpers, fingerprint, helper_fact, reached
from hicache_lab.sglang.source.tree import Module, Tree
from hicache_lab.sglang.source.tree_facts import tree_facts

Value = str | int | float | bool

# true of every known release
ALWAYS: dict[str, Value] = {
    "size_unit_bytes": GB,
    "size_when": "above 0",
    "ratio_tokens": "device tokens × ratio, cut",
    "page_size": "page",
    "guard": "requested > budget",
    "reserve_bytes": RESERVE_BYTES,
}
MEANING = {
    "size_unit_bytes": "bytes in one unit of --hicache-size, per rank",
    "size_when": "when --hicache-size replaces the ratio",
    "ratio_tokens": "tokens from --hicache-ratio",
    "page_size": "tokens in one page of the host pool",
    "guard": "the check of host memory",
    "reserve_bytes": "bytes the check leaves to others",
    "has_size_flag": "a size can be given",
    "rounding": "rounding of the tokens to pages",
    "mla_bytes_count_layers": "MLA bytes per token count the layers",
    "mha_counts_v_head_dim": "MHA bytes per token count v_head_dim",
    "not_larger": "when the host pool is not larger than the device pool",
    "shown": "the number a refusal shows as free",
    "pp_stages_share_tokens": "pipeline stages agree on the smallest token count",
    "guard_divides_by_ranks": "the check divides by the ranks of the host",
    "guard_reads_cgroup": "the check sees a control group's limit",
    "cgroup_credits_page_cache": "page cache counts as free in a control group",
    "auto_size": "sizes itself when neither flag is given",
    "draft_exact": "an exact token capacity can be given",
    "capacity": "tokens when a capacity is given",
    "host_copies": "host copies of an MLA model's KV",
    "unread": "the quantities are also written in a way that is not followed",
    "check_reached": "the check can be passed by",
}
# facts that follow from a release's rules, most of them under the same name
_OF_RULES = (
    *("has_size_flag", "rounding", "mla_bytes_count_layers", "mha_counts_v_head_dim", "not_larger", "shown"),
    *("pp_stages_share_tokens", "guard_divides_by_ranks", "guard_reads_cgroup", "cgroup_credits_page_cache"),
    *("auto_size", "draft_exact", "host_copies"),
)
# facts that only the whole tree, not a side pool's constructor, can state
_OF_TREE = ("mla_bytes_count_layers", "mha_counts_v_head_dim", "cgroup_credits_page_cache", "auto_size", "host_copies")
_OF_SIZE = ("size_unit_bytes", "size_when")
_PRIMARY_ONLY = ("draft_exact", "not_larger", "page_size")


def rule_facts(rules: ReleaseRules) -> dict[str, Value]:
    """A release's rules in the words of the facts that a source tree shows."""
    derived: dict[str, Value] = {"mha_counts_v_head_dim": rules.v_head_dim == "counted", "host_copies": "one per rank"}
    own = {name: derived[name] if name in derived else getattr(rules, name) for name in _OF_RULES}
    return ALWAYS | own | expected_helpers(rules)


@dataclass(frozen=True)
class Era:
    """An era's letter, its examined releases, and its rules as facts."""

    name: str
    releases: tuple[str, ...]
    facts: dict[str, Value]

    def __str__(self) -> str:
        span = self.releases[0] if len(self.releases) == 1 else f"{self.releases[0]} … {self.releases[-1]}"
        return f"era {self.name} ({span})"


@lru_cache(maxsize=1)
def eras() -> tuple[Era, ...]:
    """The known eras, oldest first."""
    by_name: dict[str, list[ReleaseRules]] = {}
    for release in VERIFIED:
        rules = rules_for(release)
        by_name.setdefault(rules.era, []).append(rules)
    return tuple(
        Era(name, tuple(rules.version for rules in members), rule_facts(members[0]))
        for name, members in by_name.items()
    )


@dataclass(frozen=True)
class Difference:
    """Something the source does otherwise than the nearest era's rules.

    Attributes:
        fact: what the source does; its name is a key of `MEANING`.
        expected: what the rules say.
        owner: the class it belongs to; empty for the whole tree.
    """

    fact: Fact
    expected: Value
    owner: str = ""

    def __str__(self) -> str:
        fact = self.fact
        place = f"{fact.line}: " if fact.line else ""
        says = f" [{fact.says}]" if fact.says else ""
        owner = f" in {self.owner}" if self.owner else ""
        meaning = MEANING.get(fact.name, fact.name)
        return f"{place}{meaning}{owner}: the source has {fact.value!r}{says}, the rules have {self.expected!r}"


@dataclass(frozen=True)
class Reading:
    """What `read_source` found.

    Attributes:
        tree: what was read; what could not be parsed is in its ``unreadable``.
        primary: the host-pool constructor that the others build on.
        others: further constructors that size a pool of their own.
        facts: everything stated, by name.
        nearest: the era whose rules fit best.
        differences: empty when they fit.
    """

    tree: Tree
    primary: Constructor
    others: tuple[Constructor, ...]
    facts: dict[str, Fact]
    nearest: Era
    differences: tuple[Difference, ...]

    @property
    def era(self) -> Era | None:
        """The era whose rules the tree follows; None when it follows none."""
        return None if self.differences else self.nearest

    @property
    def warning(self) -> str | None:
        """Said when the release that the tree calls itself was not examined."""
        version = self.tree.version
        try:
            return rules_for(version).warning if version else "the tree does not say its version"
        except UnknownFact as error:
            return str(error)

    @property
    def contradiction(self) -> str | None:
        """Said when the code follows the rules of another era than the release that the tree calls itself."""
        stated = _stated_era(self.tree.version)
        if self.era is None or stated in (None, self.era.name):
            return None
        own = next(era for era in eras() if era.name == stated)
        changed = "; ".join(str(difference) for difference in _compare(self.facts, own))
        return f"the tree calls itself {self.tree.version}, which is {own}, but its code follows {self.era}: {changed}"

    @property
    def matches(self) -> bool:
        """Whether the code follows the rules of one era, and of the one that its version says."""
        return self.era is not None and self.contradiction is None


def read_source(tree: Tree) -> Reading:
    """Find the host-pool constructor of a tree and say which era's rules it follows.

    Args:
        tree: from `open_tree` or `installed_tree`; only parsed, never imported or executed.

    Returns:
        A `Reading`; its ``era`` is None when a constant, a comparison, the reserve, the rounding or a division is
        not what any known release has.

    Raises:
        InputError: the tree has no host-pool constructor.
    """
    sized, checked = _pools(tree)
    if not sized:
        unparsed = "; could not be parsed: " + "; ".join(tree.unreadable[:3]) if tree.unreadable else ""
        raise InputError(
            f"{tree.label}: no host-pool constructor found in {len(tree.paths)} Python files (a class whose "
            f"__init__ takes host_to_device_ratio and sets its size); SGLang has one from 0.4.4 on{unparsed}"
        )
    primary = max(sized, key=lambda one: _children(tree, one.class_name))
    others = (*(one for one in sized if one is not primary), *checked)
    helpers = (helper_fact(module, function) for module, function in _helpers(tree, [primary, *others]))
    facts = primary.facts | {fact.name: fact for fact in (*tree_facts(tree), *helpers)}
    # the era with the fewest differences; among equals the one the tree calls itself
    stated = _stated_era(tree.version)
    nearest = min(eras(), key=lambda era: (len(list(_compare(facts, era))), era.name != stated))
    differences = (*_compare(facts, nearest), *_compare_others(others, nearest))
    return Reading(tree, primary, others, facts, nearest, differences)


def _pools(tree: Tree) -> tuple[list[Constructor], list[Constructor]]:
    """The constructors that size a pool, and the checks of pools that are sized elsewhere."""
    sized = [read_constructor(module, owner, init) for module, owner, init in constructors(tree)]
    return sized, list(checks(tree, {line for one in sized for line in one.guard}))


def _helpers(tree: Tree, pools: list[Constructor]) -> Iterator[tuple[Module, ast.FunctionDef]]:
    """What the lines that size and check call."""
    lines = dict.fromkeys(line for one in pools for line in (*one.guard, *one.sizing))
    return reached((module, line) for line in lines if (module := tree.module(line.file)) is not None)


def read_helpers(tree: Tree) -> dict[str, tuple[str, ...]]:
    """The helpers below a tree's sizing and checks as hashes by name, as `known_forms` keeps them.

    Args:
        tree: from `open_tree` or `installed_tree`.

    Returns:
        One hash a statement for each function that is not followed as plain arithmetic.
    """
    sized, checked = _pools(tree)
    return {
        function.name: tuple(digest for digest, _ in fingerprint(module, function))
        for module, function in _helpers(tree, sized + checked)
    }


def _stated_era(version: str | None) -> str | None:
    """The era of the release that a tree calls itself; None when it names none that is known."""
    try:
        return rules_for(version).era if version else None
    except UnknownFact:
        return None


def _children(tree: Tree, name: str) -> int:
    return sum(
        any(ast.unparse(base).split(".")[-1] == name for base in owner.bases)
        for module in tree.containing(name)
        for owner in module.classes
    )


def _compare(facts: dict[str, Fact], era: Era) -> Iterator[Difference]:
    for name, expected in era.facts.items():
        fact = facts.get(name)
        if fact is None:
            optional = name == "page_size" or (name in _OF_SIZE and not era.facts["has_size_flag"])
            if name in ALWAYS and not optional:
                yield Difference(Fact(name, "absent"), expected)
        elif fact.value != expected:
            yield Difference(fact, expected)
    for name in sorted(set(facts) - set(era.facts)):
        if facts[name].value == UNRECOGNISED:
            yield Difference(facts[name], "a known form")


def _compare_others(others: tuple[Constructor, ...], era: Era) -> Iterator[Difference]:
    expected = {name: value for name, value in era.facts.items() if name not in _OF_TREE}
    expected |= dict.fromkeys(("unread", "check_reached"), "nothing of the kind")
    for other in others:
        for name, value in expected.items():
            fact = other.facts.get(name)
            if fact is None or fact.value == value or (name in _PRIMARY_ONLY and fact.value != UNRECOGNISED):
                continue
            yield Difference(fact, value, other.class_name)
