"""Tenants of a phase control on its Unix socket: each calls for its own jobs alone."""

import asyncio
import grp
import http.client
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError
from harvester.contracts.ids import Epoch, JobId, NodeId, TenantId
from harvester.platform.http_kit import serving
from harvester.platform.tenants import Tenants
from scheduler.model import JobSpec, PhaseKind, PhaseSpec
from scheduler.rollmux.cluster.runtime_events import Call, NodeReport, Submit
from scheduler.rollmux.control.async_api import AsyncPhaseApi
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.control_state import ControlState
from scheduler.rollmux.control.nodes_file import read_nodes
from scheduler.rollmux.control.planning import make_service
from scheduler.rollmux.control.socket_server import (
    application,
    exposition,
    listening_socket,
    serve,
)
from scheduler.rollmux.control.socket_transport import SocketTransport
from scheduler.rollmux.control.wire import Accepted, CallRefused, Granted, Placed
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    Forget,
    Leave,
    Register,
    Unloaded,
    Withdraw,
)
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms

NODES = Path(__file__).parents[5] / "examples" / "nodes.yaml"
WITHIN_S = 30.0
TOKENS = {name: name * 4 for name in ("alice", "bobby", "operator", "observer")}
FILE = "".join(f"{name}: {token}\n" for name, token in TOKENS.items())


class Control:
    """A control's socket and its callers, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "phases.sock"
        self.tenants = written(directory / "tenants", FILE)

    def by(self, name: str) -> SocketTransport:
        token = written(self.directory / f"token-{name}", TOKENS.get(name, name))
        return SocketTransport(self.socket, token_file=token)

    @contextmanager
    def runs(self, *, tenants: bool = True, nodes: bool = False) -> Iterator["Control"]:
        ready, ends = threading.Event(), list[Callable[[], object]]()

        async def live() -> None:
            clock, end = MonotonicClock(), asyncio.Event()
            loop = asyncio.get_running_loop()
            ends.append(lambda: loop.call_soon_threadsafe(end.set))
            service = make_service(
                ControlSettings(
                    state=self.directory / "state.sqlite",
                    cluster=read_nodes(NODES) if nodes else None,
                ),
                clock,
            )
            known = Tenants.load(self.tenants if tenants else None)
            api = AsyncPhaseApi(service, clock, known)
            async with serving(application(api), shutdown_s=0.1) as runner:
                await web.SockSite(runner, listening_socket(self.socket)).start()
                ready.set()
                await end.wait()
            service.close()

        thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
        thread.start()
        assert ready.wait(WITHIN_S)
        try:
            yield self
        finally:
            ends[0]()
            thread.join(WITHIN_S)

    def status(self, method: str, path: str, authorization: str | None) -> int:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.socket))
        headers = {} if authorization is None else {"Authorization": authorization}
        with closing(connection):
            connection.request(method, path, headers=headers)
            return connection.getresponse().status


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control(tmp_path)


def written(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def terms(job: str, node: str = "r0") -> Register:
    phases = (PhaseTerms(kind=PhaseKind.ROLLOUT, nodes=(NodeId(node),)),)
    return Register(terms=JobTerms(job=JobId(job), phases=phases))


def spec(job: str, tenant: str = "default") -> Submit:
    phases = tuple(
        PhaseSpec(kind=kind, max_s=100.0) for kind in (PhaseKind.ROLLOUT, PhaseKind.TRAINING)
    )
    return Submit(
        spec=JobSpec(job=JobId(job), tenant=TenantId(tenant), slo=3.0, host_bytes=1, phases=phases)
    )


def calls(job: str) -> tuple[Call, ...]:
    name = JobId(job)
    return (
        terms(job),
        spec(job),
        Enter(job=name, kind=PhaseKind.ROLLOUT, holder="h", wait_s=0.0),
        Withdraw(job=name, holder="h"),
        Beat(job=name, epoch=Epoch(1)),
        Leave(job=name, epoch=Epoch(1)),
        Unloaded(job=name, holder="h", nodes=()),
        Forget(job=name),
    )


def enter(job: str) -> Enter:
    return Enter(job=JobId(job), kind=PhaseKind.ROLLOUT, holder=f"holder-{job}", wait_s=0.0)


def shown(control: Control, name: str) -> set[str]:
    return {each.job for each in control.by(name).jobs()}


def test_a_tenant_calls_for_its_own_jobs_and_sees_no_others(control: Control) -> None:
    with control.runs():
        alice, bobby = control.by("alice"), control.by("bobby")
        assert isinstance(alice.call(terms("a", "r0")), Accepted)
        assert isinstance(bobby.call(terms("b", "r1")), Accepted)
        assert isinstance(alice.call(enter("a")), Granted)
        for call in calls("a"):
            with pytest.raises(PeerProtocolError, match=r"403.*job a is another"):
                bobby.call(call)
        assert isinstance(bobby.call(enter("b")), Granted)
        assert (shown(control, "alice"), shown(control, "bobby")) == ({"a"}, {"b"})
        assert shown(control, "operator") == shown(control, "observer") == {"a", "b"}


def test_the_operator_calls_for_every_job_and_the_observer_for_none(control: Control) -> None:
    with control.runs():
        alice, operator = control.by("alice"), control.by("operator")
        assert isinstance(alice.call(terms("a")), Accepted)
        assert isinstance(operator.call(terms("o", "r1")), Accepted)
        for call in (*calls("a"), *calls("new"), NodeReport(node=NodeId("r0"), failed=True)):
            with pytest.raises(PeerProtocolError, match="403"):
                control.by("observer").call(call)
        with pytest.raises(PeerProtocolError, match="403"):
            alice.call(enter("o"))
        with pytest.raises(PeerProtocolError, match=r"403.*token of operator"):
            alice.call(NodeReport(node=NodeId("r0"), failed=True))
        assert isinstance(operator.call(NodeReport(node=NodeId("r0"), failed=True)), CallRefused)
        assert isinstance(operator.call(Forget(job=JobId("a"))), Accepted)
        assert shown(control, "operator") == {"o"}
        assert isinstance(control.by("bobby").call(terms("a")), Accepted)
        with pytest.raises(PeerProtocolError, match="403"):
            alice.call(terms("a"))


def test_a_job_that_the_operator_submits_is_the_named_tenants(control: Control) -> None:
    with control.runs(nodes=True):
        operator, alice = control.by("operator"), control.by("alice")
        assert isinstance(operator.call(spec("a", "alice")), Placed)
        assert isinstance(alice.call(spec("a", "alice")), Placed)
        # The token says the tenant, not the declaration.
        assert isinstance(control.by("bobby").call(spec("b", "alice")), Placed)
        with pytest.raises(PeerProtocolError, match="403"):
            alice.call(spec("b", "alice"))
        assert (shown(control, "alice"), shown(control, "bobby")) == ({"a"}, {"b"})
    with control.runs(nodes=True):
        assert (shown(control, "alice"), shown(control, "bobby")) == ({"a"}, {"b"})


def test_owners_outlive_a_restart_and_a_run_without_tenants_ends_them(control: Control) -> None:
    with control.runs():
        assert isinstance(control.by("alice").call(terms("a")), Accepted)
    with control.runs():
        with pytest.raises(PeerProtocolError, match="403"):
            control.by("bobby").call(terms("a"))
        assert isinstance(control.by("alice").call(enter("a")), Granted)
    with control.runs(tenants=False):
        assert isinstance(SocketTransport(control.socket).call(Forget(job=JobId("a"))), Accepted)
        assert isinstance(SocketTransport(control.socket).call(terms("a")), Accepted)
    with control.runs():
        for name in ("alice", "bobby"):
            with pytest.raises(PeerProtocolError, match="403"):
                control.by(name).call(enter("a"))
        assert shown(control, "operator") == {"a"}


def test_a_job_whose_owner_cannot_be_kept_is_not_declared(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise Exhausted("disk full")

    with control.runs():
        with monkeypatch.context() as patch:
            patch.setattr(ControlState, "keep_owners", refuse)
            with pytest.raises(Exhausted, match="503"):
                control.by("alice").call(terms("a"))
        assert shown(control, "operator") == set()
        assert isinstance(control.by("bobby").call(terms("a")), Accepted)


def test_the_jobs_of_one_tenant_leave_room_for_those_of_others(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.rollmux.control.phase_service.JOBS_MAX", 8)
    monkeypatch.setattr("scheduler.rollmux.control.job_owners._SHARED_JOBS", 4)
    with control.runs():
        alice, bobby, operator = (control.by(name) for name in ("alice", "bobby", "operator"))
        for at in range(4):
            assert isinstance(alice.call(terms(f"a{at}")), Accepted)
        with pytest.raises(Exhausted, match="4 of them by alice; its share is 4"):
            alice.call(terms("a4"))
        assert isinstance(alice.call(terms("a0", "r1")), Accepted)
        assert all(isinstance(bobby.call(terms(job)), Accepted) for job in ("b0", "b1"))
        with pytest.raises(Exhausted, match="its share is 2"):
            bobby.call(terms("b2"))
        assert all(isinstance(operator.call(terms(job)), Accepted) for job in ("o0", "o1"))
        assert isinstance(operator.call(terms("o2")), CallRefused)


PATHS = (
    ("GET", "/v1/phases"),
    ("HEAD", "/v1/phases"),
    ("GET", "/v1/journal"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/phases/forget"),
    ("POST", "/v1/phases/nothing"),
    ("GET", "/nothing"),
)


def test_no_path_answers_without_a_token_of_the_file(control: Control) -> None:
    token = TOKENS["alice"]
    wrong = (None, "", "Bearer ", f"Bearer {'z' * 20}", f"Basic {token}", token, f"Bearer {token}x")
    with control.runs():
        for method, path in PATHS:
            for authorization in wrong:
                assert control.status(method, path, authorization) == 401, (path, authorization)
        with pytest.raises(PeerProtocolError, match="401"):
            SocketTransport(control.socket).jobs()
        with pytest.raises(PeerProtocolError, match="401"):
            SocketTransport(control.socket).call(terms("a"))


def test_journal_and_metrics_are_for_operator_and_observer(control: Control) -> None:
    expected = {"alice": (200, 403, 403, 200), "observer": (200,) * 4, "operator": (200,) * 4}
    with control.runs():
        for name, statuses in expected.items():
            sent = f"Bearer {TOKENS[name]}"
            paths = ("/v1/phases", "/v1/journal", "/metrics", "/openapi.json")
            assert tuple(control.status("GET", path, sent) for path in paths) == statuses, name


def test_tokens_change_while_the_control_and_its_callers_run(control: Control) -> None:
    with control.runs():
        alice = control.by("alice")
        assert isinstance(alice.call(terms("a")), Accepted)
        control.tenants.write_text(FILE.replace(TOKENS["alice"], "n" * 20))
        with pytest.raises(PeerProtocolError, match="401"):
            alice.jobs()
        written(control.directory / "token-alice", "n" * 20)
        assert {each.job for each in alice.jobs()} == {"a"}
        for broken in ("", "[", "alice: short"):
            control.tenants.write_text(broken)
            assert {each.job for each in alice.jobs()} == {"a"}
        control.tenants.unlink()
        assert {each.job for each in alice.jobs()} == {"a"}


def test_a_token_file_that_is_not_there_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read token file"):
        SocketTransport(tmp_path / "phases.sock", token_file=tmp_path / "absent")


async def test_the_metrics_port_asks_for_a_token_too(control: Control) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = make_service(ControlSettings(metrics_port=port), MonotonicClock())

    def status(token: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with closing(connection):
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
            return connection.getresponse().status

    async with exposition(service, Tenants.load(control.tenants)):
        found = [
            await asyncio.to_thread(status, TOKENS.get(name, "x" * 20))
            for name in ("observer", "alice", "none")
        ]
    service.close()
    assert found == [200, 403, 401]


def test_a_group_opens_the_socket_and_a_directory_that_the_control_makes(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getegid()).gr_name
    path = tmp_path / "made" / "phases.sock"
    with closing(listening_socket(path, group=group)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o710
        assert (path.stat().st_gid, path.parent.stat().st_gid) == (os.getegid(),) * 2
    with closing(listening_socket(tmp_path / "made" / "other.sock")):
        assert stat.S_IMODE((tmp_path / "made" / "other.sock").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="no group nobody-of-these-tests"):
        listening_socket(path, group="nobody-of-these-tests")


async def test_a_group_without_tenants_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "phases.sock"
    with pytest.raises(ConfigError, match="--group needs --tenants"):
        await serve(path, ControlSettings(), group="root")
    assert not path.exists()


def test_without_tenants_every_caller_is_the_operator(control: Control) -> None:
    with control.runs(tenants=False):
        transport = SocketTransport(control.socket)
        assert isinstance(transport.call(terms("a")), Accepted)
        assert {each.job for each in control.by("alice").jobs()} == {"a"}
        assert stat.S_IMODE(control.socket.stat().st_mode) == 0o600
        assert control.status("GET", "/metrics", None) == 200
