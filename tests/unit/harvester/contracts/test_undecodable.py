"""Bytes from elsewhere are decoded under every error that msgspec has for them."""

import re
from pathlib import Path

import msgspec
import pytest

from harvester.contracts.errors import UNDECODABLE

CHECKOUT = Path(__file__).parents[4]
PACKAGES = ("harvester", "coserve", "weightsync", "scheduler")
NARROW = re.compile(r"msgspec\.(MsgspecError|DecodeError)\b")


@pytest.mark.parametrize("raw", [b"{", b'"\xff"', b"[" * 100_000, b""])
def test_foreign_bytes_raise_no_other_error(raw: bytes) -> None:
    with pytest.raises(UNDECODABLE):
        msgspec.json.decode(raw)


def test_no_handler_names_msgspec_s_errors_alone() -> None:
    """They leave out invalid UTF-8 and deep nesting, which once ended a gateway."""
    found = [
        f"{file.relative_to(CHECKOUT)}: {line.strip()}"
        for package in PACKAGES
        for file in sorted((CHECKOUT / package).rglob("*.py"))
        for line in file.read_text().splitlines()
        if NARROW.search(line) and not line.startswith("UNDECODABLE =")
    ]
    assert found == []
