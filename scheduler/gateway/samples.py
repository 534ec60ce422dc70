"""The turns of one request, followed together: each prompt and each of its samples is a turn."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import msgspec

from harvester.contracts.errors import RoseMuxError
from harvester.contracts.ids import JobId, TrajectoryId
from harvester.contracts.wire.rollouts import Choice, GenerateRequest, Usage
from scheduler.gateway.open_turns import Listen
from scheduler.gateway.policy.routing_events import Refusal, RefuseTurn
from scheduler.gateway.policy.trajectories import Turn

_SEED_BOUND = 1 << 63
_REFUSED_STATUS = {
    Refusal.VERSION: 409,
    Refusal.REQUEST: 422,
    Refusal.CONTEXT: 400,
    Refusal.JOB: 503,
    Refusal.FULL: 503,
}


class TurnRefused(RoseMuxError):  # noqa: N818 - an answer, not a fault
    def __init__(self, refused: RefuseTurn) -> None:
        super().__init__(refused.reason)
        self.status = _REFUSED_STATUS[refused.refusal]


class TurnServer(Protocol):
    def generate(
        self,
        job: JobId,
        trajectory: TrajectoryId,
        request: GenerateRequest,
        *,
        on_turn: Listen | None = None,
    ) -> Awaitable[tuple[Turn, RefuseTurn | None]]:
        """Serves one turn to its end."""
        ...


def samples_of(request: GenerateRequest) -> list[GenerateRequest]:
    """The request's `n` turns; seeds count up from the request's, as vLLM's do."""
    sampling = request.sampling_params
    if sampling.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}.{index}",
            sampling_params=msgspec.structs.replace(
                sampling,
                n=1,
                seed=None if sampling.seed is None else (sampling.seed + index) % _SEED_BOUND,
            ),
        )
        for index in range(sampling.n)
    ]


class Samples:
    """Choice `i` of the reply is the turn of `requests[i]`. Use as `async with follow(...)`."""

    def __init__(self, count: int) -> None:
        self.turns: list[Turn | None] = [None] * count
        self._more = asyncio.Event()
        self._tasks: list[asyncio.Task[tuple[Turn, RefuseTurn | None]]] = []
        self._sent_tokens = [0] * count
        self._sent_end = [False] * count

    def _follow(self, index: int, turn: Turn) -> Callable[[], None]:
        self.turns[index] = turn
        return self._more.set

    async def results(self) -> list[Turn]:
        """All turns at their ends. Raises TurnRefused, and what serving a turn raises."""
        for done in asyncio.as_completed(self._tasks):
            self._result(await done)
        return [task.result()[0] for task in self._tasks]

    async def chunks(self) -> AsyncIterator[Choice]:
        """New tokens of each choice as they come, and each choice's end once. Raises as results."""
        while not all(self._sent_end):
            await self._more.wait()
            self._more.clear()
            for index, task in enumerate(self._tasks):
                if task.done():
                    self._result(task.result())
                if (choice := self._chunk(index)) is not None:
                    yield choice

    def usage(self) -> Usage:
        """Prompts count once, however many samples they have."""
        turns = [turn for turn in self.turns if turn is not None]
        prompts = {id(turn.request.token_ids): len(turn.request.token_ids) for turn in turns}
        prompt_tokens = sum(prompts.values())
        completion_tokens = sum(len(turn.token_ids) for turn in turns)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )

    def _chunk(self, index: int) -> Choice | None:
        turn = self.turns[index]
        if turn is None or self._sent_end[index]:
            return None
        choice = turn.choice(start=self._sent_tokens[index])
        ended = choice.finish_reason is not None
        if not choice.token_ids and not (ended and self._tasks[index].done()):
            # A turn without a token may have been refused, which only its task says.
            return None
        self._sent_tokens[index] += len(choice.token_ids)
        self._sent_end[index] = ended
        spans = turn.choice().spans if ended else choice.spans
        return msgspec.structs.replace(choice, index=index, spans=spans)

    @staticmethod
    def _result(done: tuple[Turn, RefuseTurn | None]) -> Turn:
        turn, refused = done
        if refused is not None:
            raise TurnRefused(refused)
        return turn


@asynccontextmanager
async def follow(
    server: TurnServer, job: JobId, trajectory: TrajectoryId, requests: Sequence[GenerateRequest]
) -> AsyncIterator[Samples]:
    """Serves the turns while the context is open; leaving it leaves all of them."""
    samples = Samples(len(requests))
    for index, request in enumerate(requests):
        name = trajectory if len(requests) == 1 else TrajectoryId(f"{trajectory}.{index}")
        work = server.generate(job, name, request, on_turn=partial(samples._follow, index))
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _task: samples._more.set())
        samples._tasks.append(task)
    try:
        yield samples
    finally:
        for task in samples._tasks:
            task.cancel()
        await asyncio.gather(*samples._tasks, return_exceptions=True)
