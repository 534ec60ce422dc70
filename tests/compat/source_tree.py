"""Reads vLLM's sources, from a wheel or an installed package, without importing them.

A class, function or attribute is looked up in the syntax tree of the module that must define it;
nothing is executed, so that a version whose torch is not installed can be read as well.
"""

import ast
import re
import zipfile
from collections.abc import Iterator
from functools import cached_property
from importlib import metadata
from pathlib import Path

from coserve.vllm.capabilities import DISTRIBUTIONS
from harvester.contracts.errors import ConfigError, Corrupt

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign

_WHEEL_NAME = re.compile(r"^vllm(?:_cpu)?-(?P<version>\d+\.\d+\.\d+)(?:\+\w+)?-.*\.whl$")


class SourceTree:
    """The Python modules of one vLLM version."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """Parse a module; None where the version does not have it."""
        if name not in self._modules:
            stem = name.replace(".", "/")
            text = self._text(f"{stem}.py") or self._text(f"{stem}/__init__.py")
            self._modules[name] = None if text is None else ast.parse(text)
        return self._modules[name]

    def find(self, module: str, name: str) -> Definition | None:
        """Find `Class`, `Class.member`, `function` or `CONSTANT`; members of bases count."""
        tree = self.module(module)
        if tree is None:
            return None
        owner, _, member = name.partition(".")
        found = _named(tree.body, owner)
        if found is None:
            origin = _import_of(tree, owner)
            return self.find(origin, name) if origin else None
        if not member:
            return found
        if not isinstance(found, ast.ClassDef):
            return None
        return (
            _named(found.body, member)
            or _set_on_self(found, member)
            or self._inherited(module, tree, found, member)
        )

    def _inherited(
        self, module: str, tree: ast.Module, owner: ast.ClassDef, member: str
    ) -> Definition | None:
        for base in owner.bases:
            name = ast.unparse(base).partition("[")[0]
            origin = module if _named(tree.body, name) else _import_of(tree, name)
            found = self.find(origin, f"{name}.{member}") if origin else None
            if found is not None:
                return found
        return None

    def _text(self, path: str) -> bytes | None:
        raise NotImplementedError


class WheelTree(SourceTree):
    """The sources inside a wheel file."""

    def __init__(self, wheel: Path) -> None:
        super().__init__(wheel_version(wheel) or "")
        self.wheel = wheel
        try:
            self._archive = zipfile.ZipFile(wheel)
        except zipfile.BadZipFile as error:
            raise Corrupt(f"{wheel} is not a whole wheel; remove it and fetch it again.") from error

    @cached_property
    def torch_version(self) -> str | None:
        """The torch that the wheel's metadata pins on Linux, without a build suffix."""
        entry = next(
            name for name in self._archive.namelist() if name.endswith(".dist-info/METADATA")
        )
        pin = re.search(
            rb"^Requires-Dist: torch==([\d.]+)", self._archive.read(entry), re.MULTILINE
        )
        return pin[1].decode() if pin else None

    def _text(self, path: str) -> bytes | None:
        try:
            return self._archive.read(path)
        except KeyError:
            return None


class InstalledTree(SourceTree):
    """The sources of the installed package, found through its metadata alone."""

    def __init__(self, distribution: metadata.Distribution) -> None:
        super().__init__(distribution.version.partition("+")[0])
        self._root = Path(str(distribution.locate_file("")))

    def _text(self, path: str) -> bytes | None:
        file = self._root / path
        return file.read_bytes() if file.is_file() else None


def installed_tree() -> InstalledTree:
    """Return the installed vLLM's sources. Raises ConfigError if there are none."""
    for name in DISTRIBUTIONS:
        try:
            return InstalledTree(metadata.distribution(name))
        except metadata.PackageNotFoundError:
            continue
    raise ConfigError("No vLLM is installed in this environment.")


def wheel_version(wheel: Path) -> str | None:
    """Return the vLLM version that a file's name claims; None for any other file."""
    match = _WHEEL_NAME.match(wheel.name)
    return match["version"] if match else None


def _import_of(tree: ast.Module, name: str) -> str | None:
    for node in _statements(tree.body):
        if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
            return node.module
    return None


def _named(body: list[ast.stmt], name: str) -> Definition | None:
    for node in _statements(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                return node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and any(
            isinstance(target, ast.Name) and target.id == name for target in _targets(node)
        ):
            return node
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Walk statements at this level, those under `if` and `try` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _set_on_self(owner: ast.ClassDef, name: str) -> Definition | None:
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(
            isinstance(target, ast.Attribute)
            and target.attr == name
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
            for target in _targets(node)
        ):
            return node
    return None


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part for target in targets for part in getattr(target, "elts", [target])]
