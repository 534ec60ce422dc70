"""Tenants of a weight server and of a relay: each reads its own stores, and no name tells more."""

import http.client
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from harvester.contracts.errors import ConfigError
from harvester.platform.tenants import Tenants
from tests.weight_servers import HASTY, relayed, served
from weightsync.publisher import Publisher
from weightsync.serve.server import ListenSettings, ServingLimits
from weightsync.transport.access import VARIABLES, Access
from weightsync.transport.http_source import HttpSource

SHARD = "weight_v000001/model-00001-of-00001.safetensors"
INDEX = "weight_v000001/model.safetensors.index.json"
ALICE, BOB, OPERATOR, OBSERVER = (letter * 20 for letter in "abox")
FILE = f"""
alice:
  token: {ALICE}
  stores: [job-a, job-a-*]
bob: {{token: [{BOB}, {"B" * 20}], stores: job-b}}
carol: {"c" * 20}
operator: {OPERATOR}
observer: {OBSERVER}
"""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stores")
    for name in ("job-a", "job-a-lora", "job-ab", "job-b"):
        with Publisher(root / name) as publisher:
            publisher.publish({"w": torch.ones(40, 5)})
    return root


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "tenants", FILE)


def written(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


@contextmanager
def by_a_relay(root: Path, file: Path, folder: Path) -> Iterator[str]:
    token = written(folder / "upstream", OPERATOR)
    access = Access(token_file=token, retries=HASTY.retries)
    tenants = Tenants.load(file)
    with (
        served(root, tenants=tenants) as upstream,
        relayed(upstream, folder / "cache", access=access, tenants=tenants) as url,
    ):
        yield url


@contextmanager
def directly(root: Path, file: Path, _folder: Path) -> Iterator[str]:
    with served(root, tenants=Tenants.load(file)) as url:
        yield url


@pytest.fixture(params=[directly, by_a_relay])
def url(request: pytest.FixtureRequest, stores: Path, file: Path, tmp_path: Path) -> Iterator[str]:
    with request.param(stores, file, tmp_path) as found:
        yield found


def asked(
    url: str, path: str, token: str = "", *, method: str = "GET", **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    sent = {"Authorization": f"Bearer {token}"} if token else {}
    with closing(connection):
        connection.request(
            method, path, headers=sent | {name.replace("_", "-"): v for name, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, answer.read()


def listed(url: str, token: str) -> list[str]:
    status, body = asked(url, "/stores", token)
    assert status == 200
    return list(json.loads(body)["stores"])


def test_a_tenant_sees_and_reads_its_own_stores_alone(url: str, stores: Path) -> None:
    assert listed(url, ALICE) == ["job-a", "job-a-lora"]
    assert listed(url, BOB) == listed(url, "B" * 20) == ["job-b"]
    whole = (stores / "job-a" / SHARD).read_bytes()
    assert asked(url, f"/stores/job-a/{SHARD}", ALICE) == (200, whole)
    assert asked(url, f"/stores/job-a/{SHARD}", ALICE, Range="bytes=8-15") == (206, whole[8:16])
    assert asked(url, "/stores/job-a-lora/LATEST", ALICE)[0] == 200


def test_the_transfers_of_one_tenant_refuse_no_other_tenant(stores: Path, file: Path) -> None:
    limits = ServingLimits(transfers_max=2, bytes_per_s=1.0)
    with served(stores, tenants=Tenants.load(file), limits=limits) as url, ExitStack() as held:
        for _ in range(2):
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
            held.enter_context(closing(connection))
            sent = {"Authorization": f"Bearer {ALICE}"}
            connection.request("GET", f"/stores/job-a/{SHARD}", headers=sent)
        while asked(url, "/healthz") != (200, b"2 transfers\n"):
            time.sleep(0.01)
        assert asked(url, f"/stores/job-a/{INDEX}", ALICE)[0] == 503
        assert asked(url, f"/stores/job-b/{INDEX}", BOB)[0] == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("rest", ["", "/LATEST", f"/{SHARD}", f"/{INDEX}", "/x/y"])
def test_another_tenants_store_answers_like_one_that_is_absent(
    url: str, rest: str, method: str
) -> None:
    headers = {"Range": "bytes=0-7", "Prefer": "wait=30", "Cache-Control": "no-cache"}
    for token in (ALICE, "c" * 20):
        found = asked(url, f"/stores/job-b{rest}", token, method=method, **headers)
        absent = asked(url, f"/stores/job-z{rest}", token, method=method, **headers)
        assert found[0] == absent[0] == 404
        assert found[1] == absent[1].replace(b"job-z", b"job-b")


def test_a_pattern_is_no_prefix_and_a_name_no_path(url: str) -> None:
    assert asked(url, "/stores/job-ab/LATEST", ALICE)[0] == 404
    for name in ("job-a-..%2Fjob-b", "job-a-%2F..%2Fjob-b", "..%2Fjob-b"):
        assert asked(url, f"/stores/{name}/LATEST", ALICE)[0] in (400, 404)


def test_a_tenant_without_stores_reads_none(url: str) -> None:
    assert listed(url, "c" * 20) == []
    assert asked(url, "/stores/job-a/LATEST", "c" * 20)[0] == 404


def test_the_operator_reads_all_and_the_observer_no_weights(url: str) -> None:
    everything = ["job-a", "job-a-lora", "job-ab", "job-b"]
    assert listed(url, OPERATOR) == listed(url, OBSERVER) == everything
    for path in ("/stores/job-b", "/stores/job-b/LATEST", f"/stores/job-b/{SHARD}"):
        assert asked(url, path, OPERATOR)[0] == 200
        assert asked(url, path, OBSERVER)[0] == 403
        assert asked(url, path, OBSERVER, method="HEAD")[0] == 403
    statuses = [asked(url, "/metrics", token)[0] for token in (OPERATOR, OBSERVER, ALICE)]
    assert statuses == [200, 200, 403]


@pytest.mark.parametrize(
    "path",
    ["/%6detrics", "/metrics?x", "/./metrics", "/stores/../metrics", "/metrics/", "//metrics",
     "http://other/metrics", "/metrics%2f", "/metrics;x"],
)  # fmt: skip
def test_no_spelling_of_a_path_shows_a_tenant_the_metrics(url: str, path: str) -> None:
    assert asked(url, path, ALICE)[0] in (400, 403, 404)


@pytest.mark.parametrize(
    "path",
    ["/stores/", "/stores/%2e", "/%73tores/job-a", "/stores/job-a/LATEST?x", "//stores/job-a"],
)
def test_no_spelling_of_a_path_shows_the_observer_a_store(url: str, path: str) -> None:
    assert asked(url, path, OBSERVER)[0] in (400, 403, 404)


@pytest.mark.parametrize(
    "path",
    ["/stores", "/stores/job-a", "/stores/job-a/LATEST", f"/stores/job-a/{SHARD}", "/metrics",
     "/openapi.json", "/nothing", "/stores/%2e%2e/healthz", "//healthz"],
)  # fmt: skip
def test_no_path_but_the_probe_answers_without_a_token(url: str, path: str) -> None:
    assert asked(url, path)[0] == 401
    assert asked(url, path, "z" * 20)[0] == 401
    assert asked(url, path, Authorization=f"Basic {ALICE}")[0] == 401
    assert asked(url, path, Authorization=ALICE)[0] == 401
    assert asked(url, path, method="HEAD")[0] == 401
    assert asked(url, "/healthz")[0] == 200


def test_tokens_and_stores_change_while_a_server_runs(
    url: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = "n" * 20
    file.write_text(FILE.replace(ALICE, renewed).replace("[job-a, job-a-*]", "[job-ab]"))
    assert asked(url, "/stores", ALICE)[0] == 401
    assert listed(url, renewed) == ["job-ab"]
    assert asked(url, "/stores/job-a/LATEST", renewed)[0] == 404
    for broken in ("", "[", "alice: short", f"alice: {{token: {ALICE}, store: job-a}}"):
        file.write_text(broken)
        assert listed(url, renewed) == ["job-ab"]
        assert asked(url, "/stores", ALICE)[0] == 401
    file.unlink()
    assert listed(url, renewed) == ["job-ab"]
    assert renewed not in caplog.text
    assert ALICE not in caplog.text


def test_a_plain_token_file_is_followed_by_server_and_reader(stores: Path, tmp_path: Path) -> None:
    accepted, sent = (written(tmp_path / name, ALICE) for name in ("accepted", "sent"))
    access = Access(token_file=sent, retries=HASTY.retries)
    with (
        served(stores, tenants=Tenants.operators(accepted)) as url,
        closing(HttpSource(f"{url}/stores/job-a", access)) as source,
    ):
        assert source.latest() is not None
        accepted.write_text(f"{BOB}\n{ALICE}\n")
        assert asked(url, "/stores", BOB)[0] == asked(url, "/stores", ALICE)[0] == 200
        accepted.write_text(f"{BOB}\n")
        with pytest.raises(ConfigError, match="token file"):
            source.latest()
        sent.write_text(BOB)
        assert source.latest() is not None
        accepted.write_text("short")
        assert source.latest() is not None


def test_off_loopback_a_tenants_file_is_a_token_file_too(file: Path) -> None:
    assert ListenSettings(host="0.0.0.0", tenants=Tenants.load(file)).host == "0.0.0.0"
    with pytest.raises(ConfigError, match="--tenants"):
        ListenSettings(host="0.0.0.0")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"operator: {{token: {ALICE}, stores: job-a}}", "operator reads every store"),
        (f"alice: {{token: {ALICE}, stores: [1]}}", "names, or patterns"),
        (f"alice: {{token: {ALICE}, stores: []}}", "names, or patterns"),
        ("alice: {stores: job-a}", "16 characters"),
        (f"alice: {{tokens: {ALICE}}}", "token and stores"),
        (f"alice: [{{token: {ALICE}}}]", "16 characters"),
    ],
)
def test_a_wrong_entry_of_stores_is_a_mistake(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Tenants.load(written(tmp_path / "tenants", text))
    assert ALICE not in str(caught.value)


def test_a_commands_files_come_before_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, environments = (written(tmp_path / name, name * 4) for name in ("mine", "environment"))
    monkeypatch.setenv(VARIABLES["token_file"], os.fspath(environments))
    monkeypatch.delenv(VARIABLES["ca_file"], raising=False)
    assert Access.from_environment(token_file=mine).token_file == mine
    assert Access.from_environment().token_file == environments


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("token_file", "ROSEMUX_WEIGHT_TOKEN_FILE: cannot read token file"),
        ("cert_file", "set ROSEMUX_WEIGHT_CERT_FILE and ROSEMUX_WEIGHT_KEY_FILE"),
        ("key_file", "set ROSEMUX_WEIGHT_CERT_FILE and ROSEMUX_WEIGHT_KEY_FILE"),
    ],
)
def test_a_wrong_file_of_the_environment_is_named_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, said: str
) -> None:
    monkeypatch.setenv(VARIABLES[field], os.fspath(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=said):
        Access.from_environment()
