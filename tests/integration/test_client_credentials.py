"""A client with certificates and tokens: at a gateway that requires them, and past it at engines
behind their proxies."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.wire.gateway_status import GatewayEngine
from harvester.contracts.wire.rollouts import VersionPin
from harvester.platform.backoff import RetryLimits
from harvester.platform.bearer import TokenFile
from harvester.platform.tls import NO_CREDENTIALS, Credentials
from scheduler.client.rollout_client import AsyncRolloutClient
from scheduler.model import EngineKind
from tests.certificates import Authority, token_file
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, continued, gateway_on
from tests.integration.test_engine_proxy import CONTROL, DATA, proxied

BRIEF = RetryLimits(give_up_s=1.0, wait_max_s=0.05, progress_bytes=1)
SAMPLING = {"max_tokens": 3}


def write_tenant(path: Path, token: str) -> None:
    path.touch(mode=0o600)
    path.write_text(f"default: {token}\n")


async def test_a_client_trusts_an_authority_shows_its_certificate_and_renews_its_token(
    tmp_path: Path,
) -> None:
    authority, tenants = Authority(tmp_path), tmp_path / "tenants.yaml"
    own, sent = authority.signs("client"), token_file(tmp_path, "sent", "first-token-of-job")
    write_tenant(tenants, "first-token-of-job")
    tls = authority.server("gateway", client_ca=authority.file)
    files = {"token_file": sent, "ca_file": authority.file}
    pair = {"cert_file": own.cert_file, "key_file": str(own.key_file)}
    async with gateway_on(FakeEngine(step_s=0.001, epoch=None), tokens=tenants, tls=tls) as gateway:
        async with AsyncRolloutClient(gateway.url, "job", **files, **pair) as client:
            assert len((await client.generate(PROMPT, SAMPLING)).token_ids) == 3
            write_tenant(tenants, "second-token-of-job")
            sent.write_text("second-token-of-job\n")
            assert len((await client.generate(PROMPT, SAMPLING)).token_ids) == 3
            assert (await client.announce(1, "job.store")).version == 1
        async with AsyncRolloutClient(
            gateway.url, "job", **files, fallback=False, retries=BRIEF
        ) as stranger:
            with pytest.raises(Exhausted, match="gateway"):
                await stranger.generate(PROMPT, SAMPLING)


async def test_a_client_logs_why_the_gateway_names_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tenants, sent = tmp_path / "tenants.yaml", token_file(tmp_path, "sent", "first-token-of-job")
    write_tenant(tenants, "first-token-of-job")
    engine = FakeEngine(step_s=0.01, epoch=None)
    async with (
        gateway_on(engine, tokens=tenants) as gateway,
        AsyncRolloutClient(
            gateway.url, "job", token_file=sent, silence_s=0.2, retries=BRIEF
        ) as client,
    ):
        engine.running.clear()
        waiting = asyncio.create_task(client.generate(PROMPT, SAMPLING))
        await gateway.until(lambda: engine.open == 1)
        client._watch.engines.clear()
        sent.write_text("another-token-of-job\n")
        await gateway.until(lambda: "401" in caplog.text)
        assert "send Authorization" in caplog.text
        waiting.cancel()


def test_half_a_client_certificate_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both cert_file and key_file"):
        AsyncRolloutClient("https://127.0.0.1:1", "job", cert_file=tmp_path / "c.pem")


@pytest.fixture
def roles(tmp_path: Path) -> dict[str, Callable[[str], bool]]:
    return {
        "control": TokenFile(token_file(tmp_path, "control", CONTROL)).accepts,
        "data": TokenFile(token_file(tmp_path, "data", DATA)).accepts,
    }


@pytest.mark.parametrize("known", [True, False])
async def test_a_token_for_data_is_enough_at_engine_proxies_while_the_gateway_is_silent(
    tmp_path: Path, roles: dict[str, Callable[[str], bool]], known: bool
) -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    own = Credentials(token_file=token_file(tmp_path, "own", DATA)) if known else NO_CREDENTIALS
    silent = "http://127.0.0.1:1"
    async with (
        proxied(engine.app(), **roles) as (url, _),
        AsyncRolloutClient(silent, "job", silence_s=0.1, engines=own, retries=BRIEF) as client,
    ):
        client._watch._silence.silent = True
        client._watch.engines = {"e0": GatewayEngine(kind=EngineKind.DEDICATED, url=url)}
        turn = client.generate(PROMPT, SAMPLING)
        if known:
            assert list((await turn).token_ids) == continued(PROMPT, 3, version=0)
        else:
            with pytest.raises(Exhausted, match=r"e0: .*401"):
                await turn


async def test_a_pin_is_waited_for_once_and_no_longer_than_its_patience() -> None:
    async with (
        gateway_on(FakeEngine(step_s=0.001, epoch=None)) as gateway,
        AsyncRolloutClient(gateway.url, "job") as client,
        asyncio.timeout(30),
    ):
        pin = VersionPin(exact=5, wait_s=0.2)
        with pytest.raises(Exhausted, match="version 5 is served nowhere"):
            await client.generate(PROMPT, SAMPLING, weight_version=pin)
        assert (await gateway.status())["jobs"]["job"]["turns"]["started"] == 1
