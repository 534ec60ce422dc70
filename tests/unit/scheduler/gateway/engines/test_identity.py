"""An engine's identity: what changed between two answers."""

import msgspec
import pytest

from harvester.contracts.errors import PeerProtocolError
from scheduler.gateway.engines.identity import Change, _decoded, change_between


@pytest.mark.parametrize(
    ("told", "change"),
    [
        ("a1.4", Change.NONE),
        ("a1.6", Change.WEIGHTS),
        ("b2.4", Change.PROCESS),
        ("", Change.PROCESS),
        ("a1", Change.PROCESS),
    ],
)
def test_a_process_with_other_weights_differs_from_another_process(
    told: str, change: Change
) -> None:
    assert change_between("a1.4", told) is change


def test_a_start_time_with_a_fraction_is_no_count_of_weight_calls() -> None:
    given, told = "started 1700000000.25", "started 1700000000.75"
    assert change_between(given, told) is Change.PROCESS


@pytest.mark.parametrize("raw", [b"{", b'"\xff"', b"[" * 100_000])
def test_a_reply_that_cannot_be_read_is_the_engines_fault(raw: bytes) -> None:
    with pytest.raises(PeerProtocolError, match="/rosemux/engine"):
        _decoded(raw, msgspec.json.Decoder(), "/rosemux/engine")
