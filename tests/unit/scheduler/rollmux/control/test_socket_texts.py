"""Faults on the way to the control are named in words, and an impossible path comes first."""

import http.client
from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError
from harvester.platform.blocking_peer import BlockingPeer
from scheduler.rollmux.cluster.runtime_events import Call
from scheduler.rollmux.control.phase_client import PhaseClient
from scheduler.rollmux.control.socket_server import listening_socket
from scheduler.rollmux.control.socket_transport import SocketTransport
from scheduler.rollmux.control.wire import (
    Accepted,
    CallRefused,
    Reply,
    Transport,
    Waiting,
    decoded_call,
)
from scheduler.rollmux.permits.events import Enter, Register
from tests.unit.scheduler.rollmux.permits.permit_scenario import ROLLOUT, terms


def test_a_path_that_no_socket_can_have_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    path = directory / ("x" * 110)
    with pytest.raises(ConfigError, match=r"^socket path of \d+ bytes, above 107: /"):
        SocketTransport(path)
    with pytest.raises(ConfigError, match="above 107"):
        listening_socket(path)
    assert not directory.exists()


def test_a_file_that_is_no_socket_is_refused_and_stays(tmp_path: Path) -> None:
    """As one whose flags --socket and --state were exchanged."""
    state = tmp_path / "phases.sqlite"
    state.write_bytes(b"permits")
    with pytest.raises(ConfigError, match=r"phases\.sqlite is no socket"):
        listening_socket(state)
    assert state.read_bytes() == b"permits"


class Refusing(http.client.HTTPConnection):
    """A connection with one outcome for each request."""

    def __init__(self, outcome: bytes | OSError) -> None:
        super().__init__("localhost")
        self.outcome = outcome
        self.status, self.length = 400, 0

    def request(self, *_: object, **__: object) -> None:
        if isinstance(self.outcome, OSError):
            raise self.outcome

    def getresponse(self) -> "Refusing":  # type: ignore[override]
        return self

    def __enter__(self) -> "Refusing":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, most_bytes: int) -> bytes:
        assert isinstance(self.outcome, bytes)
        return self.outcome[:most_bytes]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (
            b'{"error": "job \'a b\': use letters"}',
            "call refuses: HTTP 400: job 'a b': use letters",
        ),
        (b"no JSON", "call refuses: HTTP 400: no JSON"),
        (PermissionError(13, "Permission denied"), "call gives no answer: Permission denied"),
        (TimeoutError("timed out"), "call gives no answer: timed out"),
        (TimeoutError(), "call gives no answer: TimeoutError"),
    ],
)
def test_a_refused_request_is_reported_in_the_refusal_s_words(
    outcome: bytes | OSError, words: str
) -> None:
    kind = PeerProtocolError if isinstance(outcome, bytes) else Exhausted
    with pytest.raises(kind) as refused:
        BlockingPeer("call", lambda _: Refusing(outcome)).answer(
            "", b"", timeout_s=1.0, most_bytes=1000
        )
    assert str(refused.value) == words


def test_a_bad_name_of_a_job_is_refused_in_its_process_and_on_the_wire(tmp_path: Path) -> None:
    words = "job 'a b': use 1 to 64 letters"
    with pytest.raises(ConfigError, match=f"^{words}"):
        PhaseClient(SocketTransport(tmp_path / "none.sock"), terms("a b"))
    phase = '{"kind": "rollout", "nodes": ["r0"]}'
    with pytest.raises(PeerProtocolError, match="job 'a b'"):
        decoded_call("register", f'{{"terms": {{"job": "a b", "phases": [{phase}]}}}}'.encode())


class Full(Transport):
    """A control whose jobs wait for ever."""

    def __init__(self, placement: Reply) -> None:
        self.placement = placement

    def call(self, message: Call) -> Reply:
        if isinstance(message, Enter):
            return CallRefused(reason="another process of the job came", retry_after_s=0.5)
        return self.placement if isinstance(message, Register) else Accepted()


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Waiting(ahead=2, reason="no free node"), "job a waits behind 2: no free node;"),
        (CallRefused(reason="4096 jobs", retry_after_s=0.5), "job a refused: 4096 jobs;"),
        (Accepted(), "rollout phase of job a refused: another process of the job came;"),
    ],
)
def test_a_wait_that_took_too_long_ends_with_the_control_s_words(
    placement: Reply, words: str
) -> None:
    with pytest.raises(Exhausted, match=f"^{words} gave up"):
        PhaseClient(Full(placement), terms("a"), timeout_s=0.0).begin(ROLLOUT)
