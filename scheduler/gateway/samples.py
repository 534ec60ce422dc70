"""The turns of one request, followed together: each prompt and each of its samples is a turn."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from harvester.contracts.errors import RoseMuxError
from harvester.contracts.ids import TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import Choice, GenerateRequest, Usage
from scheduler.gateway.job_turns import ClientRequest, JobTurns, TurnRefused
from scheduler.gateway.loop_share import AT_ONCE, LoopShare
from scheduler.gateway.policy.turn import Turn

_SEED_BOUND = 1 << 63


def samples_of(request: GenerateRequest) -> list[GenerateRequest]:
    """The request's `n` turns; seeds count up from the request's, as vLLM's do, and the first one
    scores the prompt."""
    sampling = request.sampling_params
    if sampling.n == 1:
        return [request]
    unscored = msgspec.structs.replace(
        sampling, prompt_logprobs=None, prompt_logprob_token_ids=None, prompt_logprob_start=None
    )
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}.{index}",
            sampling_params=msgspec.structs.replace(
                sampling if index == 0 else unscored,
                n=1,
                seed=None if sampling.seed is None else (sampling.seed + index) % _SEED_BOUND,
            ),
        )
        for index in range(sampling.n)
    ]


class Samples:
    """Choice `i` of the reply is the turn of `requests[i]`. Use as `async with follow(...)`."""

    def __init__(
        self, turns: JobTurns, requests: Sequence[GenerateRequest], part_of: ClientRequest
    ) -> None:
        """`part_of`: the client's request that all of them are parts of."""
        self._job_turns, self._requests, self._part_of = turns, requests, part_of
        self.turns: list[Turn | None] = [None] * len(requests)
        self._streams = False
        self._more = asyncio.Event()
        self._tasks: list[asyncio.Task[Turn]] = []
        self._sent_tokens = [0] * len(requests)
        self._sent_end = [False] * len(requests)

    async def _served(self, index: int) -> Turn:
        alone, session = len(self._requests) == 1, self._part_of.session
        turn, refused = await self._job_turns.serve(
            self._requests[index],
            trajectory=session if alone else TrajectoryId(f"{session}.{index}"),
            part_of=self._part_of,
            on_turn=partial(self._follow, index),
        )
        if refused is not None:
            raise TurnRefused(refused)
        return turn

    def _follow(self, index: int, turn: Turn) -> Callable[[], None]:
        self.turns[index] = turn
        turn.is_streamed |= self._streams
        return self._more.set

    async def results(self) -> list[Turn]:
        """All turns at their ends. Raises TurnRefused, and what serving a turn raises."""
        if len(self.turns) == 1:
            return [await self._served(0)]
        await self._start()
        # gather would cancel all of them at once.
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in self._tasks if task.done()]

    async def _start(self) -> None:
        for index in range(len(self.turns)):
            if index and index % AT_ONCE == 0:
                await asyncio.sleep(0)
            task = asyncio.ensure_future(self._served(index))
            task.add_done_callback(lambda _task: self._more.set())
            self._tasks.append(task)

    async def _leave(self) -> None:
        left = iter(self._tasks)
        try:
            while now := tuple(islice(left, AT_ONCE)):
                for task in now:
                    task.cancel()
                await asyncio.gather(*now, return_exceptions=True)
        finally:
            # This task may be cancelled too: no sample goes on without a reader.
            for task in left:
                task.cancel()
            # The tasks' tracebacks hold this frame: this breaks the reference cycle.
            self._tasks.clear()

    async def chunks(self, *, every_s: float = 0.0) -> AsyncIterator[Choice]:
        """New tokens of each choice as they come, at most `every_s` apart but for each choice's
        end, which comes once and at once. Raises as results."""
        self._streams = True
        await self._start()
        for turn in filter(None, self.turns):
            turn.is_streamed = True
        while not all(self._sent_end):
            await self._more.wait()
            self._more.clear()
            share = LoopShare()
            for index, task in enumerate(self._tasks):
                if index and index % AT_ONCE == 0:
                    await share.rest()
                if task.done():
                    task.result()
                if (choice := self._chunk(index)) is not None:
                    yield choice
            if every_s and (open_ := [task for task in self._tasks if not task.done()]):
                await asyncio.wait(open_, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)

    @contextmanager
    def rendering(self, index: int | None = None) -> Iterator[None]:
        """Around the making of the reply, or of one choice's part of it."""
        try:
            yield
        except RoseMuxError:
            for turn in self._begun(index):
                turn.counters.undelivered += 1
            raise

    def _begun(self, index: int | None) -> list[Turn]:
        """All turns, or the one of a choice, that have begun."""
        turns = self.turns if index is None else self.turns[index : index + 1]
        return [turn for turn in turns if turn is not None]

    def usage(self, index: int | None = None) -> Usage:
        """The tokens of all choices, or of one; each prompt counts once, however many samples it
        has."""
        turns = self._begun(index)
        prompts = {id(turn.request.token_ids): len(turn.request.token_ids) for turn in turns}
        prompt_tokens = sum(prompts.values())
        completion_tokens = sum(len(turn.token_ids) for turn in turns)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )

    def prompt_scores(self, index: int) -> dict[str, Any]:
        """The fields of a reply with the log-probabilities of a turn's prompt."""
        turn = self.turns[index]
        return msgspec.structs.asdict(turn.scores) if turn is not None and turn.scores else {}

    def versions(self, index: int | None = None) -> dict[str, WeightVersion]:
        """Oldest version at the start of a choice and newest at the end of one, or those of one
        choice, as slime, miles and stitch read them; {} before the first token."""
        made = [spans for turn in self._begun(index) if (spans := turn.spans_now())]
        if not made:
            return {}
        return {
            "weight_version_start": min(spans[0].version for spans in made),
            "weight_version_end": max(spans[-1].version for spans in made),
        }

    def _chunk(self, index: int) -> Choice | None:
        turn = self.turns[index]
        if turn is None or self._sent_end[index]:
            return None
        choice = turn.choice(start=(sent := self._sent_tokens[index]))
        ended = choice.finish_reason is not None
        least = turn.request.sampling_params.stream_interval or 1
        if sent and len(choice.token_ids) < least and not ended:
            return None
        if not choice.token_ids and not (ended and self._tasks[index].done()):
            # A turn without a token may have been refused, which only its task says.
            return None
        self._sent_tokens[index] += len(choice.token_ids)
        self._sent_end[index] = ended
        spans = turn.choice().spans if ended else choice.spans
        return msgspec.structs.replace(choice, index=index, spans=spans)


@asynccontextmanager
async def follow(
    turns: JobTurns,
    trajectory: TrajectoryId,
    requests: Sequence[GenerateRequest],
    *,
    name: str = "",
    named: bool = False,
) -> AsyncIterator[Samples]:
    """Serves the turns that are asked for while the context is open; leaving it leaves all.

    `name`: the id of the client's request that all of them are parts of. `named`: by the client, so
    that it can ask for the same answer again.
    """
    with turns.admitting(requests):
        part_of = ClientRequest(name or requests[0].request_id, trajectory, named)
        samples = Samples(turns, requests, part_of)
        try:
            yield samples
        finally:
            await samples._leave()
