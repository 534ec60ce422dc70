"""A slot in real pages whose agent and production engine a test plays."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coserve.guest.guest_slot import GuestSlot
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import (
    Grant,
    GrantMode,
    Guest,
    PageDirectory,
    PageFault,
    ProductionModel,
    Pulse,
    Reading,
)

HOUR_NS = 3_600_000_000_000
MODEL = ProductionModel(
    prefill_base_s=0.010,
    prefill_s_per_token=0.0001,
    decode_base_s=0.004,
    decode_s_per_request=0.0005,
)
OPEN_GRANT = Grant(
    epoch=1,
    mode=GrantMode.OPEN,
    pulses=("pulse.prod.0",),
    ttft_slo_s=1.0,
    itl_slo_s=0.2,
    epsilon=float("inf"),
    phantom_prompt_tokens=100,
    production=MODEL,
)


class Slot:
    """Agent and production of one slot; their pages are fresh for an hour by default."""

    def __init__(self, path: Path) -> None:
        self.directory = PageDirectory.create(path)
        self._grant = self.directory.grant_writer()
        self._pulse = self.directory.pulse_writer("prod", 0)

    def grant(self, *, ttl_ns: int = HOUR_NS, age_ns: int = 0, **changes: Any) -> None:
        grant = msgspec.structs.replace(OPEN_GRANT, **changes)
        self._grant.write(grant, now_ns=monotonic_ns() - age_ns, ttl_ns=ttl_ns)

    def pulse(self, *, ttl_ns: int = HOUR_NS, **fields: Any) -> None:
        self._pulse.write(Pulse(**fields), now_ns=monotonic_ns(), ttl_ns=ttl_ns)

    def production_arrives(self) -> None:
        """A request that has used up its whole slack."""
        arrival_ns = monotonic_ns() - 2_000_000_000
        self.pulse(in_flight=1, waiting=1, oldest_waiting_arrival_ns=arrival_ns, requests_total=1)

    def guest(self) -> Guest:
        record = self.directory.guest_reader().read().record
        assert record is not None
        return record

    def guest_fault(self) -> PageFault | None:
        return self.directory.guest_reader().read().fault


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    """Granted and idle."""
    scene = Slot(tmp_path / "slot")
    scene.grant()
    scene.pulse()
    return scene


@pytest.fixture
def guest(slot: Slot) -> Iterator[GuestSlot]:
    guest = GuestSlot(slot.directory.path, token_limit=512)
    yield guest
    guest.close()


@pytest.fixture
def model() -> ProductionModel:
    return MODEL


@pytest.fixture
def make_grant() -> Callable[..., Grant]:
    def make(**changes: Any) -> Grant:
        return msgspec.structs.replace(OPEN_GRANT, **changes)

    return make


@pytest.fixture
def whole() -> Callable[[Any], Reading[Any]]:
    return lambda record: Reading(record, None)
