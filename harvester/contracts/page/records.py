"""The three records of the page directory. Fields are added with defaults, never renamed.

Times are CLOCK_MONOTONIC nanoseconds (`_ns`) or durations in seconds (`_s`); 0 means no time. An
engine's page with a number outside its range counts as torn: the agent passes such numbers on.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from harvester.contracts.process import ProcessId

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""A finite number: JSON has no word for NaN or infinity."""
Finite = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""vLLM takes first tokens by the wall clock, which may be set back."""

MOST_SHAPE_CHARACTERS = 120
MOST_GPUS = 10
"""Largest number of UUIDs for which the fullest pulse has room."""
_GPU_UUID = re.compile(r"GPU-[A-Za-z0-9-]{1,60}")
_LATE_NS = 250_000_000
"""Reports closer in time than this have no order: a busy API server reads its statistics late."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the page records; the page's head holds `KIND`."""

    KIND: ClassVar[int] = 0
    AGE_MAX_NS: ClassVar[int] = 1 << 63
    """A record is not believed for longer than this, whatever expiry its writer gave it."""


class ProductionModel(msgspec.Struct, frozen=True, kw_only=True):
    """Upper-quantile step times of production alone: a prefill's is linear in its prompt tokens, a
    decode step's in its requests."""

    prefill_base_s: Amount = 0.0
    prefill_s_per_token: Amount = 0.0
    decode_base_s: Amount = 0.0
    decode_s_per_request: Amount = 0.0

    def prefill_s(self, tokens: int) -> float:
        return self.prefill_base_s + self.prefill_s_per_token * tokens

    def decode_s(self, requests: int) -> float:
        return self.decode_base_s + self.decode_s_per_request * requests

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

    steps: Count = 0
    """Steps compared; the ratios are meaningless while it is 0."""
    over_ratio: Amount = 0.0
    """Share of steps that took longer than predicted; 0.1 is ideal."""
    p50_ratio: Amount = 0.0
    p90_ratio: Amount = 0.0
    """1 is ideal."""
    p99_ratio: Amount = 0.0


class EngineCore(msgspec.Struct, frozen=True, kw_only=True):
    """One engine core (data-parallel rank), as last reported to an API-server process."""

    rank: int = 0
    told_ns: int = 0
    """Time of the latest statistics; of several API servers only one gets those of a step."""
    kv_usage_ratio: Amount = 0.0
    running: Count = 0
    """Requests in its batch, from every API server and entry point."""
    waiting: Count = 0
    """Requests queued for the batch."""


class PulseHead(Record, frozen=True, kw_only=True):
    """Production's present state: all that gates decode, since a whole pulse costs more."""

    KIND: ClassVar[int] = 1

    in_flight: Count = 0
    """Requests between the end of their body and their last byte, and open WebSockets, as the
    middleware counts them."""
    waiting: Count = 0
    """Requests without a first token yet."""
    decoding: Count = 0
    """Requests that have a first token and no last one yet."""
    oldest_waiting_arrival_ns: int = 0
    largest_waiting_prompt_tokens: int = 0
    """Bound from the request's bytes and the learned bytes-to-tokens ratio."""
    last_step_end_ns: int = 0
    requests_total: int = 0
    kv_usage_ratio: Amount = 0.0
    prompt_tokens_p99: int = 0
    model: ProductionModel = ProductionModel()
    cores: tuple[EngineCore, ...] = ()
    """The engine's cores, as far as known; at most 16, the fullest."""
    sockets: int = 0
    """WebSockets among those in flight: they count as work only while the cores have requests."""
    unseen_step_ns: int = 0
    """End of the last step that served this process's requests while it had only WebSockets in
    flight, or replies that may end before their request has its first token."""
    prompt_tokens_quantiles: tuple[int, ...] = ()
    """Lengths of the latest prompts in ascending order, at most 10, each of which stands for an
    equal share of prompts that are at least as long. Empty: unknown, which counts as one token."""


class Pulse(PulseHead, frozen=True, kw_only=True):
    """One production engine as one of its API-server processes sees it. Written while idle too."""

    running: Count = 0
    """Requests in the engine's running batch."""
    steps_total: int = 0
    busy_s_total: Amount = 0.0
    """Total time in which the engine had work to step."""
    step_s_mean: Amount = 0.0
    """Exponentially weighted mean over the steps of the last beats."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    ttft_s_recent: tuple[Finite, ...] = ()
    """Newest last, at most 32; the agent's raw facts for headroom and error budget."""
    itl_s_recent: tuple[Finite, ...] = ()
    samples_total: int = 0
    """TTFT samples ever appended, so that a reader takes each once."""
    itl_samples_total: int = 0
    model_samples: int = 0
    """Steps behind `model`; below the agent's minimum the slot is still learning."""
    prefill_calibration: Calibration = Calibration()
    decode_calibration: Calibration = Calibration()
    processes: Count = 0
    """API servers of this engine, each with its own pulse; 0 if unknown."""
    shape: str = ""
    """Model, parallelism and accelerator, as the engine says: step times learned on another shape
    do not apply to it. "" if unknown."""
    root: ProcessId | None = None
    """Root process of the engine on this machine, so that a guest can ask the kernel whether it
    ranks below all its descendants. None if not reported."""
    unseen_steps_total: int = 0
    """Steps that served requests of this process while no request was in flight, nor a WebSocket
    with traffic that could explain them."""
    middleware: bool | None = None
    """Whether the middleware is part of this process's server: without it `in_flight` stays 0. None
    if unknown."""
    unfit: str = ""
    """Why no guest may run beside an engine that is deployed like this one, and the remedy."""
    unanswered_s_recent: tuple[Finite, ...] = ()
    """Waits of requests that ended without a first token (given up, or failed); at most 32."""
    unanswered_total: int = 0
    itl_slo_s: Amount = 0.0
    """The grant's, above which a time between tokens counts as late; 0 if none was read."""
    itl_late_s_recent: tuple[Finite, ...] = ()
    """Newest last, at most 8; each is of another request or step."""
    itl_late_total: int = 0
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of the engine's ranks on this machine, at most `MOST_GPUS`; empty on a CPU,
    if unknown, and of an unfit engine."""


def is_gpu_uuid(text: str) -> bool:
    """Whether a text could be a GPU's UUID; a slice of MIG has another."""
    return _GPU_UUID.fullmatch(text) is not None


def stated_gpus(pulses: Sequence[Pulse]) -> tuple[str, ...]:
    """UUIDs of the GPUs of all engines of a slot; empty if one of them states none, or any other
    text, which must not reach a file or a terminal."""
    if not all(pulse.gpus and all(map(is_gpu_uuid, pulse.gpus)) for pulse in pulses):
        return ()
    return tuple(dict.fromkeys(uuid for pulse in pulses for uuid in pulse.gpus))


def latest_cores(pulses: Sequence[PulseHead]) -> Sequence[EngineCore]:
    """The latest report of each core, from the pulses of one engine.

    Reports that are nearly as new as the newest cannot be ordered: the one with the fewest requests
    counts, since a running engine repeats its report and an idle one reports once.
    """
    if len(pulses) == 1:
        return pulses[0].cores
    words: dict[int, list[EngineCore]] = {}
    for pulse in pulses:
        for core in pulse.cores:
            words.setdefault(core.rank, []).append(core)
    found: list[EngineCore] = []
    for of_core in words.values():
        newest_ns = max([core.told_ns for core in of_core])
        near = [core for core in of_core if newest_ns - core.told_ns <= _LATE_NS]
        found.append(min(near, key=lambda core: core.running + core.waiting))
    return found


class GrantMode(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    UNGATED = "ungated"
    """Admit without the slack law. For measuring the law's value, never for production."""

    @property
    def admits(self) -> bool:
        """Whether steps may start at all."""
        return self in (GrantMode.OPEN, GrantMode.UNGATED)


class Law(StrEnum):
    """Rule by which the guest decides its steps while the grant is open."""

    SLACK = "slack"
    """Steps sized to what production can spare, (1 + epsilon) of its time alone."""
    ROSE = "rose"
    """Steps of one size while every event of production would still meet its SLO."""
    SATURATION = "saturation"
    """llm-d's law: new work is shed at random, more likely the fuller production is."""


class Grant(Record, frozen=True, kw_only=True):
    """Permission and limits for the guest, valid until the page expires."""

    KIND: ClassVar[int] = 2
    AGE_MAX_NS: ClassVar[int] = 5_000_000_000
    """Largest `grant_ttl_s` of an agent: an expiry of a day, from a mistaken or a foreign agent
    that has ended, would otherwise hold the gate open for a day."""

    epoch: int
    mode: GrantMode
    reason: str = ""
    step_tokens_cap: int = 0
    kv_budget_tokens: int = 0
    """0 keeps the engine's own size."""
    pulses: tuple[str, ...] = ()
    """File names of pulses that must be present and fresh."""
    ttft_slo_s: float = 0.0
    itl_slo_s: float = 0.0
    epsilon: float = 0.05
    phantom_prompt_tokens: int = 0
    """Length of every prompt that might arrive; 0 draws it from each engine's own prompts."""
    production: ProductionModel = ProductionModel()
    blocking_ratio: float = 1.0
    """Share of a running guest step that can delay production: 1 without an isolation backend."""
    abort_grace_s: float = 10.0
    law: Law = Law.SLACK
    asleep: bool = False
    """Closed, with no work expected soon: the guest releases all its KV. Its weights stay and go on
    following new versions."""
    kv_retained_ratio: float = 0.25
    """Largest share of the guest's usable KV kept for trajectories that await a tool."""
    own_models: bool = False
    """Each engine's deadlines come from its own pulses' models, not from `production`: engines of
    one slot may differ."""
    kv_deadline_s: float = 2.0
    """Seconds for which a guest may hold more than its budget before it is ended."""
    preemption_s: float = 5e-4
    """Cost to production of a running guest step beside the share `blocking_ratio`: the switch, and
    caches that the step has filled. Not counted where the ratio is 1."""
    withheld: bool = False
    """Closed to measure production alone, or by an order or verdict against the guest: its other
    work rests too, unless production waits for it."""
    held: bool = False
    """The guest refuses new requests and goes on with its present ones."""


class GuestMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Accelerator memory of an engine's fullest rank, in bytes, as reported once it had started.

    All but the KV cache stays allocated while the gate is closed: the floor.
    """

    weights_bytes: Count = 0
    graphs_bytes: Count = 0
    activations_bytes: Count = 0
    """Workspaces, and memory that the allocator retains from the largest step."""
    other_bytes: Count = 0
    """Memory of the process outside its allocator: the driver's context, code, communicators."""
    kv_bytes: Count = 0
    whole: bool = False
    """False if the driver does not report the process's memory: then `other_bytes` is missing."""
    asleep_bytes_max: Count = 0
    """Upper bound of memory held while the weights are offloaded: all that was neither weights nor
    KV before. 0 if weights are never offloaded, or if unknown."""

    @property
    def floor_bytes(self) -> int:
        parts = (self.weights_bytes, self.graphs_bytes, self.activations_bytes, self.other_bytes)
        return sum(parts)


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that the slack law lends a guest while production is idle."""

    tokens: Count = 0
    """Largest step, in tokens; 0 is nothing, or unknown."""
    share_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Largest share of production's idle time, 0 to 1."""
    reason: str = ""
    """Why nothing is lent, and the remedy; "" if something is, or if unknown."""

    @property
    def summary(self) -> str:
        """One line for people; "" if unknown."""
        if not self.tokens:
            return f"nothing: {self.reason}" if self.reason else ""
        steps = f"steps of at most {self.tokens} tokens"
        return f"{steps}, {self.share_ratio:.0%} of production's idle time"


class Guest(Record, frozen=True, kw_only=True):
    """State and counters of one guest engine."""

    KIND: ClassVar[int] = 3

    epoch: Count = 0
    gate: str = "closed"
    reason: str = ""
    steps_launched: Count = 0
    steps_finished: Count = 0
    tokens_total: Count = 0
    last_step_tokens: Count = 0
    last_step_s: Amount = 0.0
    last_step_end_ns: Count = 0
    running: Count = 0
    waiting: Count = 0
    kv_tokens: Count = 0
    kv_tokens_total: Count = 0
    weight_version: str = ""
    aborted_total: Count = 0
    closings_total: Count = 0
    decide_s_mean: Amount = 0.0
    """Mean CPU time of the decision before a step, in its own thread."""
    kv_tokens_withheld: Count = 0
    """Tokens of the total that the budget takes out of use; their memory is released if the guest
    can."""
    processes: tuple[ProcessId, ...] = ()
    """Processes of the engine, as the guest sees them."""
    step_over_ratio: Amount = 0.0
    """Share of recent steps that took longer than predicted; 0.1 is ideal."""
    kv_tokens_retained: Count = 0
    """Prefixes kept for trajectories whose next turn has not arrived."""
    prefix_tokens_used_total: Count = 0
    """Tokens of kept prefixes that their next turn hit."""
    prefix_tokens_dropped_total: Count = 0
    """Tokens of kept prefixes that were evicted before the next turn, or that it did not hit."""
    isolation: str = ""
    """Backend that the guest was started under, as `ROSEMUX_ISOLATION` says; "" if not reported."""
    memory: GuestMemory = GuestMemory()
    weights_away: bool = False
    """Asleep with weights in host memory: the accelerator holds only context and graphs."""
    step_calibration: Calibration = Calibration()
    """Calibration of steps while production was idle."""
    beside_calibration: Calibration = Calibration()
    """Calibration of steps that production overlapped, over their predicted time alone: a P50 of 2
    means half of the accelerator."""
    blocking_ratio: Amount = 1.0
    """Promised by the isolation while the guest sees it hold; else 1."""
    isolation_fault: str = ""
    """Why its isolation does not hold."""
    leaving: bool = False
    """Stopped on purpose; set on the guest's behalf by the process that stops it."""
    step_work_s_total: Amount = 0.0
    """CPU time of all of RoseMux's own work in the engine loop: decisions, accounts and pages."""
    lending: Lending = Lending()
    """Lending by the guest's present step times; at most a second old."""
    steps_met: tuple[int, ...] = ()
    """Requests of production by the number of the guest's steps that were under way between their
    arrival and their first token: 0, 1, 2, 3, and 4 or more."""
    latest_steps_ns: tuple[tuple[Count, Count], ...] = ()
    """Start and end of the latest steps by CLOCK_MONOTONIC, at most 32, oldest first: a reader that
    looks more often than these end sees every step."""
