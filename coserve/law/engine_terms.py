"""By what each pulse of a slot is judged, where one engine has several of them.

The API-server processes of one engine share its steps: what they decode they decode together, and
their models are of one engine. Engines that are unlike keep models of their own: a share epsilon of
a large model's step is far more than that of a small one's.

What is in flight is what the middleware sees, and the cores say what they hold: the larger counts.
"""

from collections.abc import Sequence

import msgspec

from harvester.contracts.page import Grant, ProductionModel, PulseHead, engine_of, latest_cores

# The beat of a pulse is 100 ms: requests of one step each are seen at the end of it only.
UNSEEN_HOLD_NS = 300_000_000
"""So long after a step for requests that no middleware saw the engine counts as busy with them."""


class EngineTerms(msgspec.Struct):
    model: ProductionModel
    """Of the engine alone."""
    phantom_prompt_tokens: int
    decoding: int
    """Requests of the whole engine, over its processes, or in its batch if these are more."""
    cores: int = 1
    """Data-parallel ranks that these may be spread over."""
    unseen: int = 0
    """Requests that the cores hold and that no process of the engine has in flight."""
    unseen_step_ns: int = 0
    """End of the last step that served such a request, as the processes counted it."""
    last_word_ns: int = 0
    """When the core that has been silent longest spoke last, of those that hold requests."""

    def serves_unseen(self, *, now_ns: int) -> bool:
        if self.unseen:
            return True
        return self.unseen_step_ns > 0 and now_ns - self.unseen_step_ns <= UNSEEN_HOLD_NS

    @property
    def unseen_since_ns(self) -> int:
        """From when on the next step for them takes its time."""
        return self.last_word_ns if self.unseen else self.unseen_step_ns


def terms_of(pulses: Sequence[PulseHead], grant: Grant) -> list[EngineTerms]:
    """One for each pulse; `grant.pulses` names them in this order."""
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
    """Whether no engine of the slot has anything to do."""
    if any(pulse.in_flight for pulse in pulses):
        return False
    return not any(of_engine.serves_unseen(now_ns=now_ns) for of_engine in terms)


def _of_one(pulse: PulseHead, grant: Grant) -> EngineTerms:
    phantom = grant.phantom_prompt_tokens
    if grant.own_models:
        return EngineTerms(
            pulse.model, phantom or pulse.prompt_tokens_p99, pulse.decoding, len(pulse.cores) or 1
        )
    return EngineTerms(grant.production, phantom, pulse.decoding, len(pulse.cores) or 1)


def _join(terms: EngineTerms, pulse: PulseHead, grant: Grant) -> None:
    """Another process of the same engine."""
    terms.decoding += pulse.decoding
    terms.cores = max(terms.cores, len(pulse.cores))
    if grant.own_models:
        terms.model = terms.model.upper(pulse.model)
        if not grant.phantom_prompt_tokens:
            terms.phantom_prompt_tokens = max(terms.phantom_prompt_tokens, pulse.prompt_tokens_p99)


def _tells(pulse: PulseHead) -> bool:
    """Whether there is anything to count: before most steps of a guest production is idle."""
    return bool(
        pulse.unseen_step_ns or [core for core in pulse.cores if core.running or core.waiting]
    )


def _count_unseen(terms: EngineTerms, pulses: Sequence[PulseHead]) -> None:
    """`pulses` are all of the engine's; those that wait for their first token may be in its batch
    already, and have a deadline of their own."""
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
        terms.unseen = 1  # Of those without a place in the batch.
