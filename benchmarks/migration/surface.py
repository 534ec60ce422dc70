"""The sampling surface: settings under which a moved turn must equal the unmoved one."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.migration.model import THINK_ID

MAX_TOKENS = 48

Sampling = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SurfaceSetting:
    name: str
    sampling: Callable[[list[str], list[int], Random], Sampling]
    """From the text pieces and ids of the plain greedy turn, so that stops and bad words occur."""
    ends_prompt: tuple[int, ...] = ()


def _fixed(**sampling: Any) -> Callable[[list[str], list[int], Random], Sampling]:
    return lambda _pieces, _ids, _random: sampling


def _stop_string(pieces: list[str], _ids: list[int], random: Random) -> Sampling:
    """A string over several tokens of the greedy text, so that a move may fall within it."""
    at = random.randrange(MAX_TOKENS // 3, MAX_TOKENS - 6)
    return {"stop": ["".join(pieces[at : at + 4])[1:-1] or pieces[at]]}


def _stop_token(_pieces: list[str], ids: list[int], random: Random) -> Sampling:
    return {"stop_token_ids": [random.choice(ids[MAX_TOKENS // 2 :])], "min_tokens": 8}


def _bad_words(pieces: list[str], _ids: list[int], random: Random) -> Sampling:
    at = random.randrange(4, MAX_TOKENS - 8)
    return {"bad_words": ["".join(pieces[at : at + 2]).strip() or "the"]}


def _thinking(_pieces: list[str], _ids: list[int], random: Random) -> Sampling:
    """Forces an end of several tokens after the budget."""
    return {"thinking_token_budget": random.randrange(MAX_TOKENS // 2)}


def _thinking_penalised(pieces: list[str], ids: list[int], random: Random) -> Sampling:
    return _thinking(pieces, ids, random) | {"frequency_penalty": 0.8}


def _repetition(_pieces: list[str], _ids: list[int], random: Random) -> Sampling:
    """Two tokens by turns, until they count as a pattern."""
    pattern = {"max_pattern_size": 4, "min_count": random.randrange(5, 10)}
    liked = {str(token): 40.0 for token in (70, 71)}
    return {"repetition_detection": pattern, "logit_bias": liked}


_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "steps": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "steps"],
}

SURFACE = (
    SurfaceSetting("greedy", _fixed()),
    SurfaceSetting("presence_penalty", _fixed(presence_penalty=1.5)),
    SurfaceSetting("frequency_penalty", _fixed(frequency_penalty=1.2)),
    SurfaceSetting("repetition_penalty", _fixed(repetition_penalty=1.3)),
    SurfaceSetting(
        "all penalties", _fixed(presence_penalty=0.7, frequency_penalty=0.6, repetition_penalty=1.1)
    ),
    SurfaceSetting("min_tokens", _fixed(min_tokens=30, logit_bias={"2": 100.0}, ignore_eos=False)),
    SurfaceSetting("logit_bias", _fixed(logit_bias={"70": 4.0, "71": -4.0})),
    SurfaceSetting("allowed_token_ids", _fixed(allowed_token_ids=list(range(60, 400)))),
    SurfaceSetting("EOS", _fixed(ignore_eos=False)),
    SurfaceSetting("stop string", _stop_string),
    SurfaceSetting("stop token", _stop_token),
    SurfaceSetting("bad words", _bad_words),
    SurfaceSetting("repetition detection", _repetition),
    SurfaceSetting("json", _fixed(structured_outputs={"json": _SCHEMA})),
    SurfaceSetting("regex", _fixed(structured_outputs={"regex": r"([a-z]{2,6}-){3,12}[0-9]+"})),
    SurfaceSetting(
        "choice",
        _fixed(
            structured_outputs={"choice": ["alpha beta gamma delta", "alpha beta gamma epsilon"]}
        ),
    ),
    SurfaceSetting(
        "characters of several tokens", _fixed(structured_outputs={"regex": "[äöü€]{40}"})
    ),
    SurfaceSetting("thinking budget", _thinking, ends_prompt=(THINK_ID,)),
    SurfaceSetting("thinking budget, penalised", _thinking_penalised, ends_prompt=(THINK_ID,)),
    SurfaceSetting(
        "json, penalised", _fixed(structured_outputs={"json": _SCHEMA}, frequency_penalty=0.8)
    ),
)

LORA_SURFACE = tuple(
    setting
    for setting in SURFACE
    if setting.name in ("greedy", "all penalties", "stop string", "json")
)
"""Settings that turns of a LoRA adapter are asked for with: each kind once."""
