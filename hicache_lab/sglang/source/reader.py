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
from hicache_lab.sglang.source.helpers import expected_helpers, fingerprint, helper_facts, reached
from hicache_lab.sglang.source.tree import Line, Module, Tree
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
# facts that only the whole tree, not a side pool's constructor, can state
_OF_TREE = ("mla_bytes_count_layers", "mha_counts_v_head_dim", "cgroup_credits_page_cache", "auto_size", "host_copies")
_OF_SIZE = ("size_unit_bytes", "size_when")
_PRIMARY_ONLY = ("draft_exact", "not_larger", "page_size")


def rule_facts(rules: ReleaseRules) -> dict[str, Value]:
    """A release's rules in the words of the facts that a source tree shows."""
    return (
        ALWAYS
        | {
            "has_size_flag": rules.has_size_flag,
            "rounding": rules.rounding,
            "mla_bytes_count_layers": rules.mla_bytes_count_layers,
            "mha_counts_v_head_dim": rules.v_head_dim == "counted",
            "not_larger": rules.not_larger,
            "shown": rules.shown,
            "pp_stages_share_tokens": rules.pp_stages_share_tokens,
            "guard_divides_by_ranks": rules.guard_divides_by_ranks,
            "guard_reads_cgroup": rules.guard_reads_cgroup,
            "cgroup_credits_page_cache": rules.cgroup_credits_page_cache,
            "auto_size": rules.auto_size,
            "draft_exact": rules.draft_exact,
            "host_copies": "one per rank",
        }
        | expected_helpers(rules)
    )


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
        name: the fact, a key of `MEANING`.
        found: what the source does.
        expected: what the rules say.
        says: the source's own expression.
        line: where it stands, when it stands somewhere.
        owner: the class it belongs to; empty for the whole tree.
    """

    name: str
    found: Value
    expected: Value
    says: str
    line: Line | None
    owner: str = ""

    def __str__(self) -> str:
        place = f"{self.line}: " if self.line else ""
        said = f" [{self.says}]" if self.says else ""
        owner = f" in {self.owner}" if self.owner else ""
        meaning = MEANING.get(self.name, self.name)
        return f"{place}{meaning}{owner}: the source has {self.found!r}{said}, the rules have {self.expected!r}"


@dataclass(frozen=True)
class Reading:
    """What `read_source` found.

    Attributes:
        label: the tree that was read.
        kind: folder, wheel or installed.
        version: what the tree calls itself.
        primary: the host-pool constructor that the others build on.
        others: further constructors that size a pool of their own.
        facts: everything stated, by name.
        nearest: the era whose rules fit best.
        differences: empty when they fit.
        notes: what a reader should know beside that.
    """

    label: str
    kind: str
    version: str | None
    primary: Constructor
    others: tuple[Constructor, ...]
    facts: dict[str, Fact]
    nearest: Era
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def era(self) -> Era | None:
        """The era whose rules the tree follows; None when it follows none."""
        return None if self.differences else self.nearest

    @property
    def warning(self) -> str | None:
        """Said when the release that the tree calls itself was not examined."""
        try:
            return rules_for(self.version).warning if self.version else "the tree does not say its version"
        except UnknownFact as error:
            return str(error)

    @property
    def contradiction(self) -> str | None:
        """Said when the code follows the rules of another era than the release that the tree calls itself."""
        stated = _stated_era(self.version)
        if self.era is None or stated in (None, self.era.name):
            return None
        own = next(era for era in eras() if era.name == stated)
        changed = "; ".join(str(difference) for difference in _compare(self.facts, own))
        return f"the tree calls itself {self.version}, which is {own}, but its code follows {self.era}: {changed}"

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
    found = _sized(tree)
    if not found:
        unparsed = "; could not be parsed: " + "; ".join(tree.unreadable[:3]) if tree.unreadable else ""
        raise InputError(
            f"{tree.label}: no host-pool constructor found in {len(tree.paths)} Python files (a class whose "
            f"__init__ takes host_to_device_ratio and sets its size); SGLang has one from 0.4.4 on{unparsed}"
        )
    primary = max(found, key=lambda one: _children(tree, one.class_name))
    others = (*(one for one in found if one is not primary), *_checked(tree, found))
    facts = dict(primary.facts)
    for fact in (*tree_facts(tree), *helper_facts(_called_from(tree, [primary, *others]))):
        facts[fact.name] = fact
    nearest = _nearest(facts, tree.version)
    differences = [*_compare(facts, nearest), *_compare_others(others, nearest)]
    return Reading(
        tree.label,
        tree.kind,
        tree.version,
        primary,
        others,
        facts,
        nearest,
        tuple(differences),
        tuple(f"not parsed: {note}" for note in tree.unreadable),
    )


def _sized(tree: Tree) -> list[Constructor]:
    return [read_constructor(module, owner, init) for module, owner, init in constructors(tree)]


def _checked(tree: Tree, sized: list[Constructor]) -> list[Constructor]:
    return list(checks(tree, {line for one in sized for line in one.guard}))


def _called_from(tree: Tree, pools: list[Constructor]) -> Iterator[tuple[Module, Line]]:
    """The lines that size and check, each with its file: what they call is read too."""
    for line in dict.fromkeys(line for one in pools for line in (*one.guard, *one.sizing)):
        module = tree.module(line.file)
        if module is not None:
            yield module, line


def read_helpers(tree: Tree) -> dict[str, tuple[str, ...]]:
    """The helpers below a tree's sizing and checks as hashes by name, as `known_forms` keeps them.

    Args:
        tree: from `open_tree` or `installed_tree`.

    Returns:
        One hash a statement for each function that is not followed as plain arithmetic.
    """
    sized = _sized(tree)
    lines = _called_from(tree, [*sized, *_checked(tree, sized)])
    return {
        function.name: tuple(digest for digest, _ in fingerprint(module, function))
        for module, function in reached(lines)
    }


def _stated_era(version: str | None) -> str | None:
    """The era of the release that a tree calls itself; None when it names none that is known."""
    try:
        return rules_for(version).era if version else None
    except UnknownFact:
        return None


def _nearest(facts: dict[str, Fact], version: str | None) -> Era:
    """The era with the fewest differences; among equals the one the tree calls itself."""
    stated = _stated_era(version)
    return min(eras(), key=lambda era: (len(list(_compare(facts, era))), era.name != stated))


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
                yield Difference(name, "absent", expected, "", None)
        elif fact.value != expected:
            yield Difference(name, fact.value, expected, fact.says, fact.line)
    for name in sorted(set(facts) - set(era.facts)):
        if facts[name].value == UNRECOGNISED:
            yield Difference(name, UNRECOGNISED, "a known form", facts[name].says, facts[name].line)


def _compare_others(others: tuple[Constructor, ...], era: Era) -> Iterator[Difference]:
    expected = {name: value for name, value in era.facts.items() if name not in _OF_TREE}
    expected |= dict.fromkeys(("unread", "check_reached"), "nothing of the kind")
    for other in others:
        for name, value in expected.items():
            fact = other.facts.get(name)
            if fact is None or fact.value == value or (name in _PRIMARY_ONLY and fact.value != UNRECOGNISED):
                continue
            yield Difference(name, fact.value, value, fact.says, fact.line, other.class_name)
