"""Identifiers, and the one rule for names that come from outside.

Names from outside never become paths: `checked_name` admits only what is a harmless file name.
"""

import re
from collections.abc import Collection
from difflib import get_close_matches
from typing import NewType

from harvester.contracts.errors import PeerProtocolError, RoseMuxError

JobId = NewType("JobId", str)
TenantId = NewType("TenantId", str)
NodeId = NewType("NodeId", str)
SlotId = NewType("SlotId", str)
"""All accelerators of one production engine replica."""
EngineId = NewType("EngineId", str)
"""A rollout engine, dedicated or guest."""
LeaseId = NewType("LeaseId", str)
GroupId = NewType("GroupId", str)
"""A co-execution group."""
TrajectoryId = NewType("TrajectoryId", str)
Epoch = NewType("Epoch", int)
"""Fencing number of a lease; higher wins, 0 is no lease."""
WeightVersion = NewType("WeightVersion", int)
"""Published policy version of one job, to 2^63 - 1; 0 is no version."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
NAME_RULE = "use 1 to 64 letters, digits, '_', '.' or '-', starting with a letter or digit"
_NAME = re.compile(NAME_PATTERN)


def is_name(name: str) -> bool:
    """Whether `checked_name` admits it."""
    return _NAME.fullmatch(name) is not None


def checked_name(name: str, *, what: str, error: type[RoseMuxError] = PeerProtocolError) -> str:
    """`name`, if it is 1 to 64 letters, digits, `_`, `.` or `-` and starts with a letter or digit.

    Raises `error` otherwise, naming `what` it was meant to be: ConfigError for a caller's argument.
    """
    if not isinstance(name, str) or not is_name(name):
        shown = name if len(repr(name)) <= 82 else repr(name)[:77] + "..."
        raise error(f"{what} {shown!r}: {NAME_RULE}")
    return name


def unknown_field(name: str, offered: Collection[str]) -> str:
    """The words for a field that nothing reads, with the nearest name that is read."""
    near = get_close_matches(name[:200], offered, n=1)
    return f"no such field; {f'did you mean {near[0]!r}?' if near else 'leave it out'}"
