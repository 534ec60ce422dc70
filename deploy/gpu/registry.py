"""Wheels for the target machine, fetched with pip and kept in a folder."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import InvalidVersion, Version

from deploy.gpu.wheel import CarryError, Wheel, read_wheel

_GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
)
TARGET = (
    *("--python-version", "3.12", "--implementation", "cp"),
    *("--only-binary", ":all:"),
    *(argument for platform in PLATFORMS for argument in ("--platform", platform)),
)
"""pip's way to say: wheels for another interpreter than its own."""

STAND_IN = Path(__file__).resolve().parents[1] / "kvcached/stand_in"
"""pip asks a source for its metadata; kvcached's answers only where a torch can be imported."""

_LOCKED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s\\;]+)", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Lock:
    """A requirements lock: the versions that this project's tests ran with, and their files."""

    versions: Mapping[NormalizedName, Version]
    hashes: frozenset[str]

    def verify(self, path: Path) -> None:
        """Raises CarryError if the file's SHA-256 is not in the lock."""
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() not in self.hashes:
                raise CarryError(f"{path} is not the file that the lock names")


def read_lock(text: str) -> Lock:
    try:
        versions = {canonicalize_name(n): Version(v) for n, v in _LOCKED.findall(text)}
    except InvalidVersion as error:
        raise CarryError(f"the lock cannot be read: {error}") from error
    return Lock(versions, frozenset(_HASH.findall(text)))


class Registry:
    """Fetches into `folder` and takes from it what is already there and fits."""

    def __init__(self, folder: Path, lock: Lock) -> None:
        self._folder = folder
        self._lock = lock
        folder.mkdir(parents=True, exist_ok=True)

    def fetch(self, name: NormalizedName, specifier: SpecifierSet) -> Wheel:
        """Return the lock's own file where its version fits, else the newest of the registry."""
        locked = self._lock.versions.get(name)
        if locked is not None and specifier.contains(locked, prereleases=True):
            wheel = self._fetched(name, SpecifierSet(f"=={locked}"))
            self._lock.verify(wheel.path)
            return wheel
        return self._fetched(name, specifier)

    def _fetched(self, name: NormalizedName, specifier: SpecifierSet) -> Wheel:
        if kept := self._kept(name, specifier):
            return kept
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        command += ["--quiet", "--no-deps", *TARGET, "--dest", str(self._folder)]
        done = subprocess.run(
            [*command, f"{name}{specifier}"], check=False, capture_output=True, text=True
        )
        wheel = self._kept(name, specifier)
        if wheel is None:
            raise CarryError(f"no wheel of {name}{specifier}: {done.stderr.strip()[-500:]}")
        return wheel

    def source(self, requirement: str) -> Path:
        """Return the source archive `name==version` of the lock, and build nothing of it."""
        name, _, version = requirement.partition("==")
        path = self._folder / f"{name}-{version}.tar.gz"
        if not path.exists():
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
            command += ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
            done = subprocess.run(
                [*command, "--dest", str(self._folder), requirement],
                check=False,
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": str(STAND_IN)},
            )
            if not path.exists():
                raise CarryError(f"no source of {requirement}: {done.stderr.strip()[-500:]}")
        self._lock.verify(path)
        return path

    def _kept(self, name: NormalizedName, specifier: SpecifierSet) -> Wheel | None:
        wheels = [
            wheel
            for path in self._folder.glob("*.whl")
            if canonicalize_name(path.name.partition("-")[0]) == name
            and specifier.contains((wheel := read_wheel(path)).version, prereleases=True)
        ]
        return max(wheels, key=lambda wheel: wheel.version, default=None)
