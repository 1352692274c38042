"""What ``kubectl`` (yaml, json, describe) and ``docker inspect`` say of killed containers and their memory limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import yaml

from hicache_lab.base.errors import UsageError
from hicache_lab.base.times import in_utc, parse_time
from hicache_lab.base.units import kubernetes_bytes

MOST_CHARACTERS = 4 << 20
_MAX_DEPTH = 64
_KINDS = ("container", "initContainer", "ephemeralContainer")
_DESCRIBED = ("Containers", "Init Containers", "Ephemeral Containers")
_CONTAINERS = {*(f"{kind}s" for kind in _KINDS), *(f"{kind}Statuses" for kind in _KINDS), *_DESCRIBED}
_LIMITS: tuple[tuple[str, ...], ...] = (("resources", "limits", "memory"), ("Limits", "memory"))
_ENDS: tuple[tuple[str, ...], ...] = (("state", "terminated"), ("lastState", "terminated"), ("State",), ("Last State",))
# what begins in the first column of a description; a message of the container's may begin there too
_SECTIONS = (*_DESCRIBED, "Name", "Conditions", "Volumes", "Events")
_DESCRIBED_LINE = re.compile(r"^( *)([A-Za-z][\w./-]*(?: [A-Za-z]+)?):(?:\s+(.*))?$")

# a container: the number of its pod (Docker: its own) in the document, and its name
Key = tuple[int, str]


@dataclass
class Node:
    """A value of a document: its text, or its entries (those of a list have no key). ``line`` counts from 0."""

    line: int
    key: str = ""
    text: str = ""
    is_mapping: bool = False
    entries: list[Node] = field(default_factory=list)

    def get(self, *keys: str) -> Node | None:
        """The first value below the keys."""
        node: Node | None = self
        for key in keys:
            node = next((one for one in node.entries if one.key == key), None) if node is not None else None
        return node


@dataclass
class Document:
    """What one document says.

    Attributes:
        kills: the field that says so, when it was, whose it was (None: not said).
        limits: whose memory limit, bytes and line.
        containers: all that are described.
    """

    kills: list[tuple[Node, datetime | None, Key | None]] = field(default_factory=list)
    limits: list[tuple[Key, int, int]] = field(default_factory=list)
    containers: set[Key] = field(default_factory=set)


def compose(text: str) -> Node:
    """A yaml or json document as nodes that know their lines.

    Not PyYAML's own ``compose``: it calls itself for each level, and a file may be as deep as somebody likes.

    Raises:
        yaml.YAMLError: not a document, a large one, deeper than any pod, or one with aliases.
    """
    if len(text) > MOST_CHARACTERS:
        raise yaml.YAMLError("too large")
    above, keys = [Node(0)], [""]
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionEndEvent):
            above.pop()
            keys.pop()
        elif isinstance(event, yaml.AliasEvent) or len(above) > _MAX_DEPTH:
            raise yaml.YAMLError("aliases, or too deep")
        elif isinstance(event, yaml.ScalarEvent) and above[-1].is_mapping and not keys[-1]:
            keys[-1] = event.value or " "
        elif isinstance(event, yaml.NodeEvent):
            line = event.start_mark.line if event.start_mark is not None else 0
            node = Node(line, keys[-1], is_mapping=isinstance(event, yaml.MappingStartEvent))
            above[-1].entries.append(node)
            keys[-1] = ""
            if isinstance(event, yaml.ScalarEvent):
                node.text = event.value
            else:
                above.append(node)
                keys.append("")
    return above[0]


def outline(lines: Sequence[str]) -> Node:
    """A description (``kubectl describe pod``) as nodes, by its indentation."""
    root = Node(0, is_mapping=True)
    above = [(-1, root)]
    for number, line in enumerate(lines):
        match = _DESCRIBED_LINE.match(line)
        if match is None or (not match[1] and match[2] not in _SECTIONS):
            continue
        while above[-1][0] >= len(match[1]):
            above.pop()
        node = Node(number, match[2], (match[3] or "").strip())
        above[-1][1].entries.append(node)
        above.append((len(match[1]), node))
    return root


def read_document(root: Node) -> Document:
    """The kills and limits in a document's nodes."""
    document = Document()
    for node, pod in _with_pods(root):
        if node.key in _CONTAINERS:
            for item in node.entries:
                name = item.get("name")
                _container(document, item, (pod, name.text if name is not None else item.key))
        elif (killed := node.get("State", "OOMKilled")) is not None:
            document.containers.add((pod, ""))
            memory, running = node.get("HostConfig", "Memory"), node.get("State", "Running")
            if memory is not None and memory.text.isdigit() and 0 < len(memory.text.lstrip("0")) < 19:
                document.limits.append(((pod, ""), int(memory.text), memory.line))
            if killed.text == "true":
                # a container that still runs had finished before
                finished = node.get("State", "FinishedAt") if running is None or running.text != "true" else None
                document.kills.append((killed, _time(finished), (pod, "")))
        elif node.key in ("", "terminated", "State", "Last State"):
            _end(document, node, None)
    return document


def _with_pods(root: Node) -> Iterator[tuple[Node, int]]:
    """Every node with the number of its pod; where nothing says what a pod is, the document is one."""
    waiting, pods = [(root, 0)], 0
    while waiting:
        node, pod = waiting.pop()
        if pod == 0 and (node.get("spec") or node.get("status") or node.get("State", "OOMKilled")):
            pods += 1
            pod = pods
        yield node, pod
        waiting += [(one, pod) for one in reversed(node.entries)]


def _container(document: Document, item: Node, key: Key) -> None:
    document.containers.add(key)
    for path in _LIMITS:
        if (memory := item.get(*path)) is not None:
            try:
                document.limits.append((key, kubernetes_bytes(memory.text, "memory"), memory.line))
            except UsageError:
                continue
    for path in _ENDS:
        if (end := item.get(*path)) is not None:
            _end(document, end, key)


def _end(document: Document, end: Node, key: Key | None) -> None:
    reason = end.get("reason") or end.get("Reason")
    if reason is None or reason.text != "OOMKilled" or any(one is reason for one, *_ in document.kills):
        return
    document.kills.append((reason, _time(end.get("finishedAt") or end.get("Finished")), key))


def _time(node: Node | None) -> datetime | None:
    """RFC 1123 (describe) or RFC 3339 (yaml, json, docker) → UTC without a zone; the year 1 stands for never."""
    at = parse_time(node.text) if node is not None else None
    return in_utc(at) if at is not None and at.year > 1 else None
