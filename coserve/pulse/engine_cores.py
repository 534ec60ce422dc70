"""The steps of the engine cores behind one API-server process: one core, or one per data-parallel
rank.

Each core steps by itself, and each step's scheduler statistics reach one API server only. A
process's knowledge of a core may therefore be old, and carries its time.
"""

from dataclasses import dataclass, field

import msgspec

from harvester.contracts.page import EngineCore

# A page is 4 KiB.
_REPORTED_CORES = 16
_SILENT_NS = 1_000_000_000


class EngineStep(msgspec.Struct, frozen=True, kw_only=True):
    """One engine step as the statistics logger reports it."""

    running: int | None
    """Requests in the batch; None if this process got no scheduler statistics for the step, of
    which `kv_usage_ratio` and `waiting` are as well."""
    kv_usage_ratio: float | None
    ttft_s: tuple[float, ...] = ()
    """Time from arrival to first token of each request that got its first token, as vLLM
    measures."""
    wall_s: float = 0.0
    """The step's wall time, against which `ttft_s` is measured."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens among them that no step computed, as a cache had them."""
    generation_tokens: int = 0
    inter_token_s: tuple[float, ...] = ()
    finished_prompt_tokens: tuple[int, ...] = ()
    """Computed prompt tokens of each request that has ended."""
    rank: int = 0
    """Data-parallel rank of the engine core."""
    ours: bool = True
    """Whether the step held requests of this process."""
    waiting: int | None = None
    """Requests without a place in the batch."""

    @property
    def first_tokens(self) -> int:
        return len(self.ttft_s)

    @property
    def going_on(self) -> int:
        """This process's requests that got a token and want more."""
        return self.first_tokens + len(self.inter_token_s) - len(self.finished_prompt_tokens)

    @property
    def served(self) -> bool:
        """Whether the step gave output to this process's requests; aborted requests get none."""
        return bool(
            self.generation_tokens
            or self.first_tokens
            or self.prompt_tokens
            or self.inter_token_s
            or self.finished_prompt_tokens
        )


class Siblings(msgspec.Struct, frozen=True):
    """Totals of the engine's other API servers."""

    in_flight: int = 0
    waiting: int = 0
    decoding: int = 0
    requests_total: int = 0
    steps_total: int = 0
    """A step that served several processes is counted by each of them."""


NO_SIBLINGS = Siblings()


def only_decoding(before: Siblings | None, after: Siblings | None) -> bool:
    """Whether the siblings had no prefill in between, as far as is known."""
    if before is None or after is None or before.waiting or after.waiting:
        return False
    return before.requests_total == after.requests_total


@dataclass(slots=True)
class _Core:
    told: EngineCore
    """Latest statistics of the core; zeros if none came to this process."""
    last_step_ns: int = 0
    ours: int = 0
    """This process's requests that decode on the core, at its last step with such a request."""


@dataclass(slots=True)
class CoreTable:
    running: int = 0
    """Running requests of all cores."""
    kv_usage_ratio: float = 0.0
    """KV use of the fullest core."""
    reported: tuple[EngineCore, ...] = ()
    _cores: dict[int, _Core] = field(default_factory=dict)
    """Cores by data-parallel rank, in the order of their first report."""

    def __len__(self) -> int:
        return len(self._cores)

    def step(self, step: EngineStep, *, now_ns: int) -> int:
        """Record one step of a core; returns the end of its previous step (ns), 0 if there was
        none.
        """
        core = self._cores.get(step.rank)
        if core is None:
            core = self._cores[step.rank] = _Core(EngineCore(rank=step.rank))
        previous_ns, core.last_step_ns = core.last_step_ns, now_ns
        if step.ours:
            core.ours = max(0, step.going_on)
        if step.running is not None:
            core.told = EngineCore(
                rank=step.rank,
                told_ns=now_ns,
                kv_usage_ratio=step.kv_usage_ratio or 0.0,
                running=step.running,
                waiting=step.waiting or 0,
            )
        self._sum_up()
        return previous_ns

    def last_step_ns(self, *, decoding: int, now_ns: int) -> int:
        """End of the last step (ns) of the core whose requests have waited longest for their next
        token.

        Aborted requests count among their core's until it steps again: the excess over `decoding`
        is subtracted from cores that have been silent for over a second.
        """
        cores = self._cores.values()
        if len(self._cores) > 1 and decoding > 0:
            gone = sum(core.ours for core in cores) - decoding
            for core in sorted(cores, key=lambda core: core.last_step_ns):
                silent = now_ns - core.last_step_ns > _SILENT_NS
                if core.ours > (max(0, gone) if silent else 0):
                    return core.last_step_ns
                gone -= core.ours
        return max((core.last_step_ns for core in cores), default=0)

    def _sum_up(self) -> None:
        """Recompute the sums once a step, since a pulse is published at every arrival and end
        too.
        """
        told = [core.told for core in self._cores.values()]
        self.running = sum([core.running for core in told])
        self.kv_usage_ratio = max([core.kv_usage_ratio for core in told])
        if len(told) > _REPORTED_CORES:
            told.sort(key=lambda core: (core.running > 0, core.kv_usage_ratio), reverse=True)
        self.reported = tuple(told[:_REPORTED_CORES])
