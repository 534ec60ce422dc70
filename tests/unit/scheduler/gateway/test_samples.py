"""The turns of one request, followed together: order, seeds, refusals, and what is left behind."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams, TokenLogprob
from harvester.platform.tenant_shares import Pressure
from scheduler.gateway.job_turns import TurnRefused
from scheduler.gateway.policy.routing_events import Refusal, RefuseTurn
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.samples import follow, samples_of

JOB = JobId("job")


def request(n: int = 1, *, seed: int | None = None, max_tokens: int = 3) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, seed=seed)
    return GenerateRequest(request_id="r", token_ids=(7, 8), sampling_params=sampling)


class Server:
    """Makes tokens in steps that the test allows; refuses the turns that it is told to."""

    def __init__(self, *, refused: str = "") -> None:
        self.ledger = TurnLedger(JOB)
        self.step = asyncio.Semaphore(0)
        self.refused = refused
        self.room = 16
        self.cancelled: list[str] = []

    @contextmanager
    def admitting(self, requests: Sequence[GenerateRequest]) -> Iterator[None]:
        if len(requests) > self.room:
            raise Pressure(f"{len(requests)} turns")
        yield

    async def serve(
        self,
        request: GenerateRequest,
        *,
        trajectory: TrajectoryId,
        on_turn: Any = None,
        part_of: Any = None,
    ) -> tuple[Turn, RefuseTurn | None]:
        turn = self.ledger.open(request, trajectory=trajectory)
        assert turn is not None
        told = on_turn(turn)
        if request.request_id == self.refused:
            turn.refuse()
            return turn, RefuseTurn(turn=turn.key, refusal=Refusal.FULL, reason="full")
        attempt = turn.begin(engine=EngineId("e"), version=WeightVersion(0), numerics="n")
        try:
            for token in range(request.sampling_params.max_tokens):
                await self.step.acquire()
                turn.accept(attempt, [token], [TokenLogprob(token, -1.0)])
                told()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        turn.finish(attempt, "length")
        return turn, None


def test_each_sample_is_a_turn_with_a_seed_of_its_own() -> None:
    turns = samples_of(request(3, seed=5))
    assert [turn.request_id for turn in turns] == ["r.0", "r.1", "r.2"]
    assert [turn.sampling_params.seed for turn in turns] == [5, 6, 7]
    assert {turn.sampling_params.n for turn in turns} == {1}
    assert samples_of(request(1)) == [request(1)]


async def test_chunks_carry_every_token_of_every_choice_once_and_each_end_once() -> None:
    server = Server()
    async with follow(server, TrajectoryId("t"), samples_of(request(3))) as samples:
        for _ in range(9):
            server.step.release()
        made: dict[int, list[int]] = {0: [], 1: [], 2: []}
        ends: list[int] = []
        async for choice in samples.chunks():
            made[choice.index] += choice.token_ids
            ends += [choice.index] * (choice.finish_reason is not None)
    assert made == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]}
    assert sorted(ends) == [0, 1, 2]


async def test_usage_counts_a_prompt_once_however_many_samples_it_has() -> None:
    server = Server()
    async with follow(server, TrajectoryId("t"), samples_of(request(3))) as samples:
        for _ in range(9):
            server.step.release()
        await samples.results()
        usage = samples.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 9, 11)


async def test_one_refused_sample_refuses_the_request_and_ends_its_neighbours() -> None:
    server = Server(refused="r.1")
    with pytest.raises(TurnRefused, match="full") as refused:
        async with follow(server, TrajectoryId("t"), samples_of(request(3))) as samples:
            await samples.results()
    assert refused.value.status == 429
    assert sorted(server.cancelled) == ["r.0", "r.2"]


async def test_a_client_that_leaves_takes_all_of_its_turns_with_it() -> None:
    server = Server()

    async def client() -> None:
        async with follow(server, TrajectoryId("t"), samples_of(request(4))) as samples:
            async for _ in samples.chunks():
                pass

    task = asyncio.create_task(client())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(server.cancelled) == 4


async def test_versions_of_one_choice_are_its_own() -> None:
    """A stream tells them at each choice's end, so that they may not cost all choices' tokens."""
    server = Server()
    async with follow(server, TrajectoryId("t"), samples_of(request(n=2))) as samples:
        for _ in range(6):
            server.step.release()
        first, second = await samples.results()
        assert (first.ended, second.ended) == (True, True)
        told = {"weight_version_start": 0, "weight_version_end": 0}
        assert samples.versions(0) == samples.versions(1) == samples.versions() == told


@pytest.mark.parametrize("again", [False, True], ids=["left", "left twice"])
async def test_many_turns_are_begun_and_left_in_parts_between_which_others_run(again) -> None:
    server, parts = Server(), 700
    server.room = parts
    begun: list[int] = []

    async def client() -> None:
        asked = samples_of(request(parts))
        async with follow(server, TrajectoryId("t"), asked) as samples:
            await samples.results()

    task = asyncio.create_task(client())
    for _ in range(parts // 16 + 3):
        await asyncio.sleep(0)
        begun.append(server.ledger.counters.started)
    steps = [after - before for before, after in pairwise([0, *begun])]
    assert (begun[-1], max(steps) <= 16) == (parts, True)
    task.cancel()
    left = [0]
    for _ in range(4 * parts // 16):
        await asyncio.sleep(0)
        if again:
            task.cancel()
        left.append(len(server.cancelled))
    await asyncio.gather(task, return_exceptions=True)
    assert len(server.cancelled) == parts
    assert again or max(after - before for before, after in pairwise(left)) <= 16


async def test_a_client_that_leaves_while_its_turns_are_begun_leaves_none() -> None:
    server, parts = Server(), 700
    server.room = parts

    async def client() -> None:
        asked = samples_of(request(parts))
        async with follow(server, TrajectoryId("t"), asked) as samples:
            await samples.results()

    task = asyncio.create_task(client())
    for _ in range(8):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    begun = server.ledger.counters.started
    assert 0 < begun < parts
    for _ in range(8):
        await asyncio.sleep(0)
    assert (server.ledger.counters.started, len(server.cancelled)) == (begun, begun)
