"""docker run, compose and Kubernetes around a launch: the command they hold, the limits they set."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import binary_bytes, docker_bytes, kubernetes_bytes
from hicache_lab.sglang.launch.config import Container

_ENGINES = {"docker", "podman", "nerdctl"}
_LOOKS_YAML = re.compile(r"^\s*(?:- )?(?:command|args|entrypoint|containers|services|kind|apiVersion)\s*:", re.M)
# docker run's options that take the next word as their value
_DOCKER_VALUED = re.compile(
    r"-[acehlmpuvw]|--(?:"
    r"add-host|annotation|blkio-weight|cap-add|cap-drop|cgroup-parent|cgroupns|cidfile|cpu-period|"
    r"cpu-quota|cpu-shares|cpus|cpuset-cpus|cpuset-mems|device|device-cgroup-rule|dns|dns-search|"
    r"domainname|entrypoint|env|env-file|expose|gpus|group-add|health-cmd|health-interval|"
    r"health-retries|health-timeout|hostname|ip|ipc|label|label-file|link|log-driver|log-opt|"
    r"mac-address|memory|memory-reservation|memory-swap|memory-swappiness|mount|name|net|network|"
    r"network-alias|oom-score-adj|pid|pids-limit|platform|publish|pull|restart|runtime|"
    r"security-opt|shm-size|stop-signal|stop-timeout|storage-opt|sysctl|tmpfs|ulimit|user|userns|"
    r"uts|volume|volume-driver|volumes-from|workdir"
    r")"
)
_MAX_NODES = 100_000


def slurm_step(words: Sequence[str]) -> Container | None:
    """The memory share of ``srun --mem=…`` from the words before the launch; None without one.

    ``--mem=0`` is the whole node and sets no limit.
    """
    if not {"srun", "sbatch"} & {word.rpartition("/")[2] for word in words}:
        return None
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option == "--mem":
            value = value if equals else "".join(words[index + 1 : index + 2])
            return Container("slurm", memory_bytes=binary_bytes(value, "srun --mem", "m") or None)
    return None


def batch_script(text: str) -> Container | None:
    """The memory share of a ``#SBATCH --mem=…`` line; None without one."""
    match = re.search(r"^#SBATCH\s+--mem[= ](\S+)", text, re.MULTILINE)
    return Container("slurm", memory_bytes=binary_bytes(match[1], "#SBATCH --mem", "m") or None) if match else None


def systemd_unit(text: str) -> Wrapped | None:
    """The command, environment and limits of a systemd service; None when the text is not one."""
    command = re.search(r"^ExecStart=[-@:+!]*((?:.*\\\n)*.*)", text, re.MULTILINE)
    if command is None:
        return None
    settings = re.findall(r"^(MemoryMax|MemoryHigh)=(\S+)", text, re.MULTILINE)
    limits = [binary_bytes(value, name) for name, value in dict(settings).items() if value != "infinity"]
    container = Container("systemd", memory_bytes=min(limits, default=None))
    words = [word for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE) for word in shlex.split(line)]
    env = {name: value for name, _, value in (word.partition("=") for word in words)}
    return Wrapped(command[1], (), container, env)


def systemd_run(words: Sequence[str]) -> Container | None:
    """The memory limit of ``systemd-run -p MemoryMax=600G … COMMAND``; None without one."""
    names = [word.rpartition("/")[2] for word in words]
    if "systemd-run" not in names:
        return None
    limits = [
        binary_bytes(match[2], match[1])
        for word in words[names.index("systemd-run") :]
        if (match := re.fullmatch(r"(?:-p|--property=)?(MemoryMax|MemoryHigh)=(\S+)", word)) and match[2] != "infinity"
    ]
    runtime = "systemd-scope" if "--scope" in words else "systemd"
    return Container(runtime, memory_bytes=min(limits)) if limits else None


def docker_run(words: Sequence[str]) -> tuple[Container, dict[str, str], int] | None:
    """Read ``docker run … IMAGE`` (or exec) from the words before the launch; None without docker.

    Returns:
        Its facts, its ``-e`` settings, and where its own words end.
    """
    names = [word.rpartition("/")[2] for word in words]
    verbs = (i for i, name in enumerate(names) if name in {"run", "exec"} and _ENGINES & set(names[:i]))
    at = next(verbs, None)
    if at is None:
        return None
    container, env, is_exec = Container("docker"), {}, names[at] == "exec"
    at += 1
    while at < len(words) and words[at].startswith("-"):
        option, equals, value = words[at].partition("=")
        at += 1
        if not equals and _DOCKER_VALUED.fullmatch(option) and at < len(words):
            value = words[at]
            at += 1
        if option in {"-e", "--env"} and "=" in value:
            name, _, text = value.partition("=")
            env[name] = text
        if option in {"--memory", "-m"}:
            container = replace(container, memory_bytes=docker_bytes(value, option))
        elif option == "--shm-size":
            container = replace(container, shm_bytes=docker_bytes(value, option))
    # after the options: the image, or for exec the name of a running container
    image = words[at] if at < len(words) and not is_exec and "compose" not in names[:at] else None
    return replace(container, image=image), env, at + 1


@dataclass(frozen=True)
class Wrapped:
    """A command found in a document: shell text, or an argv."""

    shell: str | None
    argv: tuple[str, ...]
    container: Container
    env: dict[str, str]


def looks_like_document(text: str) -> bool:
    """Whether a paste is YAML (or JSON) that holds a command rather than shell text."""
    return bool(_LOOKS_YAML.search(text)) or text.lstrip().startswith("{")


def read_documents(text: str) -> list[Wrapped]:
    """Every container command in compose or Kubernetes YAML (or JSON).

    Raises:
        UsageError: not YAML; the message gives the line.
    """
    import yaml

    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        template = "; a Helm template must be rendered first (helm template)" if "{{" in text else ""
        raise UsageError(f"{where}not YAML: {problem}{template}") from error
    return [one for document in documents for node, pod in _nodes(document) if (one := _wrapped(node, pod))]


def _nodes(document: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every mapping in a document with the pod specification around it; YAML aliases are visited once."""
    pending: list[tuple[Any, dict[str, Any]]] = [(document, {})]
    seen: set[int] = set()
    while pending:
        node, pod = pending.pop()
        if id(node) in seen or len(seen) > _MAX_NODES:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            if "containers" in node:
                pod = node
            yield node, pod
            pending.extend((value, pod) for value in reversed(node.values()) if isinstance(value, dict | list))
        elif isinstance(node, list):
            pending.extend((value, pod) for value in reversed(node) if isinstance(value, dict | list))


def _strings(value: Any) -> list[str]:
    return [str(item) for item in value if item is not None] if isinstance(value, list) else []


def _wrapped(node: dict[str, Any], pod: dict[str, Any]) -> Wrapped | None:
    parts = [node.get("entrypoint"), node.get("command"), node.get("args")]
    given = [part for part in parts if isinstance(part, str | list) and part]
    if not given:
        return None
    container, env = _facts(node, pod), _environment(node)
    if all(isinstance(part, list) for part in given):
        argv = [word for part in given for word in _strings(part)]
        return Wrapped(None, tuple(argv), container, env)
    texts = [part if isinstance(part, str) else shlex.join(_strings(part)) for part in given]
    return Wrapped(" ".join(text.strip() for text in texts), (), container, env)


def _environment(node: dict[str, Any]) -> dict[str, str]:
    raw = node.get("env", node.get("environment"))
    if isinstance(raw, Mapping):
        return {str(name): "" if value is None else str(value) for name, value in raw.items()}
    variables = {}
    for item in raw if isinstance(raw, list) else []:
        if isinstance(item, Mapping) and "name" in item and item.get("value") is not None:
            variables[str(item["name"])] = str(item["value"])
        elif isinstance(item, str) and "=" in item:
            name, _, variables[name] = item.partition("=")
    return variables


def _dig(node: Any, *path: str) -> Any:
    for step in path:
        node = node.get(step) if isinstance(node, Mapping) else None
    return node


def _facts(node: dict[str, Any], pod: dict[str, Any]) -> Container:
    image = node.get("image") if isinstance(node.get("image"), str) else None
    if "containers" in pod:
        limit, shm = _dig(node, "resources", "limits", "memory"), _shared_memory(node, pod)
        return Container(
            "kubernetes",
            image=image,
            memory_bytes=None if limit is None else kubernetes_bytes(str(limit), "resources.limits.memory"),
            shm_bytes=None if shm is None else kubernetes_bytes(str(shm), "emptyDir.sizeLimit"),
        )
    limit = node.get("mem_limit", _dig(node, "deploy", "resources", "limits", "memory"))
    shm = node.get("shm_size")
    return Container(
        "compose",
        image=image,
        memory_bytes=None if limit is None else docker_bytes(str(limit), "mem_limit"),
        shm_bytes=None if shm is None else docker_bytes(str(shm), "shm_size"),
    )


def _shared_memory(node: dict[str, Any], pod: dict[str, Any]) -> Any:
    """The size of an emptyDir in memory that is mounted at /dev/shm; None without one."""
    mounts, volumes = node.get("volumeMounts"), pod.get("volumes")
    names = {
        mount.get("name")
        for mount in (mounts if isinstance(mounts, list) else [])
        if isinstance(mount, Mapping) and str(mount.get("mountPath")).rstrip("/") == "/dev/shm"
    }
    sizes = (_dig(one, "emptyDir", "sizeLimit") for one in volumes or () if _dig(one, "name") in names)
    return next((size for size in sizes if size is not None), None) if isinstance(volumes, list) else None


def dockerfile_argv(text: str) -> list[str] | None:
    """The argv of ``ENTRYPOINT [...]`` and ``CMD [...]`` in a Dockerfile, or None."""
    argv: list[str] = []
    for kind in ("ENTRYPOINT", "CMD"):
        match = re.search(rf"^\s*{kind}\s+(\[.*?\])\s*$", text, re.MULTILINE | re.DOTALL)
        if match:
            try:
                listed = json.loads(match[1])
            except ValueError as error:
                raise UsageError(f"{kind}: not a JSON list of words: {error}") from error
            argv += _strings(listed)
    return argv or None
