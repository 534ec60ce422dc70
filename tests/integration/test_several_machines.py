"""One gateway, engines on other machines: each machine is a network namespace on one switch."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harvester.platform.bearer import is_sent
from harvester.platform.http_kit import listen, serving, token_required
from harvester.platform.peer import Peer
from harvester.platform.tls import Credentials
from tests.certificates import Authority, token_file
from tests.integration.conftest import HERE, FakeAgent, Served
from tests.integration.forked_program import begin_forked
from tests.integration.gateway_in_process import PROMPT, continued
from tests.machines import Machine, machines

ENGINE, DATA, TENANT, AGENT, WRONG = (letter * 20 for letter in "edtaw")
CONTEXT_TOKENS = 1024
Start = Callable[..., Served]


class Site:
    """Machines `gateway`, `east`, `west` and `trainer`, and the files that they share."""

    def __init__(self, made: list[Machine], folder: Path) -> None:
        self.gateway, self.east, self.west, self.trainer = made
        self.folder = folder
        self.authority = Authority(folder)
        self.started: list[Served] = []
        self.engine_credentials = {"token_file": self.token(ENGINE), "ca_file": self.ca}
        self.tenants = token_file(folder, "tenants", f"tenant: {TENANT}")

    @property
    def ca(self) -> str:
        return str(self.authority.file)

    def token(self, token: str) -> str:
        return str(token_file(self.folder, token[0], token))

    def serve(self, machine: Machine, *arguments: str) -> Served:
        with machine.entered():
            self.started.append(Served(*arguments))
        return self.started[-1]

    def engine(self, machine: Machine, *arguments: str) -> Served:
        """On the machine's loopback."""
        return self.serve(machine, str(HERE / "fake_engine.py"), *arguments)

    def proxy(self, machine: Machine, engine: str, *, client_ca: Path | None = None) -> str:
        """URL, for other machines, of a proxy of the engine: by tokens, or by certificates."""
        made = self.authority.signs(machine.namespace, machine.address)
        options = {
            "--engine": engine,
            "--host": machine.address,
            "--port": "0",
            "--cert": str(made.cert_file),
            "--key": str(made.key_file),
        }
        if client_ca is None:
            options |= {"--token-file": self.token(ENGINE), "--data-token-file": self.token(DATA)}
        else:
            options["--client-ca"] = str(client_ca)
        words = [word for option in options.items() for word in option]
        command = ("-m", "harvester.cli", "engine-proxy")
        return self.serve(machine, *command, *words).url

    def gateway_on(self, gateway: Start, urls: dict[str, str], **settings: Any) -> str:
        """URL of the gateway process, which listens to other machines by TLS."""
        made = self.authority.signs("gateway", self.gateway.address)
        given = {
            "host": self.gateway.address,
            "tls": {"cert_file": str(made.cert_file), "key_file": str(made.key_file)},
            "token_file": str(self.tenants),
            "jobs": [{"id": "job", "tenant": "tenant"}],
            "engines": [
                {"id": name, "url": url, **self.engine_credentials} for name, url in urls.items()
            ],
        }
        with self.gateway.entered():
            return gateway(**given | settings).url

    @asynccontextmanager
    async def client(
        self, url: str, *, token: str = TENANT, at: Machine | None = None, ca: Path | None = None
    ) -> AsyncIterator[Peer]:
        """The trainer's, or another machine's."""
        file = Path(self.token(token))
        credentials = Credentials(token_file=file, ca_file=ca or self.authority.file)
        with (at or self.trainer).entered():
            async with aiohttp.ClientSession() as session:
                yield Peer(session, url, credentials)


@pytest.fixture(autouse=True)
async def _closing() -> AsyncIterator[None]:
    """Connections by TLS close after their session, in the event loop's next turns: a socket that
    is left would be the fault of a later test."""
    yield
    await asyncio.sleep(0.25)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with machines("g", "e", "w", "t") as made:
        site = Site(made, tmp_path)
        try:
            yield site
        finally:
            for each in site.started:
                each.kill()


async def answer(peer: Peer, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with peer.request(method, path, json=body) as reply:
        raw = await reply.read()
        return reply.status, json.loads(raw) if raw else None


def turn(name: str, max_tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "seed": 1}
    return {"request_id": name, "token_ids": PROMPT, "sampling_params": sampling}


async def generate(peer: Peer, name: str, max_tokens: int) -> Any:
    status, reply = await answer(peer, "POST", "/inference/v1/generate", turn(name, max_tokens))
    assert status == 200, reply
    return reply["choices"][0]


async def until(peer: Peer, holds: Callable[[Any], bool], *, within_s: float = 15) -> Any:
    """Status of the gateway, once it fits."""
    status = None
    try:
        async with asyncio.timeout(within_s):
            while not holds(  # noqa: ASYNC110 - over HTTP
                status := (await answer(peer, "GET", "/v1/status"))[1]
            ):
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"the status never became so: {status}")
    return status


def all_up(status: Any) -> bool:
    return all(engine["state"] == "serving" for engine in status["engines"].values())


async def test_turns_and_versions_pass_by_tls_and_tokens(site: Site, gateway: Start) -> None:
    urls = {
        machine.namespace: site.proxy(machine, site.engine(machine).url)
        for machine in (site.east, site.west)
    }
    service = site.gateway_on(gateway, urls)
    assert service.startswith(f"https://{site.gateway.address}:")
    async with site.client(service) as peer:
        await until(peer, all_up)
        turns = await asyncio.gather(*(generate(peer, f"a{n}", 30) for n in range(12)))
        assert all(t["token_ids"] == continued(PROMPT, 30, version=0) for t in turns)
        assert {span["engine"] for t in turns for span in t["spans"]} == urls.keys()
        published = {"version": 1, "store": "job.store"}
        assert (await answer(peer, "POST", "/v1/jobs/job/versions", published))[0] == 200
        assert (await generate(peer, "b", 30))["token_ids"] == continued(PROMPT, 30, version=1)


async def test_no_other_machine_reaches_an_engine_past_its_proxy(
    site: Site, gateway: Start
) -> None:
    engine = site.engine(site.east)
    url = site.proxy(site.east, engine.url)
    service = site.gateway_on(gateway, {"east": url})
    port = engine.url.rpartition(":")[2]
    with site.trainer.entered():
        async with aiohttp.ClientSession() as session:
            for clear in (f"http://{site.east.address}:{port}", url.replace("https", "http")):
                with pytest.raises(aiohttp.ClientError):
                    await session.get(clear + "/health")
    for server in (url, service):
        async with site.client(server, token=WRONG) as peer:
            for path in ("/metrics", "/v1/models"):
                assert (await answer(peer, "GET", path))[0] == 401
    async with site.client(url, token=DATA) as peer:
        assert (await answer(peer, "GET", "/rosemux/engine"))[0] == 200
        assert (await answer(peer, "POST", "/pause", {}))[0] == 403
        stage = {"method": "rosemux_stage"}
        assert (await answer(peer, "POST", "/collective_rpc", stage))[0] == 403
    async with site.client(url, token=ENGINE) as peer:
        for path in ("/sleep", "/_fake", "/server_info", "/docs"):
            assert (await answer(peer, "POST", path, {}))[0] == 404
        call = {"method": "reload_weights"}
        assert (await answer(peer, "POST", "/collective_rpc", call))[0] == 400
    folder = site.folder / "foreign"
    folder.mkdir()
    foreign = Authority(folder, "foreign")
    with site.trainer.entered():
        async with aiohttp.ClientSession() as session:
            for server in (url, service):
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await Peer(session, server, Credentials(ca_file=foreign.file)).get("/health")


async def test_certificates_of_clients_stand_for_tokens(site: Site, gateway: Start) -> None:
    clients = Authority(site.folder, "clients")
    shown = clients.signs("client")
    pair = {"cert_file": str(shown.cert_file), "key_file": str(shown.key_file)}
    url = site.proxy(site.east, site.engine(site.east).url, client_ca=clients.file)
    engine = {"id": "east", "url": url, "ca_file": site.ca, **pair}
    made = site.authority.signs("gateway", site.gateway.address)
    tls = {"cert_file": str(made.cert_file), "key_file": str(made.key_file)}
    service = site.gateway_on(
        gateway, {}, engines=[engine], tls=tls | {"client_ca_file": str(clients.file)},
        token_file=None,
    )  # fmt: skip
    ours = Credentials(
        ca_file=site.authority.file, cert_file=shown.cert_file, key_file=shown.key_file
    )
    with site.trainer.entered():
        async with aiohttp.ClientSession() as session:
            peer = Peer(session, service, ours)
            await until(peer, all_up)
            assert (await generate(peer, "m", 9))["token_ids"] == continued(PROMPT, 9, version=0)
            published = {"version": 1, "store": "job.store"}
            assert (await answer(peer, "POST", "/v1/jobs/job/versions", published))[0] == 200
            for server in (url, service):
                with pytest.raises(aiohttp.ClientError):
                    await answer(Peer(session, server, site.authority.trusted()), "GET", "/metrics")


async def test_a_wrong_token_or_authority_keeps_an_engine_out_and_is_reported(
    site: Site, gateway: Start
) -> None:
    folder = site.folder / "foreign"
    folder.mkdir()
    foreign = str(Authority(folder).file)
    wrong = token_file(site.folder, "rotated", WRONG)
    east, west = (site.proxy(each, site.engine(each).url) for each in (site.east, site.west))
    service = site.gateway_on(
        gateway,
        {},
        engines=[
            {"id": "token", "url": east, "token_file": str(wrong), "ca_file": site.ca},
            {"id": "ca", "url": west, "token_file": site.token(ENGINE), "ca_file": foreign},
        ],
    )
    async with site.client(service) as peer:
        status = await until(peer, lambda s: all(e["fault"] for e in s["engines"].values()))
        faults = {name: engine["fault"] for name, engine in status["engines"].items()}
        assert "401" in faults["token"]
        assert "token_file" in faults["token"]
        assert "certificate" in faults["ca"].lower()
        # A token is put right without a restart.
        wrong.write_text(ENGINE)
        await until(peer, lambda s: s["engines"]["token"]["state"] == "serving")


async def test_a_machine_that_is_cut_off_loses_its_turn_to_another_exactly(
    site: Site, gateway: Start
) -> None:
    east, west = (site.engine(machine, "--step-s", "0.02") for machine in (site.east, site.west))
    urls = {"east": site.proxy(site.east, east.url), "west": site.proxy(site.west, west.url)}
    service = site.gateway_on(gateway, urls, timeouts={"stall_s": 0.5})
    async with site.client(service) as peer:
        await until(peer, all_up)
        # At its own pace the engine would go on for half a minute.
        asked = turn("long", 1500) | {"stream": True}
        async with peer.post("/inference/v1/generate", json=asked) as reply:
            raw = await reply.content.readline()
            status = (await answer(peer, "GET", "/v1/status"))[1]
            (busy,) = (name for name, each in status["engines"].items() if each["open_turns"])
            lost, other = (site.east, east), (site.west, west)
            if busy == "west":
                lost, other = other, lost
            with other[0].entered():
                await other[1].post("/_fake", {"step_s": 0.0})
            machine, engine = lost
            machine.plug(connected=False)
            raw += await reply.read()
        events = (line[6:] for line in raw.splitlines() if line.startswith(b"data: {"))
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        tokens = [token for choice in choices for token in choice["token_ids"]]
        assert tokens == continued(PROMPT, 1500, version=0)
        served = [span["engine"] for choice in choices for span in choice["spans"]]
        assert (served[0], {*served}) == (busy, {"east", "west"})
        # Its proxy finds out by itself and has the engine abort the turn.
        with machine.entered():
            await engine.until("/_fake", lambda fake: fake["aborted"] == 1, within_s=20)
        machine.plug(connected=True)
        await until(peer, all_up)
        assert (await generate(peer, "after", 20))["token_ids"] == continued(PROMPT, 20, version=0)


@contextmanager
def real_engines(root: Path, *at: Machine) -> Iterator[dict[str, str]]:
    """URLs of a dedicated vLLM on each machine's loopback; their store is `root`/weights/job, its
    version 1 the model `root`/model."""
    # They import torch, and vLLM's capabilities.
    from benchmarks.migration.model import ENGINE_ARGUMENTS, publish_model, write_model
    from benchmarks.testbed.processes import Processes
    from coserve.vllm import launch
    from coserve.vllm.capabilities import capabilities, installed_vllm_version
    from tests.integration.engine_slot import wait_for

    write_model(root / "model", texts=["one two"], context_tokens=CONTEXT_TOKENS, seed=3)
    publish_model(root / "model", root / "weights" / "job")
    urls = {}
    with Processes(root / "logs", begin=begin_forked) as processes:
        children = {}
        for machine in at:
            spec = launch.EngineSpec(
                name=machine.namespace,
                model=root / "model",
                port=8002,
                max_model_len=CONTEXT_TOKENS,
                max_num_seqs=4,
                vllm=capabilities(installed_vllm_version()),
                extra_arguments=(*ENGINE_ARGUMENTS, "--served-model-name", "job"),
            )
            command = launch.dedicated(spec, weights=root / "weights")
            with machine.entered():
                children[machine] = processes.start(
                    machine.namespace, command.arguments, environment=command.environment
                )
        for machine, child in children.items():
            urls[machine.namespace] = f"http://127.0.0.1:{spec.port}"
            with machine.entered():
                wait_for(urls[machine.namespace], child)
        yield urls


@pytest.mark.engine
@pytest.mark.timeout(400)
async def test_vllm_on_the_machine_that_is_left_goes_on_with_the_same_tokens(
    site: Site, gateway: Start
) -> None:
    pytest.importorskip("vllm")
    machines_of = {machine.namespace: machine for machine in (site.east, site.west)}
    with real_engines(site.folder, *machines_of.values()) as engines:
        urls = {name: site.proxy(machines_of[name], url) for name, url in engines.items()}
        service = site.gateway_on(gateway, urls, timeouts={"stall_s": 2.0})
        async with site.client(service) as peer:
            await until(peer, all_up)
            published = {"version": 1, "store": "job"}
            assert (await answer(peer, "POST", "/v1/jobs/job/versions", published))[0] == 200
            greedy = {"max_tokens": 900, "temperature": 0.0, "ignore_eos": True}
            asked = {"token_ids": PROMPT, "sampling_params": greedy | {"frequency_penalty": 0.2}}
            status, calm = await answer(peer, "POST", "/inference/v1/generate", asked)
            assert status == 200, calm
            async with peer.post("/inference/v1/generate", json=asked | {"stream": True}) as reply:
                raw = await reply.content.readline()
                state = (await answer(peer, "GET", "/v1/status"))[1]
                (busy,) = (name for name, each in state["engines"].items() if each["open_turns"])
                machines_of[busy].plug(connected=False)
                raw += await reply.read()
            events = (line[6:] for line in raw.splitlines() if line.startswith(b"data: {"))
            choices = [choice for event in events for choice in json.loads(event)["choices"]]
            tokens = [token for choice in choices for token in choice["token_ids"]]
            assert tokens == calm["choices"][0]["token_ids"]
            spans = [span for choice in choices for span in choice["spans"]]
            assert {span["engine"] for span in spans} == urls.keys()
            assert {span["version"] for span in spans} == {1}
            # It comes back with the weights that it had.
            machines_of[busy].plug(connected=True)
            await until(peer, all_up, within_s=60)
            state = (await answer(peer, "GET", "/v1/status"))[1]
            assert {each["version"] for each in state["engines"].values()} == {1}


async def test_a_slow_machine_serves_as_fast_as_its_link_and_loses_nothing(
    site: Site, gateway: Start
) -> None:
    urls = {
        machine.namespace: site.proxy(machine, site.engine(machine).url)
        for machine in (site.east, site.west)
    }
    service = site.gateway_on(gateway, urls)
    try:
        site.east.slow(kbit=400)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel cannot slow a link: {error.stderr.strip()}")
    async with site.client(service) as peer:
        await until(peer, all_up)
        turns = await asyncio.gather(*(generate(peer, f"s{n}", 40) for n in range(8)))
        assert all(t["token_ids"] == continued(PROMPT, 40, version=0) for t in turns)
        assert {span["engine"] for t in turns for span in t["spans"]} == urls.keys()


async def test_a_guest_on_another_machine_is_leased_and_serves(
    site: Site, gateway: Start, fake_agent: FakeAgent
) -> None:
    guest = site.engine(site.west, "--epoch", "1")
    fake_agent.engine_url = site.proxy(site.west, guest.url)
    app = fake_agent.app()
    app.middlewares.append(token_required(partial(is_sent, AGENT.encode()), of="agent"))
    tls = site.authority.server("agent", site.west.address)
    async with serving(app) as runner:
        with site.west.entered():
            at_agent = await listen(runner, site.west.address, 0, remedy="", tls=tls)
        agent = {
            "id": "west",
            "url": at_agent,
            "token_file": site.token(AGENT),
            "ca_file": site.ca,
            "guests": site.engine_credentials,
        }
        service = site.gateway_on(gateway, {}, engines=[], agents=[agent])
        async with site.client(service) as peer:
            choice = await generate(peer, "g", 30)
            assert choice["token_ids"] == continued(PROMPT, 30, version=0)
            assert {span["engine"] for span in choice["spans"]} == {"guest.slot"}
