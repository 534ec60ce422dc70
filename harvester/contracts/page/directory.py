"""One directory in shared memory per slot: who writes which file.

grant                       the agent
guest                       the guest
leaving                     the command that stops the guest: the guest's last record
pulse.<engine>.<process>    each API-server process of each production engine
.<page>.lock                a page's writer, which holds a lock on it for as long as it lives
"""

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import checked_name, is_name
from harvester.contracts.page.kept import KeptPage
from harvester.contracts.page.owners import OWN_USER, PageOwners
from harvester.contracts.page.reader import PageReader
from harvester.contracts.page.records import Grant, Guest, Pulse, PulseHead
from harvester.contracts.page.writer import PageWriter

DIRECTORY_VARIABLE = "ROSEMUX_PAGE_DIR"
"""Environment variable by which an engine learns its slot's directory."""

LAUNCH_DIRECTORY = "launch"
"""Directory of launch locks beside the slots' directories, if these belong to several users."""

_PULSE = re.compile(r"pulse\.[A-Za-z0-9][A-Za-z0-9_-]*\.[0-9]{1,6}")
_ENGINE_NAME_LENGTH = 51


class PageName(StrEnum):
    GRANT = "grant"
    GUEST = "guest"
    LEAVING = "leaving"


@lru_cache(maxsize=1024)
def pulse_page(engine: str, process: int) -> str:
    """File name of a pulse. Raises ConfigError for a dot, the separator, or too long a name."""
    name = f"pulse.{engine}.{process}"
    if not _PULSE.fullmatch(name) or not is_name(name):
        raise ConfigError(
            f"engine name {engine!r}: use up to {_ENGINE_NAME_LENGTH} letters, digits, '_' or '-', "
            "starting with a letter or digit"
        )
    return name


@lru_cache(maxsize=1024)
def engine_of(name: str) -> str:
    """The engine of a pulse's file name; any other name is returned unchanged."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 else name


@dataclass(frozen=True, slots=True)
class PageDirectory:
    path: Path
    owners: PageOwners = OWN_USER

    @staticmethod
    def create(
        path: Path, *, owners: PageOwners = OWN_USER, group: int | None = None
    ) -> "PageDirectory":
        """Make the directory if needed: see `make_directory`."""
        directory = PageDirectory(path, owners)
        make_directory(path, owners=directory.own, group=group)
        return directory

    @property
    def own(self) -> frozenset[int]:
        """Users besides root that may own the directory."""
        return self.owners.agent or frozenset((os.geteuid(),))

    def check(self) -> None:
        """Raises ConfigError unless it is the agent's or root's, and no stranger can change it."""
        check_directory(self.path, owners=self.own)

    def grant_writer(self) -> PageWriter[Grant]:
        return PageWriter(self.path / PageName.GRANT, Grant)

    def grant_page(self) -> KeptPage[Grant]:
        return KeptPage(self.path / PageName.GRANT, Grant)

    def grant_reader(self) -> PageReader[Grant]:
        return PageReader(self.path / PageName.GRANT, Grant, owners=self.owners.agent)

    def guest_writer(self) -> PageWriter[Guest]:
        return PageWriter(self.path / PageName.GUEST, Guest)

    def guest_page(self) -> KeptPage[Guest]:
        return KeptPage(self.path / PageName.GUEST, Guest)

    def guest_reader(self) -> PageReader[Guest]:
        return PageReader(self.path / PageName.GUEST, Guest, owners=self.owners.guest)

    def leaving_writer(self) -> PageWriter[Guest]:
        return PageWriter(self.path / PageName.LEAVING, Guest)

    def leaving_reader(self) -> PageReader[Guest]:
        return PageReader(self.path / PageName.LEAVING, Guest, owners=self.owners.guest)

    def pulse_writer(self, engine: str, process: int) -> PageWriter[Pulse]:
        return PageWriter(self.path / pulse_page(engine, process), Pulse)

    def own_pulse(self, engine: str, process: int) -> KeptPage[Pulse]:
        return KeptPage(self.path / pulse_page(engine, process), Pulse)

    def pulse_reader(self, name: str) -> PageReader[Pulse]:
        """`name` comes from a grant: it is checked before it becomes a path."""
        return PageReader(self._pulse_path(name), Pulse, owners=self.owners.production)

    def pulse_head_reader(self, name: str) -> PageReader[PulseHead]:
        """Like `pulse_reader`, for the fields that a gate decides from."""
        return PageReader(self._pulse_path(name), PulseHead, owners=self.owners.production)

    def pulse_names(self) -> tuple[str, ...]:
        """Names of the present pulse files, sorted; files with other names are ignored."""
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            with os.scandir(self.path) as found:
                names = [entry.name for entry in found if _PULSE.fullmatch(entry.name)]
            return tuple(sorted(filter(is_name, names)))
        return ()

    def pulses(self, *, most: int) -> list[Pulse]:
        """Records of the pulses that are fresh now; of more than `most` pages, the first ones."""
        found = [self.pulse_reader(name).read().record for name in self.pulse_names()[:most]]
        return [record for record in found if record is not None]

    def _pulse_path(self, name: str) -> Path:
        checked_name(name, what="pulse page")
        return self.path / name


def make_directory(path: Path, *, owners: frozenset[int], group: int | None) -> None:
    """Make the directory if needed. Users of `group` may put their own files there, and others
    cannot enter; without a group only the owner may put files, and others may read.

    Raises ConfigError if a stranger could still put, swap or remove files.
    """
    # A stranger who can write to the parent directory can replace this one.
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    _check_way(path)
    if not path.is_symlink():
        path.mkdir(mode=0o755, exist_ok=True)
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        opened = -1  # Not ours; the check below gives a better message.
    except OSError as error:
        raise ConfigError(f"pages {path} is a link or no directory: name the directory") from error
    if opened >= 0:
        try:
            found = os.fstat(opened)
            if found.st_uid == os.geteuid() and group is not None:
                if found.st_gid != group:
                    os.fchown(opened, -1, group)
                os.fchmod(opened, 0o1770)
            elif found.st_uid == os.geteuid():
                os.fchmod(opened, stat.S_IMODE(found.st_mode) & ~0o022)
        except OSError as error:
            raise ConfigError(
                f"cannot give pages {path} to group {group}: {error.strerror}; make it by "
                "tmpfiles, or the agent's user a member of the group"
            ) from error
        finally:
            os.close(opened)
    check_directory(path, owners=owners)


def check_directory(path: Path, *, owners: frozenset[int]) -> None:
    """`owners` may own it, and root. Raises ConfigError, which says what to do."""
    try:
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"cannot use pages {path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"pages {path} is a link or no directory: name the directory itself")
    if found.st_uid not in owners | {0}:
        raise ConfigError(
            f"pages {path} belongs to user {found.st_uid}, which could replace its files: remove "
            f"it, chown it to root or user {' or '.join(map(str, sorted(owners)))}, or name that "
            "user as the agent's (owners.agent)"
        )
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(f"pages {path}: every local user may write there: chmod o-w {path}")
    if found.st_mode & stat.S_IWGRP and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"pages {path}: its group may remove other users' pages: chmod +t {path}, or g-w"
        )


def _check_way(path: Path) -> None:
    """No stranger can put another directory into the place of one above `path`."""
    parent = Path(os.path.realpath(path.parent))
    for above in (parent, *parent.parents):
        try:
            mode = above.stat().st_mode
        except OSError as error:
            raise ConfigError(f"cannot use pages {path}: {above}: {error.strerror}") from error
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"pages {path}: every local user may replace files in {above}: chmod o-w {above}"
            )
