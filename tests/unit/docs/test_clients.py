"""The judge of a client's run, and the catalogue of clients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.clients.catalogue import CLIENTS
from tests.clients.verdict import Client, Counted, faults

CLIENT = Client(name="framework", page="Framework")
COUNTED = Counted(turns=2, dedicated_tokens=5, guest_tokens=3, wrong=0, version=0)
FACTS = {"turns": 2, "tokens": 8, "logprobs": 8, "versions": [1], "whole": True}


def test_a_client_whose_every_token_was_counted_has_no_fault() -> None:
    assert faults(CLIENT, FACTS, COUNTED) == []


@pytest.mark.parametrize(
    ("counted", "facts", "named"),
    [
        ({"wrong": 1}, {}, "lost or ended twice"),
        ({"guest_tokens": 0, "dedicated_tokens": 8}, {}, "harvested engine"),
        ({}, {"tokens": 0, "logprobs": 0}, "got no token"),
        ({}, {"logprobs": 7}, "7 log-probabilities of 8 tokens"),
        ({"turns": 3}, {}, "the gateway served 3"),
        ({"guest_tokens": 9}, {}, "the engines made 14"),
        ({"turns": 1}, {"whole": False}, "the gateway served 1"),
    ],
)
def test_each_fault_is_named(counted: dict[str, int], facts: dict[str, Any], named: str) -> None:
    found = faults(CLIENT, FACTS | facts, replace(COUNTED, **counted))
    assert any(named in fault for fault in found), found


def test_a_client_that_trains_publishes_versions() -> None:
    trains = replace(CLIENT, trains=True)
    assert "publishes" in faults(trains, FACTS, replace(COUNTED, version=1))[0]
    assert faults(trains, FACTS, replace(COUNTED, version=2)) == []


def test_a_client_that_goes_on_sampling_has_counted_a_part() -> None:
    more = replace(COUNTED, turns=9, guest_tokens=100)
    assert faults(CLIENT, FACTS | {"whole": False}, more) == []


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_every_client_is_pinned_and_has_a_driver_and_a_page(
    client: Client, repository: Path
) -> None:
    pins = (repository / f"deploy/clients/{client.environment}.txt").read_text()
    assert all("==" in line for line in pins.splitlines() if line and line[0].isalnum())
    assert (repository / "tests/clients" / client.driver).is_file()
    assert f"\n## {client.page}\n" in (repository / "examples/clients.md").read_text()
