"""Collects one step's trajectories through the gateway, all of them at the same time.

Decides the sampling seed of every turn, when a trajectory goes on and what is counted. The batch
is a function of (seed, step) and of the sampled tokens: never of the serving engines, nor of
the order in which trajectories finish. Verdicts on tokens (stale or not) are the trainer's.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_hex
from typing import Protocol, Unpack

from examples.grpo.environment import LINE_TOKENS, Episode, Task
from examples.grpo.trajectory import OpenTrajectory, OutputToken, Trajectory
from examples.grpo.vocabulary import STOP_ID
from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted, PeerProtocolError, RoseMuxError
from harvester.contracts.ids import TrajectoryId
from harvester.contracts.wire.rollouts import (
    Choice,
    FinishReason,
    SamplingParams,
)
from scheduler.client.turn_request import TurnOptions

_LOG = logging.getLogger(__name__)
_RESUMES_MAX = 20
"""An aborted turn goes on from the tokens that it has; more aborts than this lose it."""


class Generates(Protocol):
    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, **options: Unpack[TurnOptions]
    ) -> Choice: ...


@dataclass(slots=True)
class TrajectoryLedger:
    """Every trajectory that was started ends exactly once, or is counted as what went wrong."""

    started: int = 0
    lost: int = 0
    duplicated: int = 0
    migrated: int = 0
    """Completed ones that more than one engine served."""
    _completed: set[TrajectoryId] = field(default_factory=set)

    @property
    def completed(self) -> int:
        return len(self._completed)

    def complete(self, trajectory: TrajectoryId) -> bool:
        """Records a completion; False for a duplicate, which must not be learned from."""
        if trajectory in self._completed:
            self.duplicated += 1
            return False
        self._completed.add(trajectory)
        return True


@dataclass(slots=True)
class StepBatch:
    """Results of one step's rollouts."""

    trajectories: list[Trajectory]
    """Trajectories in order of prompt and sample."""
    ledger: TrajectoryLedger
    rollout_s: float
    turns: int
    rollout_tokens: int
    prefill_tokens: int
    """Prompt and tool tokens, once each: what an engine with a warm prefix must prefill."""
    tokens_by_engine: dict[str, int]


class RolloutCollector:
    def __init__(
        self,
        gateway: Generates,
        *,
        job: str,
        seed: int,
        samples_per_prompt: int,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_progress: Callable[[float], None] = lambda _ratio: None,
    ) -> None:
        """`on_progress` is called with the share of a step's trajectories that has ended."""
        self._gateway = gateway
        self._job = job
        self._seed = seed
        self._samples_per_prompt = samples_per_prompt
        self._clock = clock
        self._sleep = sleep
        self._on_progress = on_progress
        self._run = token_hex(4)
        """In every request's id: a gateway keeps the answers of an earlier run for a while."""

    async def collect(self, tasks: Sequence[Task], *, step: int, version: int) -> StepBatch:
        """Samples every task on exactly `version`.

        Raises Exhausted where not one trajectory completed.
        """
        ledger = TrajectoryLedger()
        total = len(tasks) * self._samples_per_prompt
        started_s = self._clock.now()
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._trajectory(task, sample, step, version, ledger))
                for task in tasks
                for sample in range(self._samples_per_prompt)
            ]
            for one in running:
                one.add_done_callback(
                    lambda _one: self._on_progress((ledger.completed + ledger.lost) / total)
                )
        rollout_s = self._clock.now() - started_s
        done = [one for one in (each.result() for each in running) if one is not None]
        if not done:
            raise Exhausted(f"all {ledger.started} trajectories of step {step} were lost")
        return _batch(done, ledger, rollout_s)

    async def _trajectory(
        self, task: Task, sample: int, step: int, version: int, ledger: TrajectoryLedger
    ) -> Trajectory | None:
        name = TrajectoryId(f"{self._job}-s{step}-p{task.prompt_index}-k{sample}")
        episode = Episode(task)
        trajectory = OpenTrajectory(task.prompt_index, sample, episode.prompt_ids)
        ledger.started += 1
        try:
            turn = 0
            while True:
                line = await self._line(trajectory, name, f"{step}/{sample}", turn, version)
                observation = episode.act(line)
                finished = trajectory.observe(observation)
                if finished is not None:
                    break
                await self._sleep(observation.latency_s)
                turn += 1
        except RoseMuxError as error:
            ledger.lost += 1
            _LOG.warning("trajectory %s is lost: %s", name, error)
            return None
        if not ledger.complete(name):
            return None
        ledger.migrated += len({token.engine for token in finished.outputs}) > 1
        return finished

    async def _line(
        self, trajectory: OpenTrajectory, name: TrajectoryId, place: str, turn: int, version: int
    ) -> tuple[int, ...]:
        line: tuple[int, ...] = ()
        for resume in range(_RESUMES_MAX):
            where = f"{self._seed}/{place}/{trajectory.prompt_index}/{turn}/{resume}"
            request_id = f"{name}-t{turn}-r{resume}-{self._run}"
            sampling = SamplingParams(
                max_tokens=LINE_TOKENS - len(line),
                temperature=1.0,
                seed=_sampling_seed(where),
                stop_token_ids=(STOP_ID,),
            )
            choice = await self._gateway.generate(
                trajectory.context,
                sampling,
                trajectory=name,
                request_id=request_id,
                weight_version=version,
            )
            tokens = sampled_tokens(choice)
            if len(line) + len(tokens) > LINE_TOKENS:
                raise PeerProtocolError(f"{request_id}: more tokens than were asked for")
            trajectory.write(tokens)
            line += tuple(token.token_id for token in tokens)
            if choice.finish_reason != FinishReason.ABORT or _is_whole(line):
                return line
        raise Exhausted(f"turn {turn} was aborted {_RESUMES_MAX} times")


def sampled_tokens(choice: Choice) -> list[OutputToken]:
    """The choice's tokens with their log-probabilities and origins.

    A token that no span covers has version 0. Raises PeerProtocolError where log-probabilities
    are not those of the tokens.
    """
    content = choice.logprobs.content
    if tuple(each.token_id for each in content) != choice.token_ids:
        raise PeerProtocolError("the log-probabilities are not those of the sampled tokens")
    origins = [("", 0)] * len(content)
    for span in choice.spans:
        for at in range(max(0, span.start), min(span.end, len(content))):
            origins[at] = (span.engine, span.version)
    return [
        OutputToken(each.token_id, each.logprob, engine, version)
        for each, (engine, version) in zip(content, origins, strict=True)
    ]


def _is_whole(line: tuple[int, ...]) -> bool:
    return len(line) == LINE_TOKENS or (bool(line) and line[-1] == STOP_ID)


def _sampling_seed(where: str) -> int:
    return int.from_bytes(blake2b(where.encode(), digest_size=4).digest(), "little") >> 1


def _batch(done: list[Trajectory], ledger: TrajectoryLedger, rollout_s: float) -> StepBatch:
    outputs = sum(len(one.outputs) for one in done)
    return StepBatch(
        trajectories=sorted(done, key=lambda one: (one.prompt_index, one.sample_index)),
        ledger=ledger,
        rollout_s=rollout_s,
        turns=sum(one.turns for one in done),
        rollout_tokens=outputs,
        prefill_tokens=sum(len(one.token_ids) for one in done) - outputs,
        tokens_by_engine=dict(Counter(token.engine for one in done for token in one.outputs)),
    )
