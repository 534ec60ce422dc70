"""Golden bytes of a weight server's messages: readers of other versions rely on them."""

import msgspec
import pytest

from harvester.platform.http_kit import error_reply
from weightsync.transport.wire import StoreList, StoreVersions, index_etag, latest_etag


@pytest.mark.parametrize(
    ("record", "wire"),
    [
        (StoreList(stores=("job-a", "job-b")), b'{"stores":["job-a","job-b"]}'),
        (
            StoreVersions(directories=("anchor_v000025", "weight_v000026")),
            b'{"directories":["anchor_v000025","weight_v000026"]}',
        ),
    ],
)
def test_a_record_is_these_bytes(record: msgspec.Struct, wire: bytes) -> None:
    assert msgspec.json.encode(record) == wire
    assert msgspec.json.decode(wire, type=type(record)) == record


def test_a_refusal_is_these_bytes() -> None:
    reply = error_reply(404, "no store job-c")
    assert (reply.status, reply.body) == (404, b'{"error":"no store job-c"}')
    assert reply.headers["Content-Type"] == "application/json"


def test_fields_of_a_later_version_are_passed_over() -> None:
    wire = b'{"stores":["job-a"],"since":"a later version"}'
    assert msgspec.json.decode(wire, type=StoreList) == StoreList(stores=("job-a",))


def test_the_tag_of_an_index_is_its_digest() -> None:
    assert index_etag(b"{}") == '"dc7048f8f8747f561349cde127705c16"'


def test_the_tag_of_latest_is_its_bytes() -> None:
    assert latest_etag(b"weight_v000007\n") == '"7765696768745f763030303030370a"'
