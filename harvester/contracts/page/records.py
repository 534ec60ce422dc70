"""The three records of the page directory. Fields are added with defaults, never renamed.

Times are CLOCK_MONOTONIC nanoseconds (`_ns`) or durations in seconds (`_s`); 0 is "none".
"""

from enum import StrEnum
from typing import ClassVar

import msgspec

from harvester.contracts.process import ProcessId

MOST_SHAPE_CHARACTERS = 120


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the page records; `KIND` stands in the page's head."""

    KIND: ClassVar[int] = 0
    AGE_MAX_NS: ClassVar[int] = 1 << 63
    """Believed no longer than this, whatever expiry its writer gave it."""


class ProductionModel(msgspec.Struct, frozen=True, kw_only=True):
    """Upper-quantile step times of production running alone, linear in what a step holds."""

    prefill_base_s: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_base_s: float = 0.0
    decode_s_per_request: float = 0.0

    def prefill_s(self, tokens: int) -> float:
        return self.prefill_base_s + self.prefill_s_per_token * tokens

    def decode_s(self, requests: int) -> float:
        return self.decode_base_s + self.decode_s_per_request * requests

    def scaled(self, ratio: float) -> "ProductionModel":
        """With every step so many times as long."""
        return ProductionModel(
            prefill_base_s=ratio * self.prefill_base_s,
            prefill_s_per_token=ratio * self.prefill_s_per_token,
            decode_base_s=ratio * self.decode_base_s,
            decode_s_per_request=ratio * self.decode_s_per_request,
        )

    def upper(self, other: "ProductionModel") -> "ProductionModel":
        """The larger of every coefficient: an upper bound of both, as none is negative."""
        return ProductionModel(
            prefill_base_s=max(self.prefill_base_s, other.prefill_base_s),
            prefill_s_per_token=max(self.prefill_s_per_token, other.prefill_s_per_token),
            decode_base_s=max(self.decode_base_s, other.decode_base_s),
            decode_s_per_request=max(self.decode_s_per_request, other.decode_s_per_request),
        )


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The latest steps of one kind over what a model of the P90 had predicted for them."""

    steps: int = 0
    """Compared; the rest says nothing while it is 0."""
    over_ratio: float = 0.0
    """Share that took longer; a tenth is what is wanted."""
    p50_ratio: float = 0.0
    p90_ratio: float = 0.0
    """1 is what is wanted."""
    p99_ratio: float = 0.0


class EngineCore(msgspec.Struct, frozen=True, kw_only=True):
    """One engine core (data-parallel rank) as an API-server process heard of it last."""

    rank: int = 0
    told_ns: int = 0
    """When: with several API servers each step's statistics go to one of them alone."""
    kv_usage_ratio: float = 0.0
    running: int = 0
    """Requests in its batch, whichever API server or door they came through."""
    waiting: int = 0
    """Requests that wait for a place in it."""


class PulseHead(Record, frozen=True, kw_only=True):
    """What a gate decides from: of a pulse, what production has at this moment.

    Guests read pulses so, before every step; decoding the rest costs them more than the decision.
    """

    KIND: ClassVar[int] = 1

    in_flight: int = 0
    """Requests between the end of their body and their last byte, and open WebSockets, as far as
    the middleware sees them."""
    waiting: int = 0
    """Requests without a first token yet."""
    decoding: int = 0
    """Requests with a first token and without a last one."""
    oldest_waiting_arrival_ns: int = 0
    largest_waiting_prompt_tokens: int = 0
    """Bound from the request's bytes and the learned bytes-to-tokens ratio."""
    last_step_end_ns: int = 0
    requests_total: int = 0
    kv_usage_ratio: float = 0.0
    prompt_tokens_p99: int = 0
    model: ProductionModel = ProductionModel()
    cores: tuple[EngineCore, ...] = ()
    """The engine's, as far as heard of; at most 16, the fullest."""
    sockets: int = 0
    """WebSockets among those in flight: they have work at times only, which the cores tell."""
    unseen_step_ns: int = 0
    """When the last step ended that served requests of this process while none but WebSockets was
    in flight, or a reply that its request may outlive before its first token."""


class Pulse(PulseHead, frozen=True, kw_only=True):
    """One production engine as one of its API-server processes sees it. It beats while idle too."""

    running: int = 0
    """Requests in the engine's running batch."""
    steps_total: int = 0
    busy_s_total: float = 0.0
    """Time in which the engine had something to step."""
    step_s_mean: float = 0.0
    """Of the last beats' steps, exponentially weighted."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    ttft_s_recent: tuple[float, ...] = ()
    """Newest last, at most 32; the agent's raw facts for headroom and error budget."""
    itl_s_recent: tuple[float, ...] = ()
    samples_total: int = 0
    """How many TTFT samples were ever appended, so that a reader takes each once."""
    itl_samples_total: int = 0
    model_samples: int = 0
    """Steps behind `model`; below the agent's minimum the slot is still learning."""
    prefill_calibration: Calibration = Calibration()
    decode_calibration: Calibration = Calibration()
    processes: int = 0
    """API servers of this engine, each with a pulse of its own; 0 is not known."""
    shape: str = ""
    """Model, parallelism and accelerator, as the engine says: times learned on another shape are
    not its times. "" is not known."""
    root: ProcessId | None = None
    """The process from which all of the engine's on this machine descend, so that a guest can ask
    the kernel whether it ranks below them. None is not said."""
    unseen_steps_total: int = 0
    """Steps that served requests of this process while none was in flight, nor a WebSocket over
    which somebody spoke that they could be for."""
    middleware: bool | None = None
    """Whether the middleware is part of this process's server: without it nothing is ever in
    flight. None is not known."""


class GrantMode(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    UNGATED = "ungated"
    """Admit without the slack law. For measuring what the law is worth, never for production."""

    @property
    def admits(self) -> bool:
        """Whether steps may start at all."""
        return self in (GrantMode.OPEN, GrantMode.UNGATED)


class Law(StrEnum):
    """By which rule the guest decides its steps while the grant is open."""

    SLACK = "slack"
    """Steps sized to what production can spare, (1 + epsilon) of its time alone."""
    ROSE = "rose"
    """Steps of one size while every event of production would still meet its SLO."""
    SATURATION = "saturation"
    """llm-d's: new work is shed at random, the likelier the fuller production is."""


class Grant(Record, frozen=True, kw_only=True):
    """What the agent lets the guest do until the page expires."""

    KIND: ClassVar[int] = 2
    AGE_MAX_NS: ClassVar[int] = 5_000_000_000
    """The longest that an agent may be told to say (`grant_ttl_s`): an expiry of a day, of a
    mistaken or a foreign agent that is gone, would hold the gate open for a day."""

    epoch: int
    mode: GrantMode
    reason: str = ""
    step_tokens_cap: int = 0
    kv_budget_tokens: int = 0
    """0 leaves the engine's own size."""
    pulses: tuple[str, ...] = ()
    """File names that must be there and fresh."""
    ttft_slo_s: float = 0.0
    itl_slo_s: float = 0.0
    epsilon: float = 0.05
    phantom_prompt_tokens: int = 0
    production: ProductionModel = ProductionModel()
    blocking_ratio: float = 1.0
    """Share of a running guest step that can delay production: 1 without an isolation backend."""
    abort_grace_s: float = 10.0
    law: Law = Law.SLACK
    asleep: bool = False
    """Closed, and nobody will need the guest soon: it gives all its KV back. Its weights stay and
    go on following new versions."""
    kv_retained_ratio: float = 0.25
    """Most of the KV that the guest may use that it keeps for trajectories away at their tools."""
    own_models: bool = False
    """Each engine's deadlines come from what its own pulses have learned, not from `production`:
    engines of one slot may be unlike. A phantom of 0 tokens is each engine's own P99 prompt."""
    kv_deadline_s: float = 2.0
    """A guest that has held more than its budget for longer than this is ended."""
    preemption_s: float = 5e-4
    """What production pays for a running guest step beside the share of `blocking_ratio`: the
    switch, and the caches that the step has filled. Not counted where the ratio is 1."""


class GuestMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine holds on the accelerator where it holds most, as it said once it had started.

    All but the KV cache is there while the gate is closed too: the floor.
    """

    weights_bytes: int = 0
    graphs_bytes: int = 0
    activations_bytes: int = 0
    """Workspaces, and what the allocator keeps of the largest step."""
    other_bytes: int = 0
    """The driver's context, code, communicators: what the process holds beside its allocator."""
    kv_bytes: int = 0
    whole: bool = False
    """False where the driver does not say what the process holds: then `other_bytes` is missing."""
    asleep_bytes_max: int = 0
    """Bound of what stays while its weights are away: all that was neither weights nor KV while
    they were there. 0 where they never go, or where that was not known."""

    @property
    def floor_bytes(self) -> int:
        parts = (self.weights_bytes, self.graphs_bytes, self.activations_bytes, self.other_bytes)
        return sum(parts)


class Guest(Record, frozen=True, kw_only=True):
    """What the guest does."""

    KIND: ClassVar[int] = 3

    epoch: int = 0
    gate: str = "closed"
    reason: str = ""
    steps_launched: int = 0
    steps_finished: int = 0
    tokens_total: int = 0
    last_step_tokens: int = 0
    last_step_s: float = 0.0
    last_step_end_ns: int = 0
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kv_tokens_total: int = 0
    weight_version: str = ""
    aborted_total: int = 0
    closings_total: int = 0
    decide_s_mean: float = 0.0
    """Mean cost of the decision before a step, in its thread's own time."""
    kv_tokens_withheld: int = 0
    """Of the total, out of use because the budget says so; their memory is given back where the
    guest can."""
    processes: tuple[ProcessId, ...] = ()
    """The engine's, as the guest sees them."""
    step_over_ratio: float = 0.0
    """Share of late steps that took longer than predicted; a tenth is what is wanted."""
    kv_tokens_retained: int = 0
    """Prefixes kept for trajectories whose next turn has not come."""
    prefix_tokens_used_total: int = 0
    """Kept until the next turn came, and hit by it."""
    prefix_tokens_dropped_total: int = 0
    """Let go before it came, or of no use to it."""
    isolation: str = ""
    """The backend that it was started under, as `ROSEMUX_ISOLATION` says; "" is not said."""
    memory: GuestMemory = GuestMemory()
    weights_away: bool = False
    """Asleep with its weights in host memory: it holds no more than context and graphs."""
    step_calibration: Calibration = Calibration()
    """Its steps while production was idle."""
    beside_calibration: Calibration = Calibration()
    """Those that production overlapped, over what they would have taken alone: 2 at the P50 is half
    of the accelerator."""
    blocking_ratio: float = 1.0
    """What its isolation promises while the guest sees it hold; 1 where it does not, or is none."""
    isolation_fault: str = ""
    """Why its isolation does not hold."""
    leaving: bool = False
    """Stopped on purpose; whoever stops it says so in its place."""
