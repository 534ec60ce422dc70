"""A job's client beside a gateway that is killed, stopped and started again: no token is lost."""

import asyncio
import gc
import inspect
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import scheduler
from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError, Stale
from harvester.contracts.wire.rollouts import Choice, FinishReason, VersionPin
from harvester.platform.backoff import RetryLimits
from harvester.platform.keep_alive import keep_alive
from scheduler import AsyncRolloutClient, RolloutClient
from scheduler.client import gateway_connection, rollout_client
from scheduler.client.gateway_watch import GatewayWatch
from scheduler.client.turn_attempts import TurnAttempts
from tests.integration.conftest import Served
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, Site, continued, gateway_on

SILENCE_S = 0.5
_TCP_REPAIR = 19
"""Linux: a socket in this mode is closed without a packet."""
QUICK = RetryLimits(first_wait_s=0.001, wait_max_s=0.002, attempts_max=5, progress_bytes=1)
Start = Callable[..., Served]


def client_of(
    gateway: Served, *, silence_s: float = SILENCE_S, **options: object
) -> AsyncRolloutClient:
    """Goes to an engine after half a second of silence, which a busy machine has without a fault:
    tests of what the gateway itself answers give `fallback=False` or another `silence_s`."""
    return AsyncRolloutClient(gateway.url, "job", silence_s=silence_s, **options)


def sampling(max_tokens: int) -> dict[str, object]:
    return {"max_tokens": max_tokens, "temperature": 0.0}


def assert_whole(choice: Choice, count: int, *, version: int = 0) -> None:
    assert choice.finish_reason is FinishReason.LENGTH, choice.fault
    assert list(choice.token_ids) == continued(PROMPT, count, version=version)
    assert [each.token_id for each in choice.logprobs.content] == list(choice.token_ids)
    assert (choice.spans[0].start, choice.spans[-1].end) == (0, count)
    assert all(left.end == right.start for left, right in pairwise(choice.spans))
    assert {span.version for span in choice.spans} == {version}
    assert all(span.engine in ("e0", "e1") for span in choice.spans)


async def until_tokens(choices: AsyncGenerator[Choice, None], count: int) -> list[int]:
    """Tokens of the stream's next choices, at least `count`."""
    found: list[int] = []
    while len(found) < count:
        found += (await anext(choices)).token_ids
    return found


async def turns_of(gateway: Served) -> int:
    return int((await gateway.get("/v1/status"))["jobs"]["job"]["turns"]["started"])


async def test_a_turn_is_served_and_a_version_announced(fake_engine: Start, gateway: Start) -> None:
    service = gateway(fake_engine(), fake_engine())
    async with client_of(service, fallback=False) as client:
        assert_whole(await client.generate(PROMPT, sampling(20), trajectory="t"), 20)
        switched = await client.announce(1, "job.store")
        assert (switched.version, set(switched.engines)) == (1, {"e0", "e1"})
        choice = await client.generate(PROMPT, sampling(20), weight_version=1)
        assert_whole(choice, 20, version=1)
        with pytest.raises(ConfigError, match="top_q"):
            await client.generate(PROMPT, {"max_tokens": 1, "top_q": 1})


async def test_a_version_of_another_run_is_refused_once_and_not_announced_again(
    fake_engine: Start, gateway: Start
) -> None:
    """Each try would end the turns that go on under a version that is published meanwhile."""
    service = gateway(fake_engine())
    async with client_of(service, fallback=False) as client:
        await client.announce(2, "job.store", state_hash="a" * 32)
        async with asyncio.timeout(30):
            with pytest.raises(PeerProtocolError, match="another one than engines hold"):
                await client.announce(2, "job.store", state_hash="b" * 32)
        await client.announce(3, "job.store", state_hash="c" * 32)
        assert_whole(await client.generate(PROMPT, sampling(5)), 5, version=3)


async def test_an_id_that_another_request_has_ends_the_call_at_once(
    fake_engine: Start, gateway: Start
) -> None:
    """No later try under that id could be answered."""
    service = gateway(fake_engine(step_s=0.02))
    async with (
        client_of(service, fallback=False) as client,
        client_of(service, fallback=False) as other,
        asyncio.timeout(30),
    ):
        await client.generate(PROMPT, sampling(2), request_id="answered")
        with pytest.raises(ConfigError, match="'answered' was answered with another body"):
            await client.generate([*PROMPT, 7], sampling(2), request_id="answered")
        choices = client.stream(PROMPT, sampling(500), request_id="open")
        await until_tokens(choices, 2)
        with pytest.raises(ConfigError, match="'open' is being served with another body"):
            await other.generate([*PROMPT, 7], sampling(2), request_id="open")
        assert_whole(await client.generate(PROMPT, sampling(2), request_id="answered"), 2)
        await choices.aclose()


async def test_a_call_that_the_gateway_refuses_as_wrong_is_the_callers_error(
    fake_engine: Start, gateway: Start
) -> None:
    service = gateway(fake_engine())
    async with client_of(service, fallback=False) as client:
        await client.generate(PROMPT, sampling(1))
        with pytest.raises(ConfigError, match="400: token_ids: ids lie between 0 and 255, not 300"):
            await client.generate([4, 300, 5], sampling(1))
        for version in (1, 2):
            await client.announce(version, "job.store")
        with pytest.raises(Stale, match="version 1 is served nowhere"):
            await client.generate(PROMPT, sampling(1), weight_version=1)
    async with AsyncRolloutClient(service.url, "nojob") as client:
        with pytest.raises(ConfigError, match="400: job nojob is not configured"):
            await client.announce(1, "job.store")


async def test_a_blocking_client_that_is_dropped_closes_by_itself(
    fake_engine: Start, gateway: Start, caplog: pytest.LogCaptureFixture
) -> None:
    service = gateway(fake_engine())
    gc.collect()  # Garbage of other tests writes its lines now.
    caplog.clear()

    def use() -> bool:
        RolloutClient(service.url, "job").generate(PROMPT, sampling(1))
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "rollout-client":
                thread.join(timeout=10.0)
                return not thread.is_alive()
        return True

    assert await asyncio.to_thread(use)
    gc.collect()
    assert not caplog.messages


@pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning")
async def test_a_client_that_is_dropped_in_an_event_loop_is_named_with_the_remedy(
    fake_engine: Start, gateway: Start, caplog: pytest.LogCaptureFixture
) -> None:
    service = gateway(fake_engine())
    client = client_of(service, fallback=False)
    await client.generate(PROMPT, sampling(1))
    await asyncio.sleep(0)  # The task that watched the gateway ends.
    gc.collect()
    caplog.clear()
    del client
    gc.collect()
    assert caplog.messages[0].startswith("a client of job job was dropped and not closed: use `asy")
    AsyncRolloutClient(service.url, "job")
    gc.collect()
    assert sum("dropped" in line for line in caplog.messages) == 1, "it had nothing to close"


async def test_an_announcement_that_no_engine_can_load_says_why_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is not there is the usual reason."""
    monkeypatch.setattr("scheduler.gateway.job_versions.SHOWN_S", 0.01)
    engine = FakeEngine(step_s=0.0, epoch=None)
    engine.stage_fault = "no store job.stroe"
    async with gateway_on(engine) as service:
        short = RetryLimits(first_wait_s=0.001, wait_max_s=0.002, attempts_max=2)
        async with AsyncRolloutClient(service.url, "job", retries=short) as client:
            announcing = asyncio.create_task(client.announce(1, "job.stroe"))
            async with asyncio.timeout(60):
                with pytest.raises(Exhausted, match=r"503: nothing was changed: .*job\.stroe"):
                    await announcing
    (line,) = [each for each in caplog.messages if "is tried again for at most 450 s" in each]
    assert "no engine can load version 1 of store job.stroe: no store job.stroe" in line


async def test_an_empty_name_aborts_no_turn(fake_engine: Start, gateway: Start) -> None:
    engine = fake_engine(holds_at=30)
    async with client_of(gateway(engine), fallback=False) as client:
        choices = client.stream(PROMPT, sampling(60))
        await until_tokens(choices, 2)
        client.abort("")
        await engine.post("/_fake", {"holds_at": 0})
        assert [choice async for choice in choices][-1].finish_reason is FinishReason.LENGTH


async def test_a_later_announcement_ends_the_earlier_one_which_is_not_sent_again(
    fake_engine: Start, gateway: Start
) -> None:
    """Sent again after it, the earlier one would end the job's turns as another run's."""
    engine = fake_engine(holds_at=30)
    service = gateway(engine)
    async with client_of(service, fallback=False) as client:
        await client.announce(1, "job.store", state_hash="1" * 32)
        pinned = asyncio.create_task(client.generate(PROMPT, sampling(60), weight_version=1))
        while not await turns_of(service):  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.02)
        calls = [
            asyncio.create_task(client.announce(2, "job.store", state_hash="2" * 32))
            for _ in range(2)
        ]
        await asyncio.sleep(0.2)
        assert not any(call.done() for call in calls), "the same version ends no call"
        # Both before the earlier ones have ended.
        calls += [
            asyncio.create_task(client.announce(each, "job.store", state_hash=f"{each}" * 32))
            for each in (3, 4)
        ]
        earlier = await asyncio.gather(*calls[:-1], return_exceptions=True)
        assert [type(each) for each in earlier] == [Stale] * 3
        await engine.post("/_fake", {"holds_at": 0})
        assert (await calls[-1]).version == 4
        assert_whole(await pinned, 60, version=1)
        assert_whole(await client.generate(PROMPT, sampling(5)), 5, version=4)


async def test_an_engine_whose_replies_show_no_update_takes_no_turn_without_the_gateway(
    fake_engine: Start, gateway: Start
) -> None:
    """The gateway may be alive and give it another version, which tokens would not show."""
    service = gateway(fake_engine(stock=True))
    brief = RetryLimits(give_up_s=4 * SILENCE_S, wait_max_s=0.1, progress_bytes=1)
    async with client_of(service, retries=brief) as client:
        assert_whole(await client.generate(PROMPT, sampling(5)), 5)
        service.kill()
        client._watch._silence.silent = True
        with pytest.raises(Exhausted, match="IdentityMiddleware"):
            await client.generate(PROMPT, sampling(5))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_gateway_that_dies_or_hangs_in_a_stream_loses_and_doubles_no_token(
    fake_engine: Start, gateway: Start, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    async def ask_the_gateway(*_: object) -> None:
        pytest.fail("the gateway is known to be silent")

    engines = fake_engine(holds_at=60), fake_engine(holds_at=60)
    service = gateway(*engines)
    async with client_of(service) as client:
        await client.announce(1, "job.store")
        beside = [
            asyncio.create_task(client.generate(PROMPT, sampling(120), trajectory=f"t{each}"))
            for each in range(6)
        ]
        async with aclosing(client.stream(PROMPT, sampling(120))) as choices:
            streamed = await until_tokens(choices, 59)
            os.kill(service.process.pid, number)
            for engine in engines:
                await engine.post("/_fake", {"holds_at": 0})
            async for choice in choices:
                streamed += choice.token_ids
        assert streamed == continued(PROMPT, 120, version=1)
        assert (choice.spans[0].start, choice.spans[-1].end) == (0, 120)
        assert choice.finish_reason is FinishReason.LENGTH
        for other in await asyncio.gather(*beside):
            assert_whole(other, 120, version=1)
        # No gateway, and no wait for one.
        with monkeypatch.context() as patch:
            patch.setattr(TurnAttempts, "_at_gateway", ask_the_gateway)
            assert_whole(await client.generate(PROMPT, sampling(5)), 5, version=1)
        if number == signal.SIGSTOP:
            os.kill(service.process.pid, signal.SIGCONT)
            async with asyncio.timeout(30):
                # Found to be back without a turn, and used from the next one on.
                while client._watch.silent:  # noqa: ASYNC110 - over HTTP
                    await asyncio.sleep(0.02)
            # From now on a busy machine is no silent gateway.
            client._watch._silence._limit_s = 60.0
            before = await turns_of(service)
            assert_whole(await client.generate(PROMPT, sampling(5)), 5, version=1)
            assert await turns_of(service) == before + 1


async def test_no_engine_serves_a_turn_that_it_must_not_while_the_gateway_is_silent(
    fake_engine: Start, gateway: Start
) -> None:
    """Neither another version than the pin's, nor sampling that would count output as prompt."""
    service = gateway(fake_engine(holds_at=60))
    brief = RetryLimits(give_up_s=4 * SILENCE_S, wait_max_s=0.1, progress_bytes=1)
    async with client_of(service, retries=brief, silence_s=60.0) as client:
        await client.announce(1, "job.store")
        counting = sampling(500) | {"frequency_penalty": 0.5}
        async with aclosing(client.stream(PROMPT, counting)) as choices:
            streamed = await until_tokens(choices, 10)
            service.kill()
            client._watch._silence.silent = True
            async for choice in choices:
                streamed += choice.token_ids
        assert choice.finish_reason is FinishReason.ABORT
        assert "does not go on from output" in choice.fault
        assert streamed == continued(PROMPT, len(streamed), version=1)
        with pytest.raises(Exhausted, match="e0 serves version 1"):
            await client.generate(PROMPT, sampling(5), weight_version=2)
        assert_whole(await client.generate(PROMPT, sampling(5), weight_version=1), 5, version=1)


async def test_a_gateway_that_is_restarted_at_once_gets_its_turns_back(
    fake_engine: Start, gateway: Start
) -> None:
    engine = fake_engine(holds_at=40)
    service = gateway(engine)
    async with (
        client_of(service) as client,
        aclosing(client.stream(PROMPT, sampling(80))) as choices,
    ):
        streamed = await until_tokens(choices, 20)
        service.kill()
        await engine.post("/_fake", {"holds_at": 0})
        again = gateway(engine, port=int(service.url.rsplit(":", 1)[1]))
        async for choice in choices:
            streamed += choice.token_ids
        assert streamed == continued(PROMPT, 80, version=0)
        async with asyncio.timeout(30):
            while not await turns_of(again):
                assert_whole(await client.generate(PROMPT, sampling(5)), 5)


@pytest.mark.parametrize("fallback", [True, False])
async def test_a_gateway_that_is_stopped_in_order_and_started_again_costs_no_token(
    fake_engine: Start, gateway: Start, fallback: bool
) -> None:
    engine = fake_engine(holds_at=100)
    service = gateway(engine)
    async with client_of(service, fallback=fallback, silence_s=30.0) as client:
        whole = asyncio.create_task(client.generate(PROMPT, sampling(200)))
        partial = asyncio.create_task(
            client.generate(PROMPT, sampling(200), on_interrupt="return_partial")
        )
        await service.until_sampled(2 * 99)
        assert service.kill(signal.SIGTERM) == 0
        await engine.post("/_fake", {"holds_at": 0})
        gateway(engine, port=int(service.url.rsplit(":", 1)[1]))
        assert_whole(await whole, 200)
        choice = await partial
        assert (choice.finish_reason, "shutdown" in choice.fault) == (FinishReason.ABORT, True)
        assert 0 < len(choice.token_ids) < 200


@pytest.mark.parametrize("fallback", [True, False])
async def test_a_turn_whose_connection_the_other_side_has_forgotten_is_joined_again(
    monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    """As after a gateway's machine was started anew, or a balancer dropped an idle connection: no
    packet says so, and the gateway answers its probes."""
    soon = partial(keep_alive, within_s=4.0)
    monkeypatch.setattr(gateway_connection, "keep_alive", soon)
    calls: list[web.Request] = []

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        calls.extend([request] if request.path.endswith("/generate") else [])
        return await handler(request)

    engine = FakeEngine(step_s=0.02, epoch=None)
    async with (
        gateway_on(engine, watch=lambda app: app.middlewares.append(note)) as gateway,
        AsyncRolloutClient(gateway.url, "job", fallback=fallback) as client,
        asyncio.timeout(30),
    ):
        turn = asyncio.create_task(client.generate(PROMPT, sampling(150)))
        await gateway.until_tokens(5)
        transport = calls[0].transport
        assert transport is not None
        try:
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
        except PermissionError:
            turn.cancel()
            pytest.skip("only an administrator of the network may drop a connection in silence")
        transport.abort()
        assert_whole(await turn, 150)
        assert len(calls) == 2


def test_a_step_may_have_more_turns_open_than_its_shell_allows_files(
    fake_engine: Start, gateway: Start
) -> None:
    """Turns without a descriptor were given up after a minute, and probes without one took all
    turns for those of a silent gateway."""
    service = gateway(fake_engine(step_s=0.1))
    few = """
        import asyncio, resource, sys
        from scheduler import AsyncRolloutClient
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))
        async def step():
            async with AsyncRolloutClient(sys.argv[1], "job", fallback=False) as client:
                turns = [client.generate([4, 5, 6], {"max_tokens": 10}) for _ in range(100)]
                print(len(await asyncio.gather(*turns)))
        asyncio.run(step())
    """
    run = [sys.executable, "-c", textwrap.dedent(few), service.url]
    done = subprocess.run(run, check=False, capture_output=True, text=True, timeout=120)
    assert (done.stdout, "Too many open files" in done.stderr) == ("100\n", False)


async def test_an_aborted_turn_returns_the_tokens_that_it_has(
    fake_engine: Start, gateway: Start
) -> None:
    service = gateway(fake_engine(holds_at=60))
    async with client_of(service, fallback=False) as client:
        choices = client.stream(PROMPT, sampling(500), request_id="long")
        streamed = await until_tokens(choices, 5)
        client.abort("long")
        async for choice in choices:
            streamed += choice.token_ids
        assert choice.finish_reason is FinishReason.ABORT
        assert streamed == continued(PROMPT, len(streamed), version=0)
        assert choice.spans[-1].end == len(streamed) < 500


async def test_an_aborted_turn_that_is_not_streamed_returns_its_tokens_too(
    fake_engine: Start, gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine(holds_at=60)
    service = gateway(engine)
    async with client_of(service, fallback=False) as client:
        turns = [
            asyncio.create_task(client.generate(PROMPT, sampling(500), request_id=name))
            for name in ("a", "b")
        ]
        await service.until_sampled(2 * 59)
        client.abort("a")
        choice = await turns[0]
        assert (choice.finish_reason, choice.fault) == (FinishReason.ABORT, "")
        tokens = list(choice.token_ids)
        assert tokens == continued(PROMPT, len(tokens), version=0)
        assert 0 < len(tokens) == choice.spans[-1].end < 500
        assert not turns[1].done()
        # A gateway that answers nothing holds up no abort.
        monkeypatch.setattr(rollout_client, "_ABORT_S", 0.3)
        os.kill(service.process.pid, signal.SIGSTOP)
        client.abort()
        async with asyncio.timeout(30):
            choice = await turns[1]
        os.kill(service.process.pid, signal.SIGCONT)
        assert (choice.finish_reason, choice.token_ids) == (FinishReason.ABORT, ())


@pytest.mark.parametrize(
    ("more", "partial", "of_job", "fault"),
    [
        ({"frequency_penalty": 0.5}, None, "continue", "counts output"),
        ({}, "return_partial", "continue", "interrupted"),
        ({}, None, "return_partial", "interrupted"),
    ],
)
async def test_a_turn_that_must_not_go_on_elsewhere_ends_where_a_restarted_gateway_begins_it_anew(
    fake_engine: Start,
    gateway: Start,
    more: dict[str, object],
    partial: str | None,
    of_job: str,
    fault: str,
) -> None:
    """Its sampling forbids it, without a fallback; its caller or its job does, with one."""
    engine, jobs = fake_engine(holds_at=60), [{"id": "job", "on_interrupt": of_job}]
    service = gateway(engine, jobs=jobs)
    async with client_of(service, fallback=not more, silence_s=30.0) as client:
        choices = client.stream(PROMPT, sampling(300) | more, on_interrupt=partial)
        streamed = await until_tokens(choices, 20)
        service.kill()
        # Its weights make other tokens by now.
        await engine.post("/_fake", {"version": 7})
        gateway(engine, jobs=jobs, port=int(service.url.rsplit(":", 1)[1]))
        async for choice in choices:
            streamed += choice.token_ids
    assert choice.finish_reason is FinishReason.ABORT
    assert fault in choice.fault
    assert streamed == continued(PROMPT, len(streamed), version=0)
    assert choice.immovable == tuple(more)


async def test_a_restarted_gateway_adds_no_tokens_of_other_numerics_to_a_turn_of_equal_ones(
    fake_engine: Start, gateway: Start
) -> None:
    """It begins the turn anew, and makes the same tokens as before: only their label differs."""
    engine, pin = fake_engine(holds_at=60), VersionPin(wait_s=0.0)
    service = gateway(engine)
    async with client_of(service, fallback=False) as client:
        choices = client.stream(PROMPT, sampling(200), equal_numerics=True, weight_version=pin)
        streamed = await until_tokens(choices, 10)
        service.kill()
        await engine.post("/_fake", {"release": "0.33.0+fake"})
        gateway(engine, port=int(service.url.rsplit(":", 1)[1]))
        async for choice in choices:
            streamed += choice.token_ids
    assert [span.numerics.split()[1] for span in choice.spans] == ["0.32.0+fake"]
    assert (choice.finish_reason, len(streamed) < 200) == (FinishReason.ABORT, True)
    assert "no engine has the numerics" in choice.fault


async def test_a_client_that_begins_while_the_gateway_is_away_uses_the_engines_that_it_is_given(
    fake_engine: Start,
) -> None:
    engine = fake_engine()
    given = {"silence_s": SILENCE_S, "retries": RetryLimits(give_up_s=10.0)}
    dedicated = {"e0": engine.url}
    async with AsyncRolloutClient("http://127.0.0.1:9", "job", dedicated=dedicated, **given) as one:
        assert_whole(await one.generate(PROMPT, sampling(5)), 5)
        numerics = "vllm 0.32.0+fake bfloat16 processed_logprobs"
        equal = await one.generate(PROMPT, sampling(5), equal_numerics=numerics)
        assert_whole(equal, 5)
    brief = given | {"retries": QUICK}
    async with AsyncRolloutClient("http://127.0.0.1:9", "job", dedicated=dedicated, **brief) as one:
        one._watch._silence.silent = True
        with pytest.raises(Exhausted, match="has the numerics"):
            await one.generate(PROMPT, sampling(5), equal_numerics="other")


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize(("wait_s", "silence_s"), [(1.0, 0.2), (0.0, 1.0)])
async def test_the_wait_of_a_pin_bounds_a_turn_without_a_gateway_and_silence_is_its_least(
    fallback: bool, wait_s: float, silence_s: float
) -> None:
    away = AsyncRolloutClient("http://127.0.0.1:9", "job", silence_s=silence_s, fallback=fallback)
    began_s = asyncio.get_running_loop().time()
    async with away as client, asyncio.timeout(30):
        with pytest.raises(Exhausted, match="gave up after"):
            await client.generate(
                PROMPT, sampling(5), weight_version=VersionPin(exact=1, wait_s=wait_s)
            )
    assert asyncio.get_running_loop().time() - began_s >= 1.0


async def test_a_wrong_address_is_in_the_log_long_before_the_client_gives_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = AsyncRolloutClient("http://127.0.0.1:9", "job", silence_s=0.1, retries=QUICK)
    async with away as client:
        with pytest.raises(Exhausted, match="Cannot connect"):
            await client.generate(PROMPT, sampling(5))
        told = [each.message for each in caplog.records if "is tried again" in each.message]
        assert "Cannot connect to host 127.0.0.1:9" in told[0]
        for _ in range(12):
            with pytest.raises(Exhausted):
                await client.generate(PROMPT, sampling(5))
    assert sum("is tried again" in each.message for each in caplog.records) <= 7


async def test_a_gateway_that_takes_connections_and_gives_no_answer_is_in_the_log_by_its_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a fallback its turns wait for a minute before they are requested again."""

    async def hang(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    app, site = web.Application(), Site()
    app.router.add_route("*", "/{path:.*}", hang)
    await site.serve(app)
    url = site.url

    def told() -> list[str]:
        return [each.message for each in caplog.records if url in each.message]

    async with AsyncRolloutClient(url, "job", silence_s=0.1, fallback=False) as client:
        turns = [asyncio.create_task(client.generate(PROMPT, sampling(5))) for _ in range(3)]
        async with asyncio.timeout(30):
            while not told():  # noqa: ASYNC110 - of a log
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
    await site.close()
    (line,) = told()
    assert "has not answered for" in line


async def test_a_pin_without_patience_still_takes_the_engine_that_meets_it(
    fake_engine: Start,
) -> None:
    dedicated, pin = {"e0": fake_engine().url}, VersionPin(exact=0, wait_s=0.0)
    away = AsyncRolloutClient("http://127.0.0.1:9", "job", dedicated=dedicated, silence_s=SILENCE_S)
    async with away as client:
        assert_whole(await client.generate(PROMPT, sampling(5), weight_version=pin), 5)


async def test_a_pin_without_patience_asks_the_engines_before_it_gives_up(
    fake_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway's silence may end its patience before a probe has found it silent."""
    dedicated, pin = {"e0": fake_engine().url}, VersionPin(exact=0, wait_s=0.0)
    away = AsyncRolloutClient("http://127.0.0.1:9", "job", dedicated=dedicated, silence_s=SILENCE_S)
    async with away as client:
        monkeypatch.setattr(GatewayWatch, "unanswered_s", SILENCE_S)
        assert_whole(await client.generate(PROMPT, sampling(5), weight_version=pin), 5)


async def test_an_option_that_does_not_exist_is_refused_as_a_misspelt_pin_is_none(
    fake_engine: Start, gateway: Start
) -> None:
    async with client_of(gateway(fake_engine()), fallback=False) as client:
        with pytest.raises(TypeError, match="weight_verison"):
            await client.generate(PROMPT, sampling(2), weight_verison=9)  # type: ignore[call-arg]


async def test_a_trajectory_that_has_ended_ends_its_open_turns(
    fake_engine: Start, gateway: Start
) -> None:
    service = gateway(fake_engine(step_s=0.01))
    async with client_of(service, fallback=False) as client:
        choices = client.stream(PROMPT, sampling(500), trajectory="t")
        await until_tokens(choices, 2)
        assert await client.end_trajectory("t") == 1
        last = [choice async for choice in choices][-1]
        assert (last.finish_reason, last.fault) == (FinishReason.ABORT, "")
        assert await client.end_trajectory("t") == 0


async def test_without_a_fallback_a_turn_waits_for_the_gateway_and_gives_up(
    fake_engine: Start, gateway: Start
) -> None:
    service = gateway(fake_engine())
    async with client_of(service, fallback=False, retries=QUICK) as client:
        assert_whole(await client.generate(PROMPT, sampling(5)), 5)
        service.kill()
        with pytest.raises(Exhausted, match="gave up"):
            await client.generate(PROMPT, sampling(5))


def test_code_without_an_event_loop_has_the_same_client(fake_engine: Start, gateway: Start) -> None:
    service = gateway(fake_engine())
    with RolloutClient(service.url, "job") as client:
        assert client.announce(1, "job.store").version == 1
        assert_whole(client.generate(PROMPT, sampling(9)), 9, version=1)
        streamed = [
            token for choice in client.stream(PROMPT, sampling(9)) for token in choice.token_ids
        ]
        assert streamed == continued(PROMPT, 9, version=1)


def test_the_example_of_a_turn_runs(fake_engine: Start, gateway: Start) -> None:
    service = gateway(fake_engine())
    script = Path(__file__).parents[2] / "examples/rollout.py"
    options = ("--gateway", service.url, "--job", "job", "--tokens", "4,5,6", "--max-tokens", "3")
    printed = subprocess.check_output([sys.executable, script, *options], text=True, timeout=60)
    shown = f"3 tokens, length: {continued(PROMPT, 3, version=0)}"
    assert printed.startswith(shown)
    assert "tokens 0 to 3: version 0, e0 " in printed


def test_the_example_of_the_package_runs(fake_engine: Start, gateway: Start) -> None:
    service = gateway(fake_engine(), jobs=[{"id": "math-7b"}])
    with RolloutClient(service.url, "math-7b") as client:
        client.announce(3, "math-7b")
    page = inspect.cleandoc(scheduler.__doc__ or "").partition("`AsyncRolloutClient`")[0]
    code = textwrap.dedent("\n".join(page.splitlines()[1:]))
    names: dict[str, object] = {}
    example = code.replace("http://127.0.0.1:8300", service.url)
    exec(compile(example, "scheduler/__init__.py", "exec"), names)
    turn = names["turn"]
    assert isinstance(turn, Choice)
    assert (len(turn.token_ids), {span.version for span in turn.spans}) == (64, {3})
