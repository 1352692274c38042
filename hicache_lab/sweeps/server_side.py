"""The server side of a grid: a server that runs already, a launch line to start here, or SGLang on this CPU.

``{name}`` in a launch line or in the CPU server's flags stands for the value of an axis or of a parameter. It is put
into words, never into a shell: a value with spaces stays one word, a ``{name}`` that is a word of its own becomes as
many words as its text has, and null takes the word away together with the flag before it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hicache_lab.base.errors import UsageError
from hicache_lab.base.secrets import is_secret, redact
from hicache_lab.preflight.ask import DEVICE_FACTS, OTHER_FACTS
from hicache_lab.serving.client.problems import checked_url
from hicache_lab.serving.cpu_server import RELEASES, Launch
from hicache_lab.sglang.launch import LaunchConfig, launch_from_flags, parse_launch
from hicache_lab.sizing.tiny_models import TINY_MODELS, tiny_config
from hicache_lab.sweeps.reading import check_keys, mapping, refuse

Between = Literal["keep", "flush", "restart"]
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
# stands for {port} while a line is read; no server of ours could have it
_ANY_PORT = 1
# memory of the host is measured where the server starts; the device is what a person has to say
FACTS = (*DEVICE_FACTS, *OTHER_FACTS)


@dataclass(frozen=True)
class ServerStart:
    """The server that a point starts, its settings in place and read once.

    Attributes:
        words: as they are recorded: a launch line with ``{port}`` in it, or release, model, ranks and flags of the CPU
            server.
        model: what preflight sizes: a name, or a config.json's content.
        release: SGLang's.
        config: the launch.
        facts: device facts and overhead that the grid states, under their names in ``plan``.
        cpu: what the CPU server is asked for; None for a launch line.
    """

    words: tuple[str, ...]
    model: str | Mapping[str, Any]
    release: str
    config: LaunchConfig
    facts: Mapping[str, Any]
    cpu: Launch | None = None

    def port(self, free: int) -> int:
        """The line's own port, or ``free`` where the line leaves it open."""
        return free if self.config.port == _ANY_PORT else self.config.port or 0

    def command(self, port: int) -> tuple[dict[str, str], tuple[str, ...]]:
        """Environment variables and command of a launch line."""
        return split_environment(tuple(word.replace("{port}", str(port)) for word in self.words))


@dataclass(frozen=True)
class ExistingServer:
    """A server that somebody else started; it is not stopped, and flushed only if the grid says so."""

    base_url: str
    between_runs: Between = "keep"
    api_key_env: str = ""

    placeholders: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LaunchLine:
    """A launch line that is started and stopped on this machine.

    Attributes:
        template: the line; ``{port}`` is a free port.
        sglang_version: the release, for preflight.
        model: for preflight, if the line's own path says too little.
        facts: device facts and overhead for preflight, under their names in ``plan``.
        ready_seconds: how long it may take until /health answers 200.
        between_runs: what happens between two runs with the same settings.
    """

    template: str
    sglang_version: str
    model: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    ready_seconds: float = 1800
    between_runs: Between = "flush"

    @property
    def placeholders(self) -> frozenset[str]:
        """Names in the template, the port's excepted."""
        return frozenset(_PLACEHOLDER.findall(self.template)) - {"port"}

    def start(self, values: Mapping[str, Any]) -> ServerStart:
        """The line with values in place of its names.

        Raises:
            UsageError: not an SGLang launch, a --host beyond loopback, no port, or a key in the line.
        """
        words = fill_in(self.template, values)
        for word in words:
            name = word.partition("=")[0]
            if is_secret(name) or redact(word) != word:
                raise UsageError(f"{name}: the line is recorded; export a key in your shell instead of writing it here")
        config = parse_launch(
            [word.replace("{port}", str(_ANY_PORT)) for word in words], sglang_version=self.sglang_version
        )
        if config.host is not None and config.host not in LOOPBACK:
            raise UsageError(f"--host {config.host}: expected 127.0.0.1; a sweep starts servers for this machine only")
        if config.port is None:
            raise UsageError("launch: expected --port {port} (a free one is put in) or a fixed --port")
        model = self.model or config.model
        if model is None:
            raise UsageError("launch: the line names no --model-path; give `model:` beside it")
        return ServerStart(words, model, self.sglang_version, config, self.facts)


@dataclass(frozen=True)
class CpuServer:
    """Real SGLang on this machine's CPU; ``flags`` are SGLang's own, HiCache's included."""

    release: str
    model: str = "tiny-llama"
    tp_size: int = 1
    flags: str = ""
    ready_seconds: float = 420
    between_runs: Between = "flush"

    @property
    def placeholders(self) -> frozenset[str]:
        """Names in the flags."""
        return frozenset(_PLACEHOLDER.findall(self.flags))

    def start(self, values: Mapping[str, Any]) -> ServerStart:
        """The flags with values in place of their names; HiCache is on only where they turn it on.

        Raises:
            UsageError: an option SGLang would not understand, or that the CPU server decides itself.
        """
        flags = fill_in(self.flags, values)
        launch = Launch(self.release, model=self.model, tp_size=self.tp_size, flags=flags, hicache=False)
        config = launch_from_flags(
            launch.sglang_flags, sglang_version=self.release, model=self.model, tp_size=self.tp_size
        )
        model = tiny_config(self.model) if self.model in TINY_MODELS else self.model
        words = (self.release, self.model, str(self.tp_size), *flags)
        return ServerStart(words, model, self.release, config, {"device_tokens": config.max_total_tokens}, launch)


ServerSide = ExistingServer | LaunchLine | CpuServer


def read_server_side(path: Path, raw: object) -> ServerSide:
    """The ``server:`` part of a grid file.

    Raises:
        UsageError: none or several of base_url, launch and cpu, an unknown key, or a value of another form.
    """
    given = mapping(path, "server", raw)
    kinds = [kind for kind in ("base_url", "launch", "cpu") if kind in given]
    if len(kinds) != 1:
        refuse(path, "server", "one of base_url, launch and cpu", ", ".join(kinds) or None)
    if kinds != ["base_url"]:
        return _launch_line(path, given) if kinds == ["launch"] else _cpu(path, given)
    check_keys(path, "server: ", given, ("base_url", "between_runs", "api_key_env"))
    between = _between(path, given, "keep", ("keep", "flush"))
    return ExistingServer(checked_url(_word(path, given, "base_url")), between, _word(path, given, "api_key_env", ""))


def _launch_line(path: Path, given: dict[str, Any]) -> LaunchLine:
    known = ("launch", "sglang_version", "model", "facts", "ready_seconds", "between_runs")
    check_keys(path, "server: ", given, known)
    facts = mapping(path, "server: facts", given.get("facts"))
    for name in ("host_ram", "available"):
        if name in facts:
            raise UsageError(
                f"{path}: server: facts: {name}: the server starts on this machine, whose memory is measured; "
                "`hicache-lab sweep --check --host-ram …` judges a grid for another host"
            )
    check_keys(path, "server: facts: ", facts, FACTS)
    line = _word(path, given, "launch")
    try:
        shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{path}: server: launch: quotes do not match ({error})") from None
    return LaunchLine(
        line,
        _word(path, given, "sglang_version"),
        _word(path, given, "model", "") or None,
        facts,
        _seconds(path, given, 1800),
        _between(path, given, "flush", ("keep", "flush", "restart")),
    )


def _cpu(path: Path, given: dict[str, Any]) -> CpuServer:
    raw = mapping(path, "server: cpu", given["cpu"])
    check_keys(path, "server: ", given, ("cpu", "ready_seconds", "between_runs"))
    check_keys(path, "server: cpu: ", raw, ("release", "model", "tp_size", "flags"))
    release = str(raw.get("release", RELEASES[-1]))
    if release not in RELEASES:
        refuse(path, "server: cpu: release", " or ".join(RELEASES), release)
    tp_size = raw.get("tp_size", 1)
    if isinstance(tp_size, bool) or not isinstance(tp_size, int):
        refuse(path, "server: cpu: tp_size", "a whole number", tp_size)
    return CpuServer(
        release,
        _word(path, raw, "model", TINY_MODELS[0]),
        tp_size,
        _word(path, raw, "flags", ""),
        _seconds(path, given, 420),
        _between(path, given, "flush", ("keep", "flush", "restart")),
    )


def _word(path: Path, given: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = given.get(key, default)
    if not isinstance(value, str) or (not value.strip() and default is None):
        refuse(path, f"server: {key}", "a text", value)
    return value


def _seconds(path: Path, given: Mapping[str, Any], default: float) -> float:
    value = given.get("ready_seconds", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        refuse(path, "server: ready_seconds", "seconds above 0", value)
    return float(value)


def _between(path: Path, given: Mapping[str, Any], default: Between, known: tuple[Between, ...]) -> Between:
    value = given.get("between_runs", default)
    if value not in known:
        refuse(path, "server: between_runs", " or ".join(known), value)
    return value  # type: ignore[no-any-return]


def fill_in(template: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """A template's words with the values in place; ``{port}`` stays.

    Args:
        template: a launch line or flags.
        values: of every placeholder.
    """
    words: list[str] = []
    for word in shlex.split(template):
        names = [name for name in _PLACEHOLDER.findall(word) if name in values]
        if any(values[name] is None for name in names):
            if word == f"{{{names[0]}}}" and words and words[-1].startswith("-") and "=" not in words[-1]:
                words.pop()
        elif names and word == f"{{{names[0]}}}":
            words += shlex.split(_text(values[names[0]]))
        else:
            words.append(_PLACEHOLDER.sub(lambda m: _text(values[m[1]]) if m[1] in values else m[0], word))
    return tuple(words)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def split_environment(words: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Leading ``NAME=value`` words and the command behind them."""
    environment: dict[str, str] = {}
    rest = list(words)
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        environment[name] = value
    return environment, tuple(rest)
