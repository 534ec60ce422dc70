"""Where stores lie: what a user may not look at is named, with what to do."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError
from weightsync.reading.store import Store
from weightsync.transport.base_checkpoint import BaseCheckpoint
from weightsync.transport.location import StoreRoot

NOBODY = 65534


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    """A root of stores in a directory that this user may not enter."""
    root = tmp_path / "home" / "weights"
    (root / "job-a").mkdir(parents=True)
    user = os.geteuid()
    root.parent.chmod(0)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield root
    finally:
        os.seteuid(user)
        root.parent.chmod(0o700)


@pytest.mark.parametrize("opened", [StoreRoot, Store, BaseCheckpoint])
def test_a_place_that_this_user_may_not_enter_is_named(
    forbidden: Path, opened: Callable[[Path], object]
) -> None:
    with pytest.raises(ConfigError, match="Permission denied; give this user the right"):
        opened(forbidden / "job-a")


def test_stores_that_this_user_may_not_list_are_named(tmp_path: Path) -> None:
    root = StoreRoot(tmp_path)
    user = os.geteuid()
    tmp_path.chmod(0)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        with pytest.raises(ConfigError, match="Permission denied; give this user the right"):
            root.names()
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
