"""The outline of a description (kubectl describe, yaml, json, docker inspect), told line by line as far as it goes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_KEY = re.compile(r"^(\s*(?:- +)*)\"?([A-Za-z][\w./-]*(?: [A-Za-z]+)?)\"?:(?:\s+(.*))?$")
_ITEM = re.compile(r"^( *)(?:- |\{\s*$)")
# what begins in the first column of such a document; a message of the container's may begin there too
_TOP = (
    "Name|Namespace|Containers|Init Containers|Ephemeral Containers|Conditions|Volumes|Events|"
    "apiVersion|items|kind|metadata|spec|status"
)
OUTLINED = re.compile(rf'[\s{{"-]|\[\s*(?:$|[{{"])|(?:{_TOP}):')
_DESCRIBED = ("Containers", "Init Containers", "Ephemeral Containers")
_LISTED = frozenset(
    kind + suffix for kind in ("container", "initContainer", "ephemeralContainer") for suffix in ("s", "Statuses")
)


@dataclass
class Container:
    """One container of a pod or of Docker; in yaml and json its name may follow what is said about it."""

    pod: int
    name: str | None = None
    indent: int | None = None

    @property
    def key(self) -> tuple[int, str | None]:
        """What tells it from the others of the document."""
        return self.pod, self.name


@dataclass(eq=False)
class Level:
    """A key whose entries stand deeper than itself.

    Attributes:
        indent: blanks before the key.
        container: the container that the entries belong to, where the key begins one.
        running: an entry says that the container runs.
    """

    indent: int
    key: str
    container: Container | None = None
    running: bool = False


@dataclass
class Outline:
    """Where in a described, yaml or json document a line stands, told by its indentation.

    Attributes:
        levels: the keys above the last line, outermost first, and its own.
        containers: every container met so far.
    """

    levels: list[Level] = field(default_factory=list)
    containers: list[Container] = field(default_factory=list)
    _is_key: bool = False
    _pods: int = 0
    _spec: int | None = None

    def feed(self, line: str) -> None:
        """The next line; what is no part of such a document changes nothing."""
        self._is_key = False
        if OUTLINED.match(line) is None:
            return
        if (item := _ITEM.match(line)) is not None:
            self._begin_item(len(item[1]))
        if (match := _KEY.match(line)) is not None:
            self._is_key = True
            self._begin_key(len(match[1].expandtabs()), match[2], (match[3] or "").strip())

    @property
    def container(self) -> Container | None:
        """The container that the last line belongs to."""
        return next((level.container for level in reversed(self.levels) if level.container is not None), None)

    def parent(self) -> Level | None:
        """The key that the last line is an entry of."""
        return self.levels[-2] if self._is_key and len(self.levels) > 1 else None

    def _begin_item(self, indent: int) -> None:
        while self.levels and self.levels[-1].indent > indent:
            self.levels.pop()
        if self.levels and self.levels[-1].key in _LISTED:
            self.levels[-1].container = self._new(None)

    def _begin_key(self, indent: int, key: str, value: str) -> None:
        while self.levels and self.levels[-1].indent >= indent:
            self.levels.pop()
        above = self.levels[-1] if self.levels else None
        level = Level(indent, key)
        if (indent == 0 and key == "Name") or (key == "spec" and (self._spec is None or indent <= self._spec)):
            self._pods += 1
            self._spec = indent if key == "spec" else None
        elif above is None and key == "Id":
            # docker and podman begin each container with it
            self._pods += 1
        elif above is not None and above.key in _DESCRIBED and not value:
            level.container = self._new(key)
        elif above is None and key in ("State", "HostConfig") and value == "{":
            level.container = self._new("")
        elif above is not None and above.container is not None and above.key in _LISTED:
            above.container.indent = indent if above.container.indent is None else above.container.indent
            if key == "name" and indent == above.container.indent:
                above.container.name = value.strip('",')
        elif above is not None and key == "Running":
            above.running = value.startswith("true")
        self.levels.append(level)

    def _new(self, name: str | None) -> Container:
        self.containers.append(Container(self._pods, name))
        return self.containers[-1]
