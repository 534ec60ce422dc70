"""Checks that no untrusted user can put, swap or remove a file in a directory.

Links are not followed: the owner of a link decides its target.
"""

import os
import stat
from pathlib import Path

from harvester.contracts.errors import ConfigError


def make_directory(path: Path, *, owners: frozenset[int], group: int | None) -> None:
    """Make it if needed. Users of `group` may put files there, their own files only, and others do
    not get in; without a group the owner alone may, and others may read.

    Raises ConfigError where a stranger could put, swap or remove files all the same.
    """
    # A way for strangers into the directory above is one into this.
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_way(path)
    if not path.is_symlink():
        path.mkdir(mode=0o755, exist_ok=True)
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        opened = -1  # Not ours, as the check below says better.
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
            f"pages {path} belongs to user {found.st_uid}, who could swap what is in it: remove "
            f"it, chown it to root or user {' or '.join(map(str, sorted(owners)))}, or name that "
            "user as the agent's (owners.agent)"
        )
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(f"pages {path}: every local user may write there: chmod o-w {path}")
    if found.st_mode & stat.S_IWGRP and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"pages {path}: its group may remove other users' pages: chmod +t {path}, or g-w"
        )


def check_way(path: Path) -> None:
    """No stranger can put another directory into the place of one above `path`."""
    parent = Path(os.path.realpath(path.parent))
    for above in (parent, *parent.parents):
        try:
            mode = above.stat().st_mode
        except OSError as error:
            raise ConfigError(f"cannot use pages {path}: {above}: {error.strerror}") from error
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"pages {path}: every local user may swap what is in {above}: chmod o-w {above}"
            )
