"""What people paste → ``LaunchConfig``: find the SGLang launch in shell text, docker or Kubernetes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.base.secrets import is_secret, redact
from hicache_lab.sglang.launch.config import Container, LaunchConfig, LaunchSource, flag_of, inherits_environment
from hicache_lab.sglang.launch.options import merge_config_file, read_options
from hicache_lab.sglang.launch.render import changed
from hicache_lab.sglang.launch.shell import (
    ASSIGNMENT,
    BRANCHES,
    ShellWord,
    assignments,
    clean_paste,
    plain_words,
    read_commands,
)
from hicache_lab.sglang.launch.wrappers import (
    Wrapped,
    batch_script,
    docker_run,
    dockerfile_argv,
    looks_like_document,
    read_documents,
    slurm_step,
    systemd_run,
    systemd_unit,
)
from hicache_lab.sglang.releases import parse_version

_MODULES = re.compile(r"(?:-m)?(?:sglang\.launch_server|sglang_router\.launch_server|dynamo\.sglang(\.\w+)*)")
_OTHER_ENGINES = re.compile(
    r"vllm(\.\S*)?|trtllm-serve|tensorrt_llm\S*|lmdeploy|text-generation-launcher|llama-server|"
    r"lmcache\S*|dynamo\.(vllm|trtllm)\S*|tritonserver|ollama"
)
_DEEPEST = 8
_LONGEST = 1_000_000


@dataclass
class _FoundLaunch:
    """A launch in a paste: the words before its options, its options, and what stands around it."""

    before: list[ShellWord]
    options: list[ShellWord]
    is_serve: bool = False
    container: Container | None = None
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def parse_launch(
    text: str | Sequence[str],
    *,
    sglang_version: str | None = None,
    base_dir: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> LaunchConfig:
    """Read the one SGLang launch in a paste.

    Args:
        text: shell text, a docker or Kubernetes wrapping of it, or an argv.
        sglang_version: the release, if known: abbreviations are then read as that release reads them.
        base_dir: where a ``--config FILE`` with a relative path is looked up; None leaves the file unread.
        variables: values of shell variables that the paste itself does not set.

    Returns:
        What was given; what was not given is None.

    Raises:
        UsageError: no SGLang launch, several different ones, or an option the server would not understand.
        InputError: the ``--config`` file is missing or not a YAML mapping.
    """
    launches = parse_launches(text, sglang_version=sglang_version, base_dir=base_dir, variables=variables)
    distinct = list(dict.fromkeys(launches))
    if len(distinct) > 1:
        heads = [" ".join(f"{flag_of(name)} {value}" for name, value in list(one.given())[:4]) for one in distinct]
        lines = "; ".join(f"{number}: {head[:100]}" for number, head in enumerate(heads, 1))
        raise UsageError(f"{len(distinct)} different SGLang launches in this text; give one of them ({lines})")
    return distinct[0]


def parse_launches(
    text: str | Sequence[str],
    *,
    sglang_version: str | None = None,
    base_dir: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[LaunchConfig, ...]:
    """Read every SGLang launch in a paste (prefill and decode servers of one manifest, for instance).

    Args and errors are those of ``parse_launch``, without the limit to one launch.
    """
    known = dict(variables or {})
    notes: list[str] = []
    if isinstance(text, str):
        if len(text) > _LONGEST:
            raise UsageError(f"a launch of {len(text):,} characters? give the launch itself (to {_LONGEST:,})")
        cleaned, notes = clean_paste(text)
        launches = _in_text(cleaned, known)
    else:
        launches = _in_words(plain_words(text), known)
    if not launches:
        raise UsageError(_nothing_found(text if isinstance(text, str) else shlex.join(text)))
    return tuple(_config(one, sglang_version, base_dir, notes) for one in launches)


def _in_text(text: str, variables: Mapping[str, str]) -> list[_FoundLaunch]:
    """A launch in whatever kind of text this is."""
    if unit := systemd_unit(text):
        return _in_wrapped([unit], variables)
    if looks_like_document(text):
        return _in_wrapped(read_documents(text), variables)
    launches = _in_shell(text, variables)
    if not launches and (listed := dockerfile_argv(text)):
        launches = _in_words(plain_words(listed), variables)
    share = batch_script(text)
    for one in launches:
        one.container = one.container or share
    return launches


def _nothing_found(text: str) -> str:
    for word in re.split(r"[\s\"'\[\],]+", text):
        if _OTHER_ENGINES.fullmatch(word.rpartition("/")[2]):
            return f"this launches {word[:60]}, not SGLang; only SGLang launches are in scope here"
    return (
        "no SGLang launch found; expected 'python -m sglang.launch_server …' or 'sglang serve MODEL …', "
        "bare or inside docker, compose, Kubernetes or sh -c"
    )


def _launch_end(words: Sequence[ShellWord]) -> tuple[int, bool] | None:
    """Where the launch's options begin, and whether the launch is ``sglang serve``."""
    before = ""
    for index, word in enumerate(words, 1):
        if _MODULES.fullmatch(word.text) and (word.text.startswith("-m") or re.fullmatch(r"-\w*m", before)):
            return index, False
        if word.text.endswith("sglang/launch_server.py"):
            return index, False
        if word.text == "serve" and before.rpartition("/")[2] == "sglang":
            return index, True
        before = word.text
    return None


def _in_words(words: Sequence[ShellWord], variables: Mapping[str, str], depth: int = 0) -> list[_FoundLaunch]:
    end = _launch_end(words)
    if end is not None:
        at, is_serve = end
        before = list(words[:at])
        container, env = _around(before)
        return [_FoundLaunch(before, list(words[at:]), is_serve, container, env)]
    for index, word in enumerate(words):
        # sh -c '…', ssh host '…': a command inside one word
        if "sglang" in word.text and re.search(r"\s", word.text) and depth < _DEEPEST:
            container, env = _around(words[:index])
            inner = _in_shell(word.text + "\n", {**variables, **env}, depth + 1)
            for one in inner:
                one.container = one.container or container
                one.env = env | one.env
            if inner:
                return inner
    return []


def _around(words: Sequence[ShellWord]) -> tuple[Container | None, dict[str, str]]:
    """What the words before a launch set: the container's facts and the server's environment."""
    docker = docker_run([word.text for word in words])
    if docker is None:
        texts = [word.text for word in words]
        # a unit's property looks like an assignment and is none
        plain = [word for before, word in zip(["", *texts], words, strict=False) if before not in {"-p", "--property"}]
        return systemd_run(texts) or slurm_step(texts), assignments(plain)
    container, env, end = docker
    return container, dict(env) | assignments(words[end:])


def _in_shell(text: str, variables: Mapping[str, str], depth: int = 0) -> list[_FoundLaunch]:
    commands = read_commands(text, variables)
    exported: dict[str, str] = {}
    launches: list[_FoundLaunch] = []
    for number, command in enumerate(commands):
        if command.words[0].text == "export":
            exported |= assignments(command.words)
        for one in _in_words(command.words, {**variables, **exported}, depth):
            unsure = next((before for before in commands[: number + 1] if before.words[0].text in BRANCHES), None)
            if unsure is not None:
                one.notes.append(
                    f"line {unsure.line}: this text branches or loops; what it assigns is taken as if it ran"
                )
            if inherits_environment(one.container):
                one.env = exported | one.env
            for following in commands[number + 1 : number + 2]:
                # an option that starts a command: a comment or a lost backslash has cut the launch in two
                if (first := following.words[0].text).startswith("--"):
                    raise UsageError(
                        f"line {following.line}: {first} stands alone: the line above ends the command "
                        "(comment, missing backslash), so the server never sees it; join the lines or delete it"
                    )
            launches.append(one)
    return launches


def _in_wrapped(commands: Sequence[Wrapped], variables: Mapping[str, str]) -> list[_FoundLaunch]:
    launches = []
    for wrapped in commands:
        known = {**variables, **dict(wrapped.env)}
        if wrapped.shell is not None:
            inner = _in_shell(wrapped.shell + "\n", known)
        else:
            words = [_kubernetes_word(word, known) for word in wrapped.argv]
            inner = _in_words(words, known)
            is_sglang = "sglang" in (wrapped.container.image or "")
            if not inner and is_sglang and words and words[0].text.startswith("--model"):
                # arguments of an image whose entrypoint is the launch
                inner = [_FoundLaunch(plain_words(["python", "-m", "sglang.launch_server"]), words)]
        for one in inner:
            one.container = one.container or wrapped.container
            one.env = dict(wrapped.env) | one.env
        launches += inner
    return launches


def _kubernetes_word(text: str, variables: Mapping[str, str]) -> ShellWord:
    """Kubernetes replaces ``$(NAME)`` in command and args, and nothing else."""
    missing: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match[1] not in variables:
            missing.append(match[1])
        return variables.get(match[1], match[0])

    expanded = re.sub(r"\$\(([A-Za-z_]\w*)\)", value, text)
    return ShellWord(expanded, shlex.quote(expanded), tuple(missing))


def launch_from_flags(
    argv: Sequence[str] = (), *, sglang_version: str | None = None, base_dir: Path | None = None, **fields: Any
) -> LaunchConfig:
    """The launch that these flags make, read as the server's own argparse reads them.

    Args:
        argv: options and values as on a command line, without the program: ``["--tp", "8", "--hicache-size=48"]``.
        sglang_version: the release, if known: abbreviations are then read as that release reads them.
        base_dir: where a ``--config FILE`` with a relative path is looked up; None leaves the file unread.
        **fields: further flags by the name of their field, e.g. ``model="m", tp_size=8``; they win over ``argv``.

    Raises:
        UsageError: an option or a value that the server would not understand.
        InputError: the ``--config`` file is missing or not a YAML mapping.
    """
    launch = _FoundLaunch([], plain_words(argv))
    return changed(_config(launch, sglang_version, base_dir, ()), fields)


def _config(launch: _FoundLaunch, release: str | None, base_dir: Path | None, notes: Sequence[str]) -> LaunchConfig:
    version = None if release is None else parse_version(release)
    options = read_options(launch.options, version, is_serve=launch.is_serve)
    merge_config_file(options, base_dir)
    return LaunchConfig(
        **options.values,
        sglang_version=release,
        other=tuple(options.other),
        env=tuple(
            (name, f"${name}" if value and is_secret(name) else redact(value)) for name, value in launch.env.items()
        ),
        container=launch.container,
        notes=tuple(dict.fromkeys([*notes, *launch.notes, *options.notes])),
        source=LaunchSource("command", "".join(_prefix(launch.before)), tuple(options.typed)),
    )


def _prefix(words: Sequence[ShellWord]) -> Iterator[str]:
    for number, word in enumerate(words):
        head = next((h for h in ("--env=", "-e=", "-e") if word.text.startswith(h)), "")
        match = ASSIGNMENT.fullmatch(word.text.removeprefix(head))
        lead = word.lead if number else ""
        if match is not None and match[2] and is_secret(match[1]):
            yield f'{lead}{head}{match[1]}="${match[1]}"'
        else:
            yield lead + word.raw
