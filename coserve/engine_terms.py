"""By what each pulse of a slot is judged, where one engine has several of them.

The API-server processes of one engine share its steps: what they decode they decode together, and
their models are of one engine. Engines that are unlike keep models of their own: a share epsilon of
a large model's step is far more than that of a small one's.
"""

from collections.abc import Sequence

import msgspec

from harvester.contracts.page import Grant, ProductionModel, PulseHead, engine_of


class EngineTerms(msgspec.Struct):
    model: ProductionModel
    """Of the engine alone."""
    phantom_prompt_tokens: int
    decoding: int
    """Requests of the whole engine, over its processes."""
    cores: int = 1
    """Data-parallel ranks that these may be spread over."""


def terms_of(pulses: Sequence[PulseHead], grant: Grant) -> list[EngineTerms]:
    """One for each pulse; `grant.pulses` names them in this order."""
    if len(pulses) == 1 and not grant.own_models:
        return [_of_one(pulses[0], grant)]
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
    return found


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
