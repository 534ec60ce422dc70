"""Names from outside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import checked_name, is_name


@pytest.mark.parametrize("name", ["a", "0", "prod", "pulse.prod.0", "A-b_c.d", "x" * 64])
def test_admits_harmless_file_names(name: str) -> None:
    assert checked_name(name, what="engine name") == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-f", "a/b", "../a", "a b", "ä", "a\x00", "a\n", "x" * 65]
)
def test_refuses_what_is_no_file_name_or_a_way_to_another_folder(name: str) -> None:
    with pytest.raises(PeerProtocolError, match="engine name"):
        checked_name(name, what="engine name")


def test_a_refusal_shows_a_long_name_cut() -> None:
    with pytest.raises(PeerProtocolError) as refusal:
        checked_name("/" * 10_000, what="lease")
    assert len(str(refusal.value)) < 300


@given(st.text())
def test_an_admitted_name_is_one_part_of_a_path(name: str) -> None:
    if is_name(name):
        assert not set(name) & set("/\\\0\n")
        assert name not in (".", "..")
