"""Which options SGLang's launch command knows in which release, and how argparse reads what was typed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache

from packaging.version import InvalidVersion, Version

from hicache_lab.base.errors import InputError, UnknownFact, UsageError
from hicache_lab.base.resources import data_dir
from hicache_lab.sglang.launch.config import FIELD_TYPES, LaunchConfig, Rejection, flag_of

# --pp was a unique prefix until 0.5.3 and is what people go on typing
_SHORT_FORMS = {
    "--tp": "tp_size",
    "--pp": "pp_size",
    "--dp": "dp_size",
    "--ep": "ep_size",
    "--dcp": "dcp_size",
}


@cache
def _version(text: str) -> Version:
    return Version(text)


@dataclass(frozen=True)
class Period:
    """From a release on: the default and the accepted values (None: any)."""

    since: str
    default: object
    choices: tuple[str, ...] | None


@dataclass(frozen=True)
class Flag:
    """One option name. ``seen`` holds the first and last release of each run of releases that have it."""

    name: str
    dest: str
    arity: str
    seen: tuple[tuple[str, str], ...]
    periods: tuple[Period, ...] = ()
    si_since: str | None = None

    @property
    def field(self) -> str | None:
        """The ``LaunchConfig`` field it sets, or None."""
        name = "model" if self.dest == "model_path" else self.dest
        return name if name in FIELD_TYPES else None

    def exists_in(self, version: Version) -> bool:
        """Whether a release has it; releases past the newest known one count as that one."""
        version = min(version, newest_known())
        return any(_version(first) <= version <= _version(last) for first, last in self.seen)

    def period(self, version: Version) -> Period | None:
        """What holds for a release, or None where it is not recorded."""
        return next((p for p in reversed(self.periods) if _version(p.since) <= version), None)

    @property
    def history(self) -> str:
        """Which releases have it, in words."""
        newest = str(newest_known())
        return ", ".join(
            f"from {first} on" if last == newest else f"{first}" if first == last else f"{first} to {last}"
            for first, last in self.seen
        )


def _periods(entry: dict[str, list[dict[str, object]]]) -> tuple[Period, ...]:
    rows = entry.get("choices") or entry.get("defaults") or []
    found = []
    for row in rows:
        choices = row.get("choices")
        found.append(Period(str(row["since"]), row["default"], tuple(choices) if isinstance(choices, list) else None))
    return tuple(found)


@cache
def _table() -> tuple[tuple[str, ...], dict[str, Flag]]:
    path = data_dir() / "flags.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        flags = {
            name: Flag(
                name,
                entry["dest"],
                entry["arity"],
                tuple((first, last) for first, last in entry["seen"]),
                _periods(entry),
                entry.get("si_since"),
            )
            for name, entry in raw["flags"].items()
        }
        return tuple(raw["releases"]), flags
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not the table of SGLang options that ships with hicache_lab: {error!r}") from error


def known_flags() -> dict[str, Flag]:
    """Every option name of the examined releases."""
    return _table()[1]


@cache
def known_releases() -> tuple[Version, ...]:
    """The releases whose options were read, oldest first."""
    return tuple(Version(release) for release in _table()[0])


def newest_known() -> Version:
    """The newest release whose options were read."""
    return known_releases()[-1]


def release(text: str) -> Version:
    """A release number as given by a user, ``0.5.8`` or ``v0.5.8``.

    Raises:
        UnknownFact: not a release number.
    """
    try:
        return Version(text.strip().removeprefix("v"))
    except InvalidVersion as error:
        raise UnknownFact(f"--sglang-version: expected a release such as 0.5.8, got {text!r}") from error


@dataclass(frozen=True)
class Resolved:
    """How one typed option was read; ``flag`` is None when no release knows it."""

    flag: Flag | None
    note: str | None = None


def _prefixed(spelling: str, version: Version) -> set[str]:
    return {f.dest for f in known_flags().values() if f.name.startswith(spelling) and f.exists_in(version)}


def _by_dest(dest: str, spelling: str) -> Flag:
    names = [f for f in known_flags().values() if f.dest == dest]
    return next((f for f in names if f.name.startswith(spelling)), names[0])


def _abbreviated(spelling: str, version: Version | None) -> Resolved | None:
    """Argparse's own rule: a prefix stands for the one option it begins, release by release."""
    releases = [version] if version is not None else known_releases()
    by_release = {one: _prefixed(spelling, one) for one in releases}
    unique = {next(iter(dests)) for dests in by_release.values() if len(dests) == 1}
    found = {f.name for f in known_flags().values() if f.name.startswith(spelling)}
    if not found:
        return None
    dest = _SHORT_FORMS.get(spelling) or (unique.pop() if len(unique) == 1 else None)
    if dest is None:
        names = sorted(found if version is None else {n for n in found if known_flags()[n].exists_in(version)})
        if not names:
            return Resolved(_by_dest(known_flags()[sorted(found)[0]].dest, spelling)) if len(found) == 1 else None
        raise UsageError(
            f"{spelling}: ambiguous, the server refuses it; it could be {', '.join(names[:8])}"
            f"{' …' if len(names) > 8 else ''}; write the whole name"
        )
    clash = [one for one, dests in by_release.items() if len(dests) > 1]
    note = None
    if clash:
        note = (
            f"{spelling} is read as {flag_of(dest)}, but it is ambiguous from {clash[0]} on and the server "
            f"refuses it there; write {flag_of(dest)}"
        )
    return Resolved(_by_dest(dest, spelling), note)


@lru_cache(maxsize=4096)
def resolve(spelling: str, version: Version | None = None) -> Resolved:
    """Read an option name as typed: exact, with underscores, or abbreviated as argparse allows.

    Raises:
        UsageError: an abbreviation of several options; the message lists them.
    """
    exact = known_flags().get(spelling)
    if exact is not None:
        return Resolved(exact)
    hyphened = spelling.replace("_", "-")
    if hyphened != spelling and hyphened in known_flags():
        return Resolved(
            known_flags()[hyphened],
            f"{spelling} is read as {hyphened}; the server itself only knows the form with hyphens",
        )
    found = _abbreviated(spelling, version)
    if found is not None:
        return found
    close = get_close_matches(spelling, known_flags(), n=1, cutoff=0.8)
    hint = f"; did you mean {close[0]}?" if close else ""
    return Resolved(None, f"{spelling} is in none of the releases {_span()}: kept, not judged{hint}")


def _span() -> str:
    return f"{known_releases()[0]} to {newest_known()}"


def _names(config: LaunchConfig) -> list[str]:
    """The options of a launch: as typed where they were typed, else by the name of their field."""
    typed = [token.name for token in config.source.options] if config.source else []
    dests = {known_flags()[name].field for name in typed if name in known_flags()}
    fields = [flag_of(name) for name, _ in config.given() if name not in dests]
    # a dump's other fields are not all options of the command line
    is_dump = config.source is not None and config.source.kind == "server_args"
    others = [] if is_dump else [name for name, _ in config.other]
    return list(dict.fromkeys([*typed, *fields, *others]))


def flags_unknown_to(config: LaunchConfig, version: str) -> tuple[Rejection, ...]:
    """Options of a launch that the release does not have (its argparse refuses to start).

    Args:
        config: the launch.
        version: the SGLang release, e.g. ``0.4.5``.

    Returns:
        One entry an option, each naming the releases that have it.
    """
    parsed, rejections = release(version), []
    for name in _names(config):
        flag = known_flags().get(name)
        if flag is None:
            rejections.append(Rejection(name, f"{name} is in none of the releases {_span()}"))
        elif not flag.exists_in(parsed) and _prefixed(name, parsed) != {flag.dest}:
            rejections.append(
                Rejection(name, f"{name} does not exist in {version}; releases that have it: {flag.history}")
            )
    return tuple(rejections)


def _value_refused(name: str, value: object, flag: Flag, version: str) -> Rejection | None:
    parsed = release(version)
    period = flag.period(parsed)
    if period is None or period.choices is None or value in period.choices or not flag.exists_in(parsed):
        return None
    return Rejection(name, f"{name} {value}: {version} accepts {', '.join(period.choices)}")


def refusals(config: LaunchConfig, version: str) -> tuple[Rejection, ...]:
    """Everything the release's own argument parser will refuse: unknown options, values, spellings.

    Args:
        config: the launch.
        version: the SGLang release.
    """
    rejections = [*config.rejections, *flags_unknown_to(config, version)]
    for field_name, value in config.given():
        flag = known_flags()[flag_of(field_name)]
        refused = _value_refused(flag_of(field_name), value, flag, version)
        if refused is not None:
            rejections.append(refused)
    for token in config.source.options if config.source else ():
        rejections.extend(_spelling_refused(token.spelling, token.values, version))
    return tuple(rejections)


def _spelling_refused(spelling: str, values: tuple[str, ...], version: str) -> list[Rejection]:
    parsed = release(version)
    if not spelling.startswith("--"):
        return []
    if "_" in spelling and spelling not in known_flags():
        return [Rejection(spelling, f"{spelling}: the server only knows {spelling.replace('_', '-')}")]
    exact = known_flags().get(spelling)
    if exact is None or not exact.exists_in(parsed):
        clash = _prefixed(spelling, parsed)
        if exact is None and len(clash) > 1:
            return [Rejection(spelling, f"{spelling}: ambiguous in {version}; write the whole name")]
        return []
    if exact.si_since and parsed < _version(exact.si_since) and values and not values[0].strip().isdigit():
        return [Rejection(spelling, f"{spelling} {values[0]}: only {exact.si_since} and later read such a suffix")]
    return []
