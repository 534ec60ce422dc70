"""Terms by which the slack law judges each pulse of a slot, joined over one engine's processes.

The API-server processes of one engine share its steps: their decodes form one batch, and their
models describe one engine. Unlike engines keep their own models: a share epsilon of a large model's
step is far longer than the share of a small model's step.

Requests are counted twice, by the middleware (in flight) and by the cores: the larger count is
used.
"""

from collections.abc import Sequence

import msgspec

from coserve.law.phantom import Phantom, phantom
from harvester.contracts.page import Grant, ProductionModel, PulseHead, engine_of, latest_cores

# A pulse beats every 100 ms, so requests of one step each are visible only at the end of a beat.
UNSEEN_HOLD_NS = 300_000_000
"""An engine counts as busy for this long after a step for requests that no middleware saw."""


class EngineTerms(msgspec.Struct):
    model: ProductionModel
    """Step-time model of the engine running alone."""
    prompts: tuple[int, ...]
    """Tokens of production's prompts, each for an equal share of them; empty if unknown."""
    longest_prompt: int
    """P99 of the prompts, in tokens."""
    decoding: int
    """Decoding requests of the whole engine, over its processes, or its batch if that is larger."""
    cores: int = 1
    """Data-parallel ranks that the decodes may be spread over."""
    unseen: int = 0
    """Requests that the cores hold and that no process of the engine has in flight."""
    unseen_step_ns: int = 0
    """End of the last step that served an unseen request, as counted by the processes."""
    last_word_ns: int = 0
    """Oldest report time among the cores that hold requests."""

    def serves_unseen(self, *, now_ns: int) -> bool:
        if self.unseen:
            return True
        return self.unseen_step_ns > 0 and now_ns - self.unseen_step_ns <= UNSEEN_HOLD_NS

    @property
    def unseen_since_ns(self) -> int:
        """Start of the interval in which the next step for unseen requests runs (ns)."""
        return self.last_word_ns if self.unseen else self.unseen_step_ns

    def phantom(self, grant: Grant) -> Phantom:
        """The waits of a request that might arrive now."""
        slo_s, epsilon = grant.ttft_slo_s, grant.epsilon
        return phantom(self.prompts, self.longest_prompt, self.model, slo_s, epsilon)


def terms_of(pulses: Sequence[PulseHead], grant: Grant) -> list[EngineTerms]:
    """One entry for each pulse, in the order of `grant.pulses`; pulses of one engine share
    theirs.
    """
    if len(pulses) == 1 and not grant.own_models:
        alone = _of_one(pulses[0], grant)
        if _tells(pulses[0]):
            _count_unseen(alone, pulses)
        return [alone]
    engines: dict[str, EngineTerms] = {}
    found: list[EngineTerms] = []
    for place, pulse in enumerate(pulses):
        name = grant.pulses[place] if place < len(grant.pulses) else f".{place}"
        engine = engine_of(name)
        terms = engines.get(engine)
        if terms is None:
            terms = engines[engine] = _of_one(pulse, grant)
        else:
            _join(terms, pulse, grant)
        found.append(terms)
    if [pulse for pulse in pulses if _tells(pulse)]:
        for terms in engines.values():
            own = zip(pulses, found, strict=True)
            _count_unseen(terms, [pulse for pulse, of_engine in own if of_engine is terms])
    return found


def idle(pulses: Sequence[PulseHead], terms: Sequence[EngineTerms], *, now_ns: int) -> bool:
    """Whether no engine of the slot has any work."""
    if any(pulse.in_flight for pulse in pulses):
        return False
    return not any(of_engine.serves_unseen(now_ns=now_ns) for of_engine in terms)


def _of_one(pulse: PulseHead, grant: Grant) -> EngineTerms:
    model = pulse.model if grant.own_models else grant.production
    fixed = grant.phantom_prompt_tokens
    prompts = (fixed,) if fixed else pulse.prompt_tokens_quantiles
    longest = fixed or pulse.prompt_tokens_p99
    return EngineTerms(model, prompts, longest, pulse.decoding, len(pulse.cores) or 1)


def _join(terms: EngineTerms, pulse: PulseHead, grant: Grant) -> None:
    """Add another process of the same engine."""
    terms.decoding += pulse.decoding
    terms.cores = max(terms.cores, len(pulse.cores))
    if grant.own_models:
        terms.model = terms.model.upper(pulse.model)
    if not grant.phantom_prompt_tokens:
        terms.prompts += pulse.prompt_tokens_quantiles
        terms.longest_prompt = max(terms.longest_prompt, pulse.prompt_tokens_p99)


def _tells(pulse: PulseHead) -> bool:
    """Whether the pulse shows unseen requests. Usually it shows none: most guest steps meet idle
    production."""
    return bool(
        pulse.unseen_step_ns or [core for core in pulse.cores if core.running or core.waiting]
    )


def _count_unseen(terms: EngineTerms, pulses: Sequence[PulseHead]) -> None:
    """Count unseen requests. `pulses` are all of one engine. Requests that wait for their first
    token may be in the batch already; they have their own deadline."""
    terms.unseen_step_ns = max([pulse.unseen_step_ns for pulse in pulses])
    holding = [core for core in latest_cores(pulses) if core.running or core.waiting]
    if not holding:
        return
    terms.last_word_ns = min([core.told_ns for core in holding])
    running = sum([core.running for core in holding])
    in_batch = running - sum([pulse.waiting for pulse in pulses])
    terms.unseen = max(0, in_batch - terms.decoding)
    terms.decoding += terms.unseen
    if terms.decoding == 0 and not any(pulse.in_flight for pulse in pulses):
        terms.unseen = 1  # Stands for the held requests without a place in the batch.
