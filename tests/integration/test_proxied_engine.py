"""A real guest behind its proxy: turns, weight switches and aborts by TLS and a token."""

from contextlib import aclosing, closing
from pathlib import Path

import aiohttp
import pytest

from harvester.contracts.ids import Epoch, WeightVersion
from harvester.contracts.page import GrantMode
from harvester.platform.tls import Credentials
from scheduler.gateway.engines.engine_client import EngineClient
from scheduler.gateway.engines.engine_faults import EngineLost
from scheduler.gateway.engines.identity import Change, HeldWeights
from tests.certificates import Authority, token_file
from tests.contract.scheduler.test_engine_contract import attempt
from tests.integration.conftest import Served
from tests.integration.engine_slot import EngineSlot
from tests.integration.test_guest_weights import first_state, held, next_state

pytestmark = pytest.mark.engine

STORE = "proxied"


async def tokens(client: EngineClient, slot: EngineSlot, name: str) -> list[int]:
    asked = attempt(12, temperature=0.0, ignore_eos=True)
    choices = client.generate(asked, request_id=name, epoch=Epoch(slot.agent.epoch))
    return [token async for choice in choices for token in choice.token_ids or []]


async def test_versions_turns_and_aborts_pass_the_proxy(
    engine_slot: EngineSlot, tmp_path: Path
) -> None:
    from weightsync.publisher import Publisher

    slot, authority = engine_slot, Authority(tmp_path)
    slot.agent.raise_epoch()
    slot.agent.say(GrantMode.UNGATED)
    made, token = authority.signs("proxy"), token_file(tmp_path, "token", "t" * 20)
    files = ("--cert", str(made.cert_file), "--key", str(made.key_file), "--token-file", str(token))
    command = ("-m", "harvester.cli", "engine-proxy", "--port", "0", "--engine", slot.guest_url)
    proxy = Served(*command, *files)
    try:
        async with aiohttp.ClientSession() as session:
            credentials = Credentials(token_file=token, ca_file=authority.file)
            client = EngineClient(session, proxy.url, connect_s=10.0, credentials=credentials)
            stranger = EngineClient(
                session, proxy.url, connect_s=10.0, credentials=Credentials(ca_file=authority.file)
            )
            assert await client.became() is Change.NONE
            state, made_tokens = first_state(), []
            with Publisher(Path(slot.weights) / STORE) as publisher:
                for number in (1, 2):
                    publisher.publish(state)
                    version = WeightVersion(number)
                    staged = await client.stage(store=STORE, version=version, timeout_s=60.0)
                    assert staged.ready
                    await client.switch(HeldWeights(STORE, version), timeout_s=120.0)
                    _, report = await held(session, slot)
                    assert (report["store"], report["version"]) == (STORE, number)
                    made_tokens.append(await tokens(client, slot, f"p{number}"))
                    state = next_state(state)
            with closing(EngineClient(session, slot.guest_url, connect_s=10.0)) as direct:
                assert await tokens(direct, slot, "d") == made_tokens[1]
            with pytest.raises(EngineLost, match="401"):
                await stranger.switch(HeldWeights(STORE, 1), timeout_s=10.0)
            long = client.generate(
                attempt(400, ignore_eos=True), request_id="l", epoch=Epoch(slot.agent.epoch)
            )
            async with aclosing(long) as choices:
                await anext(choices)
                await slot.guest_becomes(lambda guest: guest.running == 1, "the turn runs")
            client.close()
            await slot.guest_becomes(lambda guest: guest.running == 0, "the turn is aborted")
    finally:
        proxy.kill()
