"""Users whose pages are believed: each kind of page has its own.

A user who may write one kind is a stranger to the others: the guest, which runs research's code,
cannot write production's pulses. Root is always believed.
"""

import os
import pwd
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from harvester.contracts.errors import ConfigError, NotYet

OWNERS_VARIABLE = "ROSEMUX_PAGE_OWNERS"
"""How engines learn them: `agent:UID,production:UID,guest:UID`, by name or number; a kind may come
several times. A kind that is not named is this process's own user's."""

_MOST_CHARACTERS = 4096
_UIDS = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOwners:
    """Users of each kind; an empty set is this process's own user."""

    agent: frozenset[int] = frozenset()
    production: frozenset[int] = frozenset()
    guest: frozenset[int] = frozenset()

    def variable(self) -> dict[str, str]:
        """The owners as an engine's environment variable; empty without named users."""
        pairs = [f"{kind}:{uid}" for kind in _KINDS for uid in sorted(getattr(self, kind))]
        return {OWNERS_VARIABLE: ",".join(pairs)} if pairs else {}


OWN_USER = PageOwners()
"""No user is named."""

_KINDS = ("agent", "production", "guest")


def environment_owners(environment: Mapping[str, str] | None = None) -> PageOwners:
    """The owners that the environment names. Raises ConfigError."""
    pairs = (os.environ if environment is None else environment).get(OWNERS_VARIABLE, "")
    if len(pairs) > _MOST_CHARACTERS:
        raise ConfigError(f"{OWNERS_VARIABLE} is longer than {_MOST_CHARACTERS} characters")
    named: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for pair in filter(None, pairs.split(",")):
        kind, _, user = pair.strip().partition(":")
        if kind not in named or not user:
            raise ConfigError(
                f"{OWNERS_VARIABLE}: {pair!r}: write agent:USER,production:USER,guest:USER"
            )
        named[kind].append(user)
    return PageOwners(**{kind: uids(users, what=kind) for kind, users in named.items()})


def believed(users: frozenset[int]) -> frozenset[int]:
    """The users and root; this process's own user where none is named."""
    return (users or frozenset((os.geteuid(),))) | {0}


def uids(users: Iterable[str | int], *, what: str) -> frozenset[int]:
    """Numbers of users that are given by name or number. Raises ConfigError."""
    return frozenset(_uid(user, what) for user in users)


@cache
def user_name(uid: int) -> str:
    """Name of a user; the number if it has no name here, as in a container."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _uid(user: str | int, what: str) -> int:
    if isinstance(user, str) and not user.isdecimal():
        try:
            return pwd.getpwnam(user).pw_uid
        except KeyError:
            raise NotYet(
                f"owners: {what}: there is no user {user!r} here; make it, or give its number"
            ) from None
    if not 0 <= int(user) < _UIDS:
        raise ConfigError(f"owners: {what}: {user} is no user's number")
    return int(user)
