"""The status of a gateway of another version than its reader."""

import msgspec
import pytest

from harvester.cli.gateway_tables import GatewayReport
from harvester.contracts.wire.gateway_status import GatewayFleet, GatewayStatus
from scheduler.model import EngineKind
from scheduler.rollmux.control.job_gateway import GatewayView

READERS = (GatewayFleet, GatewayReport, GatewayView)


@pytest.mark.parametrize("reader", READERS)
def test_readers_take_a_status_with_unknown_fields_and_without_most_of_their_own(
    reader: type[GatewayFleet],
) -> None:
    given = b'{"engines": {"e0": {"kind": "guest", "colour": 1}}, "jobs": {"job": {}}, "moon": 2}'
    status = msgspec.json.decode(given, type=reader)
    assert status.engines["e0"].kind == EngineKind.GUEST
    assert (status.active_job, status.jobs["job"].store) == (None, "")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("given", [b"{}", b'{"engines": {}}', b'{"jobs": {}}', b"[]"])
def test_readers_refuse_a_reply_that_is_no_status(given: bytes, reader: type[GatewayFleet]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(given, type=reader)


def test_a_status_has_every_field_on_the_wire() -> None:
    sent = msgspec.json.decode(msgspec.json.encode(GatewayStatus(engines={}, jobs={})))
    assert list(sent) == list(GatewayStatus.__struct_fields__)


@pytest.mark.parametrize("reader", [GatewayFleet, GatewayView])
def test_a_job_s_readers_ignore_what_only_operators_read(reader: type[GatewayFleet]) -> None:
    given = b'{"engines": {}, "jobs": {}, "stops": [{"source": "moon"}], "leases": [{}]}'
    assert msgspec.json.decode(given, type=reader).engines == {}
