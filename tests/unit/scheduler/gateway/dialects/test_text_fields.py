"""Bounds of a text request's messages."""

from typing import Any

import pytest

from harvester.contracts.errors import PeerProtocolError
from scheduler.gateway.dialects.text_fields import check_media

PART = {"type": "text", "text": ""}


class Counted(list[Any]):
    """Counts the parts that were looked at."""

    walked = 0

    def __iter__(self) -> Any:
        for part in super().__iter__():
            type(self).walked += 1
            yield part


@pytest.mark.parametrize(
    "messages",
    [
        [{"content": Counted([PART] * 20_000)}],
        [{"content": Counted([PART] * 2_000)} for _ in range(20)],
        Counted([{"content": ""}] * 20_000),
    ],
    ids=["one message", "many", "messages"],
)
def test_millions_of_parts_are_refused_without_a_walk(messages: list[Any]) -> None:
    """The event loop of all tenants walks them."""
    Counted.walked = 0
    with pytest.raises(PeerProtocolError, match="at most 16384 messages and parts"):
        check_media({"messages": messages})
    assert Counted.walked <= 16384


def test_a_long_trajectory_is_not_refused() -> None:
    check_media({"messages": [{"role": "user", "content": [PART, "hi"]}] * 4000})
