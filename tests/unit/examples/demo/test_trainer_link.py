"""The link over real pipes; the trainer is what the test has written into them."""

import asyncio
import io
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.testbed.processes import Child
from examples.demo.trainer_link import TrainerLink
from examples.grpo.events import Event, Failed, Ready, StepDone, Trajectories, encoded_event
from harvester.contracts.errors import ConfigError, PeerProtocolError

READY = Ready(
    job="fixed",
    version=1,
    parameters=10,
    warm_up_s=1.0,
    warm_from_cache=False,
    publish_s=0.1,
    switch_s=0.1,
    bytes_sent=20,
    bytes_dense=20,
)
STEP = StepDone(
    step=1,
    end_s=1.0,
    version=2,
    step_s=1.0,
    rollout_s=0.5,
    train_s=0.3,
    publish_s=0.1,
    switch_s=0.1,
    reward_mean=0.5,
    reward_se=0.1,
    rollout_tokens=100,
    prefill_tokens=10,
    turns=4,
    tokens_by_engine={"dedicated-0": 100},
    logprob_gap={"dedicated-0": (0.1, 100)},
    stale_tokens=0,
    trajectories=Trajectories(started=4, completed=4, lost=0, duplicated=0, migrated=0),
    bytes_sent=10,
    bytes_dense=20,
    kl_mean=0.0,
    clip_share=0.0,
    entropy_mean=1.0,
    gradient_norm=1.0,
)

Use = Callable[[TrainerLink], Awaitable[Any]]


def linked(log: Path, use: Use, *events: Event) -> tuple[Any, bytes]:
    """Result of `use`, and the bytes sent to the trainer. The trainer ends after its events."""
    there, here = os.pipe()
    with os.fdopen(here, "wb") as trainer:
        trainer.write(b"".join(encoded_event(event) for event in events))
    told = io.BytesIO()
    process = SimpleNamespace(stdin=told, stdout=os.fdopen(there, "rb", buffering=0))

    async def run() -> Any:
        try:
            return await use(TrainerLink(Child("trainer", cast(Any, process), log)))
        finally:
            # The pipe's transport closes once its end was read.
            for _ in range(5):
                await asyncio.sleep(0)

    return asyncio.run(run()), told.getvalue()


def test_ready_and_steps_come_in_turn(tmp_path: Path) -> None:
    async def use(link: TrainerLink) -> list[Event]:
        return [await link.ready(), await link.step(20)]

    events, told = linked(tmp_path / "log", use, READY, STEP)
    assert events == [READY, STEP]
    assert told == b'{"cmd":"step","prompts":20}\n'


def test_an_end_is_reported_with_the_trainer_s_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("out of memory")
    with pytest.raises(ConfigError, match=r"(?s)trainer ended.*out of memory"):
        linked(tmp_path / "log", TrainerLink.ready)


def test_a_failure_is_reported_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainer failed: the store is full"):
        linked(tmp_path / "log", TrainerLink.step, Failed(reason="the store is full"))


@pytest.mark.parametrize(
    ("use", "event"), [(TrainerLink.ready, STEP), (TrainerLink.step, READY)], ids=["ready", "step"]
)
def test_an_event_out_of_turn_is_the_trainers_fault(tmp_path: Path, use: Use, event: Event) -> None:
    with pytest.raises(PeerProtocolError, match="trainer: expected"):
        linked(tmp_path / "log", use, event)
