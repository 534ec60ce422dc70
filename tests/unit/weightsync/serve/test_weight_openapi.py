"""The document of weight server and relay names what they serve, and what they answer."""

import http.client
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import msgspec
import pytest
import torch

from harvester.platform.openapi_document import DOCUMENT, PATH
from harvester.platform.tenants import Tenants
from tests.certificates import token_file
from tests.weight_servers import relayed, served
from weightsync import Publisher
from weightsync.layout.names import INDEX_FILE
from weightsync.serve.server import ServingLimits, WeightServer

INDEX = f"/stores/job/weight_v000001/{INDEX_FILE}"
SHARD = "/stores/job/weight_v000001/model-00001-of-00001.safetensors"
NOTHING: Any = None
APPLICATION = WeightServer(NOTHING).app()
SHOWN = msgspec.json.decode(msgspec.json.encode(APPLICATION[DOCUMENT]))


@pytest.fixture(params=["server", "relay"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with Publisher(tmp_path / "root" / "job") as publisher:
        publisher.publish({"w": torch.ones(40, 5)})
    with served(tmp_path / "root") as url:
        if request.param == "server":
            yield url
        else:
            with relayed(url, tmp_path / "cache") as relay:
                yield relay


def asked(url: str, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)) as connection:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", path, headers=sent)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


def check(path: str, status: int, body: bytes, headers: dict[str, str]) -> None:
    """Raises for an answer that the document does not describe."""
    template = next(
        each for each in SHOWN["paths"] if re.fullmatch(re.sub("{[a-z]+}", "[^/]+", each), path)
    )
    response = SHOWN["paths"][template]["get"]["responses"][str(status)]
    kind = headers.get("Content-Type", "").partition(";")[0]
    if status == 304:
        assert (body, response["content"]) == (b"", {})
    else:
        assert kind in response["content"]
    if kind == "application/json":
        schema = {**response["content"][kind]["schema"], "components": SHOWN["components"]}
        jsonschema.Draft202012Validator(schema).validate(msgspec.json.decode(body))
    if status == 503:
        assert {"Retry-After"} == set(response["headers"]) <= set(headers)


def test_every_route_is_in_the_document_and_no_other() -> None:
    assert {
        route.resource.canonical
        for route in APPLICATION.router.routes()
        if route.resource is not None and route.method != "HEAD"
    } == set(SHOWN["paths"])


def test_every_answer_is_as_the_document_says(url: str) -> None:
    for path, given, status in (
        ("/stores", {}, 200),
        ("/stores/job", {}, 200),
        ("/stores/none", {}, 404),
        ("/stores/%20", {}, 400),
        ("/stores/job/LATEST", {}, 200),
        (INDEX, {}, 200),
        (SHARD, {}, 200),
        (SHARD, {"Range": "bytes=8-15"}, 206),
        (SHARD, {"Range": "bytes=999999-"}, 416),
        ("/stores/job/elsewhere/file", {}, 404),
        ("/healthz", {}, 200),
        ("/metrics", {}, 200),
        (PATH, {}, 200),
    ):
        found = asked(url, path, **given)
        assert found[0] == status, path
        check(path, *found)
    assert msgspec.json.decode(asked(url, PATH)[1]) == SHOWN


def test_an_unchanged_file_is_answered_without_a_body(url: str) -> None:
    for path in ("/stores/job/LATEST", INDEX):
        tag = asked(url, path)[2]["ETag"]
        found = asked(url, path, If_None_Match=tag)
        assert found[0] == 304
        check(path, *found)


def test_refusals_of_a_token_and_of_a_busy_server_are_as_the_document_says(tmp_path: Path) -> None:
    with Publisher(tmp_path / "root" / "job") as publisher:
        publisher.publish({"w": torch.ones(40, 5)})
    file = token_file(tmp_path, "tenants", f"observer: {'o' * 20}")
    tenants, full = Tenants.load(file), ServingLimits(transfers_max=1, bytes_per_s=1.0)
    with served(tmp_path / "root", tenants=tenants) as url:
        for token, path, status in (
            ("w" * 20, "/stores", 401),
            ("o" * 20, "/stores/job", 403),
            ("o" * 20, PATH, 200),
        ):
            found = asked(url, path, Authorization=f"Bearer {token}")
            assert found[0] == status
            check(path, *found)
    with (
        served(tmp_path / "root", limits=full) as url,
        closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)) as other,
    ):
        other.request("GET", SHARD)
        while asked(url, "/healthz")[1] != b"1 transfers\n":
            time.sleep(0.01)
        found = asked(url, SHARD)
        assert found[0] == 503
        check(SHARD, *found)
