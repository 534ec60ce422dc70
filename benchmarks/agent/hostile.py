"""Requests of hostile callers; none may get success or 5xx as its answer."""

import json
from collections.abc import Iterator

_LEASE = {"request_id": "h", "slot": "slot0", "tenant": "t", "job": "j", "duration_s": 10}


def _request(line: str, body: bytes = b"", *, length: int | None = None, more: str = "") -> bytes:
    sent = len(body) if length is None else length
    head = (
        f"{line} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {sent}\r\n{more}\r\n"
    )
    return head.encode("latin-1") + body


def _lease(**changes: object) -> bytes:
    return _request("POST /v1/leases", json.dumps({**_LEASE, **changes}).encode())


def hostile_requests() -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each."""
    yield "no HTTP", b"\x16\x03\x01\x02\x00" + b"\xff" * 512
    yield "endless line", b"GET /" + b"a" * 100_000
    yield "endless header", _request("GET /v1/slots", more="X: " + "b" * 100_000 + "\r\n")
    yield (
        "many headers",
        _request("GET /v1/slots", more="".join(f"X{n}: y\r\n" for n in range(9999))),
    )
    yield "body over the limit", _request("POST /v1/leases", b"x" * (1 << 20))
    yield "length of terabytes", _request("POST /v1/leases", b"{", length=1 << 42)
    yield "negative length", _request("POST /v1/leases", b"{}", length=-1)
    yield "no JSON", _request("POST /v1/leases", b"{")
    yield "deep JSON", _request("POST /v1/leases", b"[" * 50_000)
    yield "no UTF-8", _request("POST /v1/leases", b'{"slot": "\xff\xfe"}')
    yield "unknown field", _lease(extra=1)
    yield "path as slot", _lease(slot="../../etc/passwd")
    yield "line feed in a name", _lease(tenant="t\nadmin")
    yield "endless name", _lease(job="j" * 5000)
    yield "duration of a word", _lease(duration_s="long")
    yield "duration beyond numbers", _lease(duration_s=0).replace(b" 0}", b" 1e999}")
    yield "renewal of a path", _request("POST /v1/leases/..%2F..%2Fetc/renew", b"{}")
    yield "stop without a reason", _request("POST /v1/stops", b'{"order": "drain"}')
    yield (
        "stop of an unknown slot",
        _request("POST /v1/stops", b'{"order": "drain", "slot": "nowhere", "reason": "r"}'),
    )
    yield "unknown route", _request("GET /v1/../../etc/passwd")
    yield "unknown method", _request("BREW /v1/leases")
    yield "token that is no text", _request("GET /v1/leases", more="Authorization: \xff\xfe\r\n")


def slow_request() -> bytes:
    """The beginning of one, whose end never comes."""
    return _lease()[:60]
