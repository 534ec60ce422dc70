"""Trusted writers of each kind of page, from an engine's environment."""

import os
import pwd

import pytest

from harvester.contracts.errors import ConfigError
from harvester.contracts.page import OWN_USER, PageOwners
from harvester.contracts.page.owners import OWNERS_VARIABLE, environment_owners


def told(text: str) -> PageOwners:
    return environment_owners({OWNERS_VARIABLE: text})


def test_without_the_variable_the_owner_is_this_user() -> None:
    assert environment_owners({}) == told("") == OWN_USER
    assert OWN_USER.variable() == {}


def test_owners_survive_the_environment_variable() -> None:
    owners = PageOwners(
        agent=frozenset({990}), production=frozenset({991, 1000}), guest=frozenset({992})
    )
    assert environment_owners(owners.variable()) == owners


def test_users_may_be_named() -> None:
    own = pwd.getpwuid(os.getuid())
    assert told(f"guest:{own.pw_name}") == PageOwners(guest=frozenset({own.pw_uid}))


@pytest.mark.parametrize(
    "text",
    [
        "agent",
        "agent:",
        "everybody:1",
        "guest:-1",
        "guest:4294967296",
        "guest:no such user",
        "a" * 5000,
    ],
)
def test_an_entry_without_a_user_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(?i)owners"):
        told(text)
