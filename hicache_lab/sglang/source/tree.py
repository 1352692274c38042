"""An SGLang source tree as text: a folder, a wheel, or what is installed. Nothing in it is imported or executed."""

from __future__ import annotations

import ast
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import util
from pathlib import Path

from hicache_lab.base.errors import HostError, InputError, UsageError
from hicache_lab.base.units import MIB

MAX_FILE_BYTES = 16 * MIB
MAX_TREE_BYTES = 512 * MIB
_NOT_SOURCE = {"test", "tests", "node_modules", "build", ".git", ".venv", "__pycache__"}


@dataclass(frozen=True)
class Line:
    """One line of the tree: where it stands and what it says."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass
class Module:
    """One parsed file."""

    path: str
    text: str
    body: ast.Module
    tree: Tree = field(repr=False)

    @cached_property
    def lines(self) -> list[str]:
        """The text, line by line."""
        return self.text.splitlines()

    def line(self, node: ast.AST) -> Line:
        """Where a node begins, and its text on one line (of a compound statement or a definition its first)."""
        number = getattr(node, "lineno", 1)
        last = number if hasattr(node, "body") else getattr(node, "end_lineno", None) or number
        return Line(self.path, number, " ".join(text.strip() for text in self.lines[number - 1 : last])[:400])

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Every class, nested ones included."""
        found, blocks = [], list(self.body.body)
        while blocks:
            block = blocks.pop(0)
            if isinstance(block, ast.ClassDef):
                found.append(block)
            # statements only: walking every expression of every file takes most of the time
            for name in ("body", "orelse", "handlers", "finalbody"):
                blocks += getattr(block, name, [])
        return found

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """Functions of the module itself."""
        return {node.name: node for node in self.body.body if isinstance(node, ast.FunctionDef)}

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """Names of the module that are assigned once."""
        found: dict[str, list[ast.expr]] = {}
        for node in self.body.body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, []).append(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                found.setdefault(node.target.id, []).append(node.value)
        return {name: values[0] for name, values in found.items() if len(values) == 1}

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Imported name → (module, name there); relative modules are made absolute from this file's place."""
        found: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.body):
            if isinstance(node, ast.ImportFrom):
                package = self.path.split("/")[: -node.level] if node.level else []
                dotted = ".".join([*package, *([node.module] if node.module else [])])
                found |= {alias.asname or alias.name: (dotted, alias.name) for alias in node.names}
        return found


@dataclass
class Tree:
    """A source tree.

    Attributes:
        label: what was given.
        kind: folder, wheel or installed.
        paths: its Python files, relative, with forward slashes.
        load: text of one path.
        version: what the tree calls itself; None when it does not say.
    """

    label: str
    kind: str
    paths: list[str]
    load: Callable[[str], str]
    version: str | None = None
    _texts: dict[str, str] = field(default_factory=dict, repr=False)
    _modules: dict[str, Module | None] = field(default_factory=dict, repr=False)
    unreadable: list[str] = field(default_factory=list)

    def containing(self, *markers: str) -> Iterator[Module]:
        """Parsed modules whose text holds one of the markers; what cannot be parsed is noted."""
        for path in self.paths:
            if any(marker in self._text(path) for marker in markers):
                module = self.module(path)
                if module is not None:
                    yield module

    def _text(self, path: str) -> str:
        if path not in self._texts:
            try:
                self._texts[path] = self.load(path)
            except (OSError, UnicodeDecodeError) as error:
                self._note(path, error)
                self._texts[path] = ""
        return self._texts[path]

    def module(self, path: str) -> Module | None:
        """One parsed file; None when it is not Python that this interpreter understands."""
        if path not in self._modules:
            text = self._text(path)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the tree's own invalid escapes are not ours to report
                    self._modules[path] = Module(path, text, ast.parse(text), self)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                self._note(path, error)
                self._modules[path] = None
        return self._modules[path]

    def _note(self, path: str, error: BaseException) -> None:
        note = f"{path}: {error}"
        if note not in self.unreadable:
            self.unreadable.append(note)

    def find(self, dotted: str) -> Module | None:
        """The module that ``from dotted import …`` names, wherever the tree's root lies."""
        words = dotted.split(".")
        for drop in range(len(words)):
            tail = "/".join(words[drop:])
            for name in (f"{tail}.py", f"{tail}/__init__.py"):
                for path in self.paths:
                    if path == name or (drop == 0 and path.endswith(f"/{name}")):
                        return self.module(path)
        return None


def open_tree(path: str | Path) -> Tree:
    """A tree from a folder (checkout, site-packages, the package itself) or a wheel.

    Raises:
        InputError: the path is missing, is neither a folder nor a wheel, or holds no Python.
    """
    path = Path(path)
    if path.is_dir():
        tree = _folder(path, str(path), "folder")
    elif not path.exists():
        raise InputError(f"{path}: no such file or folder; expected an SGLang source tree or wheel")
    elif zipfile.is_zipfile(path):
        tree = _wheel(path)
    else:
        raise InputError(f"{path}: expected a folder or a wheel (.whl), got neither")
    if not tree.paths:
        raise InputError(f"{path}: holds no Python file; expected an SGLang source tree or wheel")
    return tree


def installed_tree() -> Tree:
    """The installed ``sglang``, found without importing it.

    Raises:
        HostError: it is not installed in this environment.
    """
    spec = util.find_spec("sglang")
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise HostError(
            "--installed: sglang is not installed in this Python environment; give a path or a wheel instead"
        )
    return _folder(Path(places[0]), places[0], "installed")


def _folder(root: Path, label: str, kind: str) -> Tree:
    paths = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if not _NOT_SOURCE.intersection(relative.parts[:-1]) and not file.is_symlink() and file.is_file():
            paths.append(relative.as_posix())

    def load(path: str) -> str:
        file = root / path
        if file.stat().st_size > MAX_FILE_BYTES:
            raise OSError(f"larger than {MAX_FILE_BYTES} bytes")
        return file.read_text(encoding="utf-8")

    tree = Tree(label, kind, paths, load)
    beside = [*root.glob("sglang-*.dist-info/METADATA"), *root.parent.glob("sglang-*.dist-info/METADATA")]
    metadata = beside[0].read_text(errors="replace") if len(beside) == 1 else ""
    tree.version = _stated_version(tree) or _metadata_version(metadata)
    return tree


def _wheel(path: Path) -> Tree:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = [info for info in archive.infolist() if _wanted(info.filename)]
            if sum(info.file_size for info in infos) > MAX_TREE_BYTES:
                raise InputError(
                    f"{path}: unpacks to more than {MAX_TREE_BYTES // MIB} MiB of Python; not a wheel of SGLang"
                )
            contents = {info.filename: archive.read(info) for info in infos if info.file_size <= MAX_FILE_BYTES}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
        raise InputError(f"{path}: cannot be unpacked: {error}") from None
    stated = [content.decode(errors="replace") for name, content in contents.items() if name.endswith("METADATA")]

    def load(name: str) -> str:
        if name not in contents:
            raise OSError(f"larger than {MAX_FILE_BYTES} bytes")
        return contents[name].decode()

    tree = Tree(str(path), "wheel", [info.filename for info in infos if info.filename.endswith(".py")], load)
    tree.version = (_metadata_version(stated[0]) if stated else None) or _stated_version(tree)
    return tree


def _wanted(name: str) -> bool:
    """Whether a wheel's member is read: Python below no test folder, or the wheel's metadata."""
    if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
        return True
    return name.endswith(".py") and not _NOT_SOURCE.intersection(name.split("/")[:-1])


def _metadata_version(text: str) -> str | None:
    found = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    return found[1] if found else None


def _stated_version(tree: Tree) -> str | None:
    for name in ("_version.py", "version.py"):
        for path in tree.paths:
            if path not in (name, f"sglang/{name}") and not path.endswith(f"/sglang/{name}"):
                continue
            module = tree.module(path)
            for node in ast.walk(module.body) if module else []:
                if (
                    isinstance(node, ast.Assign)
                    and isinstance(node.value, ast.Constant)
                    and isinstance(node.value.value, str)
                    and any(isinstance(t, ast.Name) and t.id in ("__version__", "version") for t in node.targets)
                ):
                    return node.value.value
    return None


def tree_from(path: str | None, installed: bool) -> Tree:
    """The tree that a command line names.

    Raises:
        UsageError: both or neither were given.
    """
    if (path is not None) == installed:
        raise UsageError("read-source: give one of PATH (a folder or a wheel) and --installed")
    return installed_tree() if path is None else open_tree(Path(path))
