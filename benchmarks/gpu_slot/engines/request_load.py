"""Requests that production is asked to serve: the same for every arm of a round. Reads no clock."""

from collections.abc import Mapping
from random import Random

import msgspec


class Request(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    """Arrival from the beginning of the load, in s."""
    prompt_tokens: int
    output_tokens: int


def poisson_load(
    *,
    rate_per_s: float,
    seconds: float,
    prompts: Mapping[int, float],
    output_tokens: int,
    seed: int,
) -> tuple[Request, ...]:
    """Open-loop arrivals over `seconds`; `prompts` maps prompt tokens to their weights."""
    rng = Random(seed)
    sizes, weights = list(prompts), list(prompts.values())
    requests, at_s = list[Request](), rng.expovariate(rate_per_s)
    while at_s < seconds:
        prompt_tokens = rng.choices(sizes, weights)[0]
        requests.append(
            Request(at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        )
        at_s += rng.expovariate(rate_per_s)
    return tuple(requests)
