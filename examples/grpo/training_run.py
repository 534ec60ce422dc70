"""One RL job's run: publish, switch, roll out, learn, again; each step on the newest version only.

Decides the order of a step and its report. The gateway chooses the engines, GRPO the learning.
Holds no socket: gateway, store and clock are given.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from examples.grpo.environment import Task, TaskShape
from examples.grpo.events import StepDone, Trajectories
from examples.grpo.grpo import GrpoSettings, UpdateReport, update
from examples.grpo.master_weights import MasterWeights
from examples.grpo.rollout import StepBatch
from harvester.contracts.clock import Clock
from harvester.contracts.wire.rollouts import VersionSwitched


class Receipt(Protocol):
    """Result of a publish."""

    @property
    def version(self) -> int: ...
    @property
    def state_hash(self) -> str: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_dense(self) -> int: ...


class Publishes(Protocol):
    def publish(self, state: Mapping[str, Tensor]) -> Receipt: ...


class Announces(Protocol):
    async def announce(self, version: int, store: str, *, state_hash: str) -> VersionSwitched: ...


class Collects(Protocol):
    async def collect(self, tasks: Sequence[Task], *, step: int, version: int) -> StepBatch: ...


@dataclass(frozen=True, slots=True)
class Switched:
    """A version that was published and serves on every dedicated engine."""

    receipt: Receipt
    publish_s: float
    switch_s: float


class TrainingRun:
    def __init__(
        self,
        weights: MasterWeights,
        *,
        tasks: TaskShape,
        seed: int,
        store: str,
        grpo: GrpoSettings,
        publisher: Publishes,
        gateway: Announces,
        collector: Collects,
        clock: Clock,
    ) -> None:
        self._weights = weights
        self._tasks = tasks
        self._seed = seed
        self._store = store
        self._grpo = grpo
        self._publisher = publisher
        self._gateway = gateway
        self._collector = collector
        self._clock = clock
        self._version = 0
        self.steps = 0

    async def publish(self) -> Switched:
        """Makes the present weights the version that rollouts run on."""
        started_s = self._clock.now()
        receipt = self._publisher.publish(self._weights.state_for_publish())
        published_s = self._clock.now()
        await self._gateway.announce(receipt.version, self._store, state_hash=receipt.state_hash)
        self._version = receipt.version
        switched_s = self._clock.now()
        return Switched(receipt, published_s - started_s, switched_s - published_s)

    async def step(self, prompts: int | None = None) -> StepDone:
        """One step; `publish` must have run before the first. `prompts`: None for the tasks' own
        number."""
        started_s = self._clock.now()
        shape = replace(self._tasks, prompts_per_step=prompts or self._tasks.prompts_per_step)
        tasks = [
            Task(shape, self._seed, self.steps, prompt) for prompt in range(shape.prompts_per_step)
        ]
        batch = await self._collector.collect(tasks, step=self.steps, version=self._version)
        collected_s = self._clock.now()
        report = update(
            self._weights, batch.trajectories, version=self._version, settings=self._grpo
        )
        trained_s = self._clock.now()
        switched = await self.publish()
        self.steps += 1
        end_s = self._clock.now()
        return _step_done(
            self.steps,
            batch,
            report,
            switched,
            end_s=end_s,
            step_s=end_s - started_s,
            train_s=trained_s - collected_s,
        )


def _step_done(
    step: int,
    batch: StepBatch,
    report: UpdateReport,
    switched: Switched,
    *,
    end_s: float,
    step_s: float,
    train_s: float,
) -> StepDone:
    mean, standard_error = _mean_and_error([one.reward for one in batch.trajectories])
    learned = max(1, report.tokens)
    ledger = batch.ledger
    return StepDone(
        step=step,
        end_s=end_s,
        version=switched.receipt.version,
        step_s=step_s,
        rollout_s=batch.rollout_s,
        train_s=train_s,
        publish_s=switched.publish_s,
        switch_s=switched.switch_s,
        reward_mean=mean,
        reward_se=standard_error,
        rollout_tokens=batch.rollout_tokens,
        prefill_tokens=batch.prefill_tokens,
        turns=batch.turns,
        tokens_by_engine=batch.tokens_by_engine,
        logprob_gap=report.logprob_gap,
        stale_tokens=report.stale_tokens,
        trajectories=Trajectories(
            started=ledger.started,
            completed=ledger.completed,
            lost=ledger.lost,
            duplicated=ledger.duplicated,
            migrated=ledger.migrated,
        ),
        bytes_sent=switched.receipt.bytes_sent,
        bytes_dense=switched.receipt.bytes_dense,
        kl_mean=report.kl_sum / learned,
        clip_share=report.clipped_tokens / learned,
        entropy_mean=report.entropy_sum / learned,
        gradient_norm=report.gradient_norm,
    )


def _mean_and_error(rewards: Sequence[float]) -> tuple[float, float]:
    mean = sum(rewards) / len(rewards)
    squares = sum((reward - mean) ** 2 for reward in rewards)
    variance = squares / (len(rewards) - 1) if len(rewards) > 1 else 0.0
    return mean, math.sqrt(variance / len(rewards))
