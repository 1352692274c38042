"""Which options SGLang's launch command knows in which release, and how argparse reads what was typed."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache

from packaging.version import Version

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.resources import data_dir
from hicache_lab.sglang.launch.config import FIELD_TYPES, LaunchConfig, Rejection, flag_of
from hicache_lab.sglang.releases import parse_version

# --pp was a unique prefix until 0.5.3 and is what people go on typing
_SHORT_FORMS = {
    "--tp": "tp_size",
    "--pp": "pp_size",
    "--dp": "dp_size",
    "--ep": "ep_size",
    "--dcp": "dcp_size",
}
# options that the program around the server takes for itself, by their prefix
_LAUNCHERS = {"--router-": "sglang_router.launch_server", "--dyn-": "dynamo.sglang"}


@dataclass(frozen=True)
class Period:
    """A run of releases (places in ``known_releases``) in which an option is the same."""

    first: int
    last: int
    dest: str
    arity: str
    kind: str
    action: str
    choices: tuple[str, ...] | None


@dataclass(frozen=True)
class Flag:
    """One option name and its periods, oldest first."""

    name: str
    periods: tuple[Period, ...]

    @property
    def sets(self) -> str:
        """The argument that it sets, whatever its name; a ``--no-`` form sets the opposite of its switch."""
        newest = self.periods[-1]
        is_opposite = newest.action == "BooleanOptionalAction" and self.name.startswith("--no-")
        return f"no {newest.dest}" if is_opposite else "model" if newest.dest == "model_path" else newest.dest

    @property
    def field(self) -> str | None:
        """The ``LaunchConfig`` field it sets, or None."""
        return self.sets if self.sets in FIELD_TYPES else None

    def period(self, version: Version | None) -> Period | None:
        """What it is in a release (of no one: in the newest that has it), None where the release lacks it.

        A release that was not read counts as the nearest earlier one.
        """
        if version is None:
            return self.periods[-1]
        at = bisect_right(known_releases(), version) - 1
        return next((one for one in self.periods if one.first <= at <= one.last), None)

    def exists_in(self, version: Version) -> bool:
        """Whether a release has it."""
        return self.period(version) is not None

    def arity(self, version: Version | None = None) -> str:
        """How many values it takes: 0, 1, ?, + or *; of no release, as many as any release takes."""
        if version is None and len(arities := {period.arity for period in self.periods}) > 1:
            return "*" if arities & {"+", "*"} else "?"
        return (self.period(version) or self.periods[-1]).arity

    @property
    def history(self) -> str:
        """Which releases have it, in words."""
        spans: list[list[int]] = []
        for period in self.periods:
            if spans and spans[-1][1] == period.first - 1:
                spans[-1][1] = period.last
            else:
                spans.append([period.first, period.last])
        names, newest = known_releases(), len(known_releases()) - 1
        return ", ".join(
            f"from {names[first]} on"
            if last == newest
            else f"{names[first]}"
            if first == last
            else f"{names[first]} to {names[last]}"
            for first, last in spans
        )


@cache
def _table() -> tuple[tuple[Version, ...], dict[str, Flag], tuple[tuple[Version, Version], ...]]:
    path = data_dir() / "options.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        at = {name: number for number, name in enumerate(raw["releases"])}
        flags = {}
        for name, rows in raw["options"].items():
            periods = tuple(
                Period(
                    at[first],
                    at[last],
                    spec.get("dest", name.lstrip("-").replace("-", "_")),
                    spec.get("values", "1"),
                    spec.get("type", "str"),
                    spec.get("action", "store"),
                    tuple(raw["choices"][spec["choices"]]) if "choices" in spec else None,
                )
                for first, last, spec in rows
            )
            flags[name] = Flag(name, periods)
        spans = tuple((Version(first), Version(last)) for first, last in raw["abbreviated"])
        return tuple(Version(release) for release in raw["releases"]), flags, spans
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not the table of SGLang options that ships with hicache_lab: {error!r}") from error


def known_flags() -> dict[str, Flag]:
    """Every option name of the examined releases."""
    return _table()[1]


def known_releases() -> tuple[Version, ...]:
    """The releases whose options were read, oldest first."""
    return _table()[0]


@dataclass(frozen=True)
class Resolved:
    """How one typed option was read; ``flag`` is None when no release knows it."""

    flag: Flag | None
    note: str | None = None


def _completions(spelling: str, version: Version) -> list[str]:
    """What a release's argparse takes an option for: the option of that name, else each that it begins.

    Two names of one option count as two (argparse._get_option_tuples). A release that was not read counts as the
    nearest earlier one.
    """
    flag = known_flags().get(spelling)
    if flag is not None and flag.exists_in(version):
        return [spelling]
    nearest = max((one for one in known_releases() if one <= version), default=version)
    if not any(first <= nearest <= last for first, last in _table()[2]):
        return []
    return [name for name, one in known_flags().items() if name.startswith(spelling) and one.exists_in(version)]


def _ambiguous(spelling: str, names: list[str]) -> str:
    return f"ambiguous option: {spelling} could match {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"


def _abbreviated(spelling: str, version: Version | None) -> Resolved | None:
    """Argparse's own rule: a prefix stands for the one option it begins, release by release."""
    begun = {name: flag for name, flag in known_flags().items() if name.startswith(spelling)}
    if not begun:
        return None
    releases = [version] if version is not None else known_releases()
    by_release = {one: _completions(spelling, one) for one in releases}
    only = {begun[names[0]].sets: begun[names[0]] for names in by_release.values() if len(names) == 1}
    dest = _SHORT_FORMS.get(spelling) or (next(iter(only)) if len(only) == 1 else None)
    if dest is None:
        names = sorted(begun) if version is None else by_release[version]
        if not names:
            return Resolved(next(iter(begun.values()))) if len({flag.sets for flag in begun.values()}) == 1 else None
        raise UsageError(
            f"{spelling}: ambiguous, the server refuses it ({_ambiguous(spelling, names)}); write the whole name"
        )
    note = None
    if any(len(names) > 1 for names in by_release.values()):
        since = next(one for one in known_releases() if len(_completions(spelling, one)) > 1)
        note = (
            f"{spelling} is read as {flag_of(dest)}, but it is ambiguous from {since} on and the server "
            f"refuses it there; write {flag_of(dest)}"
        )
    return Resolved(only.get(dest) or next(flag for flag in begun.values() if flag.sets == dest), note)


@lru_cache(maxsize=4096)
def resolve(spelling: str, version: Version | None = None) -> Resolved:
    """Read an option name as typed: exact, with underscores, or abbreviated as argparse allows.

    Raises:
        UsageError: an abbreviation of several options; the message lists them.
    """
    exact = known_flags().get(spelling)
    if exact is not None:
        # the name of another release may still be the beginning of one in this
        names = [] if version is None else _completions(spelling, version)
        return Resolved(known_flags()[names[0]] if len(names) == 1 else exact)
    hyphened = spelling.replace("_", "-")
    if hyphened != spelling and hyphened in known_flags():
        return Resolved(
            known_flags()[hyphened],
            f"{spelling} is read as {hyphened}; the server itself only knows the form with hyphens",
        )
    if (launcher := _launcher(spelling)) is not None:
        return Resolved(None, f"{spelling} is an option of {launcher}, which keeps it from the server")
    found = _abbreviated(spelling, version)
    if found is not None:
        return found
    return Resolved(None, f"{spelling} is in none of the releases {_span()}: kept, not judged{_hint(spelling)}")


def _launcher(spelling: str) -> str | None:
    return next((module for prefix, module in _LAUNCHERS.items() if spelling.startswith(prefix)), None)


def _hint(spelling: str, version: Version | None = None) -> str:
    """The option that was probably meant: another name of the same one, else one written nearly so."""
    alive = [flag for flag in known_flags().values() if version is None or flag.exists_in(version)]
    flag = known_flags().get(spelling)
    same = [one.name for one in alive if flag is not None and one is not flag and one.sets == flag.sets]
    # an option of other releases is not a slip of the pen: only a renamed one is still close
    close = same or get_close_matches(spelling, [one.name for one in alive], n=1, cutoff=0.9 if flag else 0.8)
    return f"; did you mean {close[0]}?" if close else ""


def _span() -> str:
    return f"{known_releases()[0]} to {known_releases()[-1]}"


def _spellings(config: LaunchConfig) -> dict[str, str]:
    """The options of a launch as argparse will see them, each with its whole name."""
    typed = {token.spelling or token.name: token.name for token in config.source.options} if config.source else {}
    dests = {known_flags()[name].field for name in typed.values() if name in known_flags()}
    fields = [flag_of(name) for name, _ in config.given() if name not in dests]
    # a dump's other fields are not all options of the command line
    is_dump = config.source is not None and config.source.kind == "server_args"
    others = [] if is_dump else [name for name, _ in config.other if name not in typed.values()]
    return typed | {name: name for name in [*fields, *others]}


def refusals(config: LaunchConfig, version: str) -> tuple[Rejection, ...]:
    """Everything the release's own argument parser will refuse: unknown options, values, spellings.

    Args:
        config: the launch.
        version: the SGLang release, e.g. ``0.4.5``.
    """
    release, rejections = parse_version(version), list(config.rejections)
    typed = config.source.options if config.source else ()
    for spelling, name in _spellings(config).items():
        flag, launcher = known_flags().get(name), _launcher(name)
        if flag is not None:
            rejections += _unknown(spelling, flag, release)
        elif launcher is None:
            rejections.append(Rejection(name, f"{name} is in none of the releases {_span()}{_hint(name)}"))
        elif config.source is None or launcher not in config.source.prefix:
            rejections.append(Rejection(name, f"{name} is an option of {launcher}; the server itself refuses it"))
    given = [(token.name, token.values) for token in typed if token.field is None]
    for name, values in [*((flag_of(name), (str(value),)) for name, value in config.given()), *given]:
        rejections += _values_refused(name, values, release)
    for token in typed:
        if "_" in token.spelling and token.spelling not in known_flags():
            hyphened = token.spelling.replace("_", "-")
            rejections.append(Rejection(token.name, f"{token.spelling}: the server only knows {hyphened}"))
        rejections += _suffix_refused(token.name, token.values, release)
    return tuple(rejections)


def _unknown(spelling: str, flag: Flag, version: Version) -> list[Rejection]:
    name = flag.name
    # underscores are refused for themselves
    spelling = name if "_" in spelling or not spelling.startswith("--") else spelling
    names = _completions(spelling, version)
    if len(names) > 1:
        which = _ambiguous(spelling, names)
        return [Rejection(name, f"{spelling}: ambiguous in {version} ({which}); write the whole name")]
    if not names:
        have = f"releases that have it: {flag.history}{_hint(name, version)}"
        return [Rejection(name, f"{spelling} does not exist in {version}; {have}")]
    if known_flags()[names[0]].sets != flag.sets:
        return [Rejection(name, f"{spelling}: {version} reads it as {names[0]}, not {name}; write the whole name")]
    return []


def _values_refused(name: str, values: tuple[str, ...], version: Version) -> list[Rejection]:
    flag = known_flags().get(name)
    period = flag.period(version) if flag else None
    if period is None:
        return []
    if period.action in {"stops", "help"}:
        return [Rejection(name, f"{name}: {version} answers it with a text and stops; leave it out")]
    # a variable may turn out to be anything
    wrong = [one for one in values if period.choices and one not in period.choices and "$" not in one]
    return [Rejection(name, f"{name} {one}: {version} accepts {', '.join(period.choices or ())}") for one in wrong[:1]]


def _suffix_refused(name: str, values: tuple[str, ...], version: Version) -> list[Rejection]:
    """``100k`` where the release still reads a plain whole number."""
    flag = known_flags().get(name)
    period = flag.period(version) if flag else None
    if flag is None or period is None or period.kind != "int" or not values or values[0].strip().isdigit():
        return []
    since = next((one.first for one in flag.periods if one.kind == "human_readable_int"), None)
    if since is None:
        return []
    reason = f"only {known_releases()[since]} and later read such a suffix"
    return [Rejection(name, f"{name} {values[0]}: {reason}")]
