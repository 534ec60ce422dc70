"""Loads that production has never shown: a prompt of 16k tokens, and KV filled to the brim.

Both amid the load that it knows, alone and beside rollouts. Production must fail no request. A
restart of production is beside this file.
"""

from typing import Any

from benchmarks.coserve.rounds import Runner
from benchmarks.coserve.side_by_side import SideBySide, compared
from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.trace import Arrival

LONG_PROMPT_TOKENS = 16_384
CONTEXT_TOKENS = LONG_PROMPT_TOKENS + 128
"""Context of a production engine that serves the long prompt."""
_BLOCK_TOKENS, _BLOCKS = 128, 400
KV_TOKENS = _BLOCK_TOKENS * _BLOCKS
KV_ARGUMENTS = ("--block-size", str(_BLOCK_TOKENS), "--num-gpu-blocks-override", str(_BLOCKS))
"""A third of what a gibibyte holds: so that it can be filled in seconds."""
_LONG_OUTPUT_TOKENS = 16
_LONG_AT_S = 2.0
_USUAL_S = 10.0
"""Seconds of usual load around it."""
_FULL_RATIO = 0.99
_CROWD = 28
"""Requests of the crowd, within the 32 that production holds at once: the usual load goes on."""
_CROWD_WITHIN_S = 1.0
_CROWD_OUTPUT_TOKENS = 192
"""More steps than all prompts of the crowd take, so that the first is there when the last comes."""
_PATIENCE_S = 240.0
"""Time limit of long requests, which are served for as long as they take."""
_INDEX = 1 << 40
"""First index of requests outside every trace."""


def long_prompt(excerpt: Excerpt) -> list[Arrival]:
    long = Arrival(
        index=_INDEX,
        t_s=_LONG_AT_S,
        input_tokens=LONG_PROMPT_TOKENS,
        output_tokens=_LONG_OUTPUT_TOKENS,
    )
    return _amid(excerpt, [long])


def crowd(excerpt: Excerpt) -> list[Arrival]:
    """Requests that together ask for all of production's KV and a little more."""
    crowded = [
        Arrival(
            index=_INDEX + position,
            t_s=_CROWD_WITHIN_S * position / _CROWD,
            input_tokens=-(-KV_TOKENS // _CROWD),
            output_tokens=_CROWD_OUTPUT_TOKENS,
        )
        for position in range(_CROWD)
    ]
    return _amid(excerpt, crowded)


def _amid(excerpt: Excerpt, unseen: list[Arrival]) -> list[Arrival]:
    load = [*excerpt.evenly().until(_USUAL_S), *unseen]
    return sorted(load, key=lambda arrival: arrival.t_s)


async def long_prompts(runner: Runner, trials: int, excerpt: Excerpt) -> dict[str, Any]:
    """The ratios are those of the requests around it, and its own."""
    load = SideBySide(runner, trials, patience_s=_PATIENCE_S, warmed_up=True)
    seen = await load.run("long_prompt", long_prompt(excerpt))
    own = compared(seen, lambda request: request.trace_index >= _INDEX)
    found = compared(seen, lambda request: request.trace_index < _INDEX)
    return found | {"prompt_tokens": LONG_PROMPT_TOKENS, "own_ttft_ratio": own["ttft_p50_ratio"]}


async def full_kv(runner: Runner, trials: int, excerpt: Excerpt) -> dict[str, Any]:
    load = SideBySide(runner, trials, patience_s=_PATIENCE_S)
    seen = await load.run("full_kv", crowd(excerpt))
    return compared(seen) | {
        "kv_usage_ratio": load.kv_usage_ratio,
        "filled": load.kv_usage_ratio >= _FULL_RATIO,
    }
