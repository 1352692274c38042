"""Which options SGLang's launch command knows in which release, and how argparse reads what was typed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache

from packaging.version import Version

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.resources import data_dir
from hicache_lab.sglang.launch.config import FIELD_TYPES, LaunchConfig, Rejection, TypedOption, flag_of
from hicache_lab.sglang.releases import parse_version

# --pp was a unique prefix until 0.5.3 and is what people go on typing
_SHORT_FORMS = {
    "--tp": "tp_size",
    "--pp": "pp_size",
    "--dp": "dp_size",
    "--ep": "ep_size",
    "--dcp": "dcp_size",
}


@dataclass(frozen=True)
class Flag:
    """One option name.

    Attributes:
        name: as it is written.
        dest: the server's argument that it sets.
        arity: how many values, as argparse counts them (``0`` for a switch).
        seen: the first and last release of each run of releases that have it.
        choices: from which release on it accepts which values (None: any).
        si_since: the first release that reads 100k and 128Ki; None for none.
    """

    name: str
    dest: str
    arity: str
    seen: tuple[tuple[str, str], ...]
    choices: tuple[tuple[str, tuple[str, ...] | None], ...] = ()
    si_since: str | None = None

    @property
    def field(self) -> str | None:
        """The ``LaunchConfig`` field it sets, or None."""
        name = "model" if self.dest == "model_path" else self.dest
        return name if name in FIELD_TYPES else None

    def exists_in(self, version: Version) -> bool:
        """Whether a release has it; releases past the newest known one count as that one."""
        version = min(version, known_releases()[-1])
        return any(parse_version(first) <= version <= parse_version(last) for first, last in self.seen)

    def accepted_in(self, version: Version) -> tuple[str, ...] | None:
        """The values that a release accepts; None: any, or not recorded."""
        return next((values for since, values in reversed(self.choices) if parse_version(since) <= version), None)

    @property
    def history(self) -> str:
        """Which releases have it, in words."""
        newest = str(known_releases()[-1])
        return ", ".join(
            f"from {first} on" if last == newest else f"{first}" if first == last else f"{first} to {last}"
            for first, last in self.seen
        )


@cache
def _table() -> tuple[tuple[Version, ...], dict[str, Flag]]:
    path = data_dir() / "flags.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        flags = {
            name: Flag(
                name,
                entry["dest"],
                entry["arity"],
                tuple((first, last) for first, last in entry["seen"]),
                tuple((row["since"], row["choices"] and tuple(row["choices"])) for row in entry.get("choices", ())),
                entry.get("si_since"),
            )
            for name, entry in raw["flags"].items()
        }
        return tuple(map(Version, raw["releases"])), flags
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


def _dests(prefix: str, version: Version) -> set[str]:
    """What a prefix may stand for in a release."""
    return {f.dest for f in known_flags().values() if f.name.startswith(prefix) and f.exists_in(version)}


def _abbreviated(spelling: str, version: Version | None) -> Resolved | None:
    """Argparse's own rule: a prefix stands for the one option it begins, release by release."""
    flags = {name: flag for name, flag in known_flags().items() if name.startswith(spelling)}
    if not flags:
        return None
    by_release = {one: _dests(spelling, one) for one in ([version] if version is not None else known_releases())}
    unique = {next(iter(dests)) for dests in by_release.values() if len(dests) == 1}
    dest = _SHORT_FORMS.get(spelling) or (unique.pop() if len(unique) == 1 else None)
    if dest is None:
        names = sorted(name for name, flag in flags.items() if version is None or flag.exists_in(version))
        if not names:
            return Resolved(next(iter(flags.values()))) if len(flags) == 1 else None
        raise UsageError(
            f"{spelling}: ambiguous, the server refuses it; it could be {', '.join(names[:8])}"
            f"{' …' if len(names) > 8 else ''}; write the whole name"
        )
    note = None
    if clash := [one for one, dests in by_release.items() if len(dests) > 1]:
        note = (
            f"{spelling} is read as {flag_of(dest)}, but it is ambiguous from {clash[0]} on and the server "
            f"refuses it there; write {flag_of(dest)}"
        )
    of_dest = [flag for flag in known_flags().values() if flag.dest == dest]
    return Resolved(next((flag for flag in of_dest if flag.name in flags), of_dest[0]), note)


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
    if hyphened in known_flags():
        return Resolved(
            known_flags()[hyphened],
            f"{spelling} is read as {hyphened}; the server itself only knows the form with hyphens",
        )
    abbreviated = _abbreviated(spelling, version)
    if abbreviated is not None:
        return abbreviated
    close = get_close_matches(spelling, known_flags(), n=1, cutoff=0.8)
    hint = f"; did you mean {close[0]}?" if close else ""
    return Resolved(None, f"{_unknown(spelling)}: kept, not judged{hint}")


def _unknown(name: str) -> str:
    return f"{name} is in none of the releases {known_releases()[0]} to {known_releases()[-1]}"


def _names(config: LaunchConfig) -> list[str]:
    """The options of a launch: as typed where they were typed, else by the name of their field."""
    typed = [token.name for token in config.source.options] if config.source else []
    dests = {known_flags()[name].field for name in typed if name in known_flags()}
    fields = [flag_of(name) for name, _ in config.given() if name not in dests]
    # a dump's other fields are not all options of the command line
    is_dump = config.source is not None and config.source.kind == "server_args"
    others = [] if is_dump else [name for name, _ in config.other]
    return list(dict.fromkeys([*typed, *fields, *others]))


def refusals(config: LaunchConfig, version: str) -> tuple[Rejection, ...]:
    """Everything the release's own argument parser will refuse: unknown options, values, spellings.

    Args:
        config: the launch.
        version: the SGLang release, e.g. ``0.4.5``.
    """
    release, rejections = parse_version(version), list(config.rejections)
    for name in _names(config):
        flag = known_flags().get(name)
        if flag is None:
            rejections.append(Rejection(name, _unknown(name)))
        elif not flag.exists_in(release) and _dests(name, release) != {flag.dest}:
            rejections.append(
                Rejection(name, f"{name} does not exist in {version}; releases that have it: {flag.history}")
            )
    for field_name, value in config.given():
        flag = known_flags()[flag_of(field_name)]
        accepted = flag.accepted_in(release)
        if accepted is not None and value not in accepted and flag.exists_in(release):
            rejections.append(Rejection(flag.name, f"{flag.name} {value}: {version} accepts {', '.join(accepted)}"))
    for token in config.source.options if config.source else ():
        problem = _spelling_problem(token, release, version)
        if problem is not None:
            rejections.append(Rejection(token.spelling, problem))
    return tuple(rejections)


def _spelling_problem(token: TypedOption, release: Version, version: str) -> str | None:
    spelling, flag = token.spelling, known_flags().get(token.spelling)
    if flag is None:
        if spelling.startswith("--") and "_" in spelling:
            return f"{spelling}: the server only knows {spelling.replace('_', '-')}"
        is_ambiguous = spelling.startswith("--") and len(_dests(spelling, release)) > 1
        return f"{spelling}: ambiguous in {version}; write the whole name" if is_ambiguous else None
    too_early = flag.si_since and flag.exists_in(release) and release < parse_version(flag.si_since)
    if too_early and token.values and not token.values[0].strip().isdigit():
        return f"{spelling} {token.values[0]}: only {flag.si_since} and later read such a suffix"
    return None
