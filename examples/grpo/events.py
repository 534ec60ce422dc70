"""The lines between a trainer process and its driver: commands in, events out."""

from typing import Annotated, Protocol

import msgspec
from msgspec import Meta


class StepCommand(
    msgspec.Struct, frozen=True, tag_field="cmd", tag="step", forbid_unknown_fields=True
):
    """Do one GRPO step."""

    prompts: Annotated[int, Meta(ge=1)] | None = None
    """Prompts of this step; None: the job's own number."""


class StopCommand(
    msgspec.Struct, frozen=True, tag_field="cmd", tag="stop", forbid_unknown_fields=True
):
    """Finish the step in hand, then exit."""


Command = StepCommand | StopCommand


class Trajectories(msgspec.Struct, frozen=True, kw_only=True):
    started: int
    completed: int
    lost: int
    duplicated: int
    migrated: int
    """Completed ones that more than one engine served."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ready"):
    """The first version is published and serves on every dedicated engine."""

    job: str
    version: int
    parameters: int
    warm_up_s: float
    warm_from_cache: bool
    publish_s: float
    switch_s: float
    bytes_sent: int
    bytes_dense: int


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="step"):
    step: int
    """Number of the step, from 1."""
    end_s: float
    """CLOCK_MONOTONIC."""
    version: int
    """Published at the end of this step; the rollouts were on the one before."""
    step_s: float
    rollout_s: float
    train_s: float
    publish_s: float
    switch_s: float
    reward_mean: float
    reward_se: float
    rollout_tokens: int
    prefill_tokens: int
    turns: int
    tokens_by_engine: dict[str, int]
    logprob_gap: dict[str, tuple[float, int]]
    """Per engine, the sum of |log p_trainer - log p_engine| and the number of tokens in it."""
    stale_tokens: int
    trajectories: Trajectories
    bytes_sent: int
    bytes_dense: int
    kl_mean: float
    clip_share: float
    entropy_mean: float
    gradient_norm: float


class CommandRefused(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="refused"):
    """A line on stdin was no command; nothing was done."""

    reason: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="failed"):
    """The process ends with exit status 1."""

    reason: str


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stopped"):
    """A clean end."""

    steps: int


Event = Ready | StepDone | CommandRefused | Failed | Stopped


class Emits(Protocol):
    def __call__(self, event: Event) -> None: ...


def decoded_command(line: bytes) -> Command | CommandRefused:
    """The command in `line`, or why it is none."""
    try:
        command: Command = msgspec.json.decode(line, type=Command)
    except msgspec.DecodeError as error:
        return CommandRefused(reason=f"not a command: {error}")
    return command


def encoded_event(event: Event) -> bytes:
    return msgspec.json.encode(event) + b"\n"
