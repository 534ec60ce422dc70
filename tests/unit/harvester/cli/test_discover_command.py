"""`rosemux discover`: prints slots once, or keeps a slots file that an agent can read."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from harvester.cli.discover import SlotsWriter, _lasting, _of_pages, _written
from harvester.cli.root import main
from harvester.config import SlotConfig
from harvester.config_file import load_agent_config
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.discovery.slot_template import (
    DiscoveredEngine,
    Fields,
    KeptSlots,
    SlotTemplate,
    no_statement,
)
from tests.kubernetes_api import Kubernetes, kubernetes_api

TEMPLATE = {"metrics_url": "http://$host:$port/metrics", "model": "m"}


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "slot.yaml"
    path.write_text(yaml.safe_dump(TEMPLATE))
    return path


def called(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    return int(left.value.code or 0)


@pytest.fixture
def api() -> Iterator[str]:
    with kubernetes_api() as url:
        yield url


def test_pods_are_printed_as_slots(
    api: str, template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    ports = [{"containerPort": 8000}]
    Kubernetes.pods = [
        {
            "metadata": {"name": name, "namespace": "s", "labels": {"rosemux.dev/slot": slot}},
            "spec": {"containers": [{"ports": ports}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1"},
        }
        for name, slot in (("a", "chat"), ("b", "no slot"))
    ]
    options = ["--template", template, "--node", "n", "--server", api, "--token-file", token]
    assert called("discover", "kubernetes", *options) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out) == {
        "slots": [{"name": "chat", "metrics_url": "http://10.0.0.1:8000/metrics", "model": "m"}]
    }
    assert said.err == "pod s/b: 'no slot' is no name of a slot\n"
    (asked,) = Kubernetes.asked
    assert asked[0].startswith("/api/v1/pods?fieldSelector=spec.nodeName%3Dn%2C")
    assert asked[1] == f"Bearer {'t' * 32}"


def test_an_api_that_refuses_is_a_failure(
    api: str, template: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Kubernetes.status = 403
    options = ["--template", template, "--node", "n", "--server", api]
    assert called("discover", "kubernetes", *options) == 1
    assert "refuses: HTTP 403" in capsys.readouterr().err


def test_outside_of_a_cluster_the_api_must_be_named(
    template: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert called("discover", "kubernetes", "--template", template, "--node", "n") == 2
    assert "--server" in capsys.readouterr().err


class Source:
    """A source whose engines the test chooses; None: it gives no answer."""

    def __init__(self) -> None:
        self.slots: tuple[str, ...] | None = ()

    def __call__(self) -> list[DiscoveredEngine]:
        if self.slots is None:
            raise Exhausted("no answer")
        return [
            DiscoveredEngine(slot=slot, origin=f"unit {slot}", port="8000") for slot in self.slots
        ]


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def look(source: Source, tmp_path: Path) -> SlotsWriter:
    return SlotsWriter(
        find=source,
        template=SlotTemplate(TEMPLATE),
        kept=KeptSlots({}, forget_s=60.0),
        file=tmp_path / "slots.yaml",
    )


def test_an_agent_reads_what_is_written(look: SlotsWriter, source: Source, tmp_path: Path) -> None:
    source.slots = ("b", "a")
    look.take(now=0.0)
    assert look.file.stat().st_mode & 0o777 == 0o644
    agent = tmp_path / "agent.yaml"
    agent.write_text(f"slots_file: {look.file}\n")
    assert [slot.name for slot in load_agent_config(agent, environment={}).slots] == ["a", "b"]


def test_the_file_is_written_only_where_slots_changed(look: SlotsWriter, source: Source) -> None:
    source.slots = ("a",)
    look.take(now=0.0)
    first = look.file.stat().st_ino
    look.take(now=10.0)
    assert look.file.stat().st_ino == first
    source.slots = ("a", "b")
    look.take(now=20.0)
    assert look.file.stat().st_ino != first


def test_a_file_that_stays_the_same_is_written_again_each_minute_while_the_source_answers(
    look: SlotsWriter, source: Source
) -> None:
    source.slots = ("a",)
    look.take(now=0.0)

    def written_again(*, now: float) -> bool:
        os.utime(look.file, (0, 0))
        look.take(now=now)
        return look.file.stat().st_mtime > 0

    assert [written_again(now=now) for now in (30.0, 59.0, 60.0, 119.0, 120.0)] == [
        False, False, True, False, True
    ]  # fmt: skip
    source.slots = None
    assert not written_again(now=1000.0)


def test_while_the_source_gives_no_answer_the_slots_stay(
    look: SlotsWriter, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source.slots = ("a",)
    look.take(now=0.0)
    text = look.file.read_text()
    source.slots = None
    for now in (10.0, 1000.0):
        look.take(now=now)
    assert look.file.read_text() == text
    assert caplog.text.count("the slots stay as they are: no answer") == 1
    source.slots = ("a",)
    look.take(now=1010.0)
    assert look.file.read_text() == text
    assert "has a slot again" in caplog.text


def test_a_long_outage_is_no_absence_of_engines(look: SlotsWriter, source: Source) -> None:
    source.slots = ("a", "b")
    look.take(now=0.0)
    source.slots = None
    look.take(now=500.0)
    source.slots = ("a",)
    look.take(now=1000.0)
    assert "name: b" in look.file.read_text()


def test_an_unwritable_slots_file_is_logged_and_tried_again(
    look: SlotsWriter, source: Source, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    look.file = tmp_path / "absent" / "slots.yaml"
    source.slots = ("a",)
    look.take(now=0.0)
    assert "cannot be written" in caplog.text
    look.file.parent.mkdir()
    look.take(now=10.0)
    assert "name: a" in look.file.read_text()


def test_a_new_process_goes_on_with_the_slots_of_the_last_one(
    look: SlotsWriter, source: Source
) -> None:
    source.slots = ("a",)
    look.take(now=0.0)
    assert [*_written(look.file)] == ["a"]


def test_slots_with_a_field_that_is_unknown_now_are_left(look: SlotsWriter, source: Source) -> None:
    source.slots = ("a",)
    look.take(now=0.0)
    look.file.write_text(look.file.read_text().replace("model:", "modell:"))
    assert _written(look.file) == {}


def test_a_reply_that_is_cut_short_is_no_answer(
    template: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = ["--template", template, "--node", "n", "--server", url]
        assert called("discover", "kubernetes", *options) == 1
        thread.join()
    assert "gives no answer" in capsys.readouterr().err


def test_a_file_of_someone_else_is_not_overwritten(tmp_path: Path) -> None:
    assert _written(tmp_path / "absent") == {}
    own = tmp_path / "agent.yaml"
    own.write_text("slots: [{name: slot0}]\n")
    with pytest.raises(ConfigError, match="not a file of `rosemux discover`"):
        _written(own)


def test_an_agent_s_file_with_a_fault_costs_the_gpus_and_no_slot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = tmp_path / "agent.yaml"
    agent.write_text("slotz: []\n")
    assert _lasting(agent, {}) is no_statement
    assert "slotz" in caplog.text
    with pytest.raises(ConfigError):
        _of_pages(agent)
    agent.write_text(f"slots_file: {tmp_path / 'slots.yaml'}\npage_root: {tmp_path}\n")
    last: dict[str, Fields] = {
        "chat": {"name": "chat", "guest": {"gpus": ["GPU-1"]}},
        "code": {"name": "code"},
    }
    stated = _lasting(agent, last)
    unit = DiscoveredEngine(slot="chat", origin="unit chat")
    assert stated(SlotConfig(name="chat"), unit) == ("GPU-1",)
