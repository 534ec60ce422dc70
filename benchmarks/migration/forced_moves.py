"""Turns cut and moved at chosen tokens, beside the same turns unmoved.

Two real engines in float32 follow a store through the gateway. Each setting of the sampling surface
is asked for twice: once unmoved, once cut and moved to the other engine at one to three random
tokens, half of the turns streamed, half as whole replies. Greedy, so that the ids must be equal; a
turn that differs is listed with the gap between the two best candidates where it first does. The
control moves the same turns as longer prompts.
Then the same engines, started anew, follow a store of LoRA adapters.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from benchmarks.migration import lora
from benchmarks.migration.cluster import Cluster, cluster, engines
from benchmarks.migration.comparison import ComparedTurns, summary
from benchmarks.migration.model import (
    BOS_ID,
    FIRST_ID,
    VOCABULARY,
    publish_model,
    write_model,
)
from benchmarks.migration.surface import LORA_SURFACE, MAX_TOKENS, SURFACE, SurfaceSetting
from benchmarks.testbed.prerequisites import free_ports
from scheduler.gateway import running_attempt
from scheduler.gateway.fleet_member import FleetMember
from scheduler.gateway.policy.turn import Turn

CONTEXT_TOKENS = 512


async def measured_moves(*, turns: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rosemux-migration-") as folder:
        root = Path(folder)
        texts = [path.read_text() for path in sorted(Path("docs").glob("*.md"))]
        write_model(root / "model", texts=texts, context_tokens=CONTEXT_TOKENS, seed=seed)
        publish_model(root / "model", root / "store")
        ports = free_ports(2)
        with engines(root / "model", ports=ports, context_tokens=CONTEXT_TOKENS, logs=root):
            async with cluster(ports) as both:
                await both.ready()
                await both.publish("store")
                pairs = await _pairs(both, turns=turns, random=Random(seed))
                base = await _greedy_turns(both, turns=turns, random=Random(seed))
                with each_token_alone():
                    seeded = await _seeded(both, turns=turns, random=Random(seed))
                counters = asdict(both.counters)
                with output_as_prompt():
                    control = await _pairs(both, turns=turns, random=Random(seed), name="control")
        adapted = await _adapted(root, base, turns=turns, seed=seed)
    found = summary(pairs) | {"ledger": counters, "seed": seed, "turns_each": turns}
    return found | {"seeded": seeded, "control": summary(control)["settings"], "lora": adapted}


async def _adapted(root: Path, base: list[list[int]], *, turns: int, seed: int) -> dict[str, Any]:
    """Moved turns of a LoRA adapter; `unlike_base` of its greedy turns differ from the model's."""
    lora.publish_adapter(root / "model", root, seed=seed)
    ports = free_ports(2)
    with engines(
        root / "model",
        ports=ports,
        context_tokens=CONTEXT_TOKENS,
        logs=root,
        arguments=lora.ENGINE_ARGUMENTS,
    ):
        async with cluster(ports, adapter=lora.NAME) as both:
            await both.ready()
            await both.publish("lora")
            own = await _greedy_turns(both, turns=turns, random=Random(seed))
            pairs = await _pairs(
                both, turns=turns, random=Random(seed), name="lora", surface=LORA_SURFACE
            )
    unlike = sum(ids != other for ids, other in zip(own, base, strict=True))
    return summary(pairs) | {"unlike_base": unlike}


@contextmanager
def output_as_prompt() -> Iterator[None]:
    """The control: turns go on elsewhere as longer prompts, whatever their sampling."""
    with (
        mock.patch.object(FleetMember, "resumes", False),
        mock.patch.object(Turn, "counts_output", False),
    ):
        yield


@contextmanager
def each_token_alone() -> Iterator[None]:
    """Tokens of streams are not read together, so that two turns can be cut at the same one."""
    with mock.patch.object(running_attempt, "STREAMED_TOGETHER_S", 0.0):
        yield


async def _greedy_turns(both: Cluster, *, turns: int, random: Random) -> list[list[int]]:
    done = []
    for number in range(turns):
        turn = await both.turn(f"base-{number}", _prompt(random), _greedy({}))
        done.append(list(turn.token_ids))
    return done


def _prompt(random: Random) -> list[int]:
    length = random.randrange(4, 24)
    return [BOS_ID, *(random.randrange(FIRST_ID, VOCABULARY) for _ in range(length))]


async def _pairs(
    both: Cluster,
    *,
    turns: int,
    random: Random,
    name: str = "pair",
    surface: tuple[SurfaceSetting, ...] = SURFACE,
) -> list[ComparedTurns]:
    pairs = []
    for number in range(turns):
        prompt = _prompt(random)
        plain = await both.turn(f"{name}-plain-{number}", prompt, _greedy({}))
        pieces = [await both.text([token]) for token in plain.token_ids]
        for setting in surface:
            pair = _pair(both, setting, number, prompt, pieces, plain.token_ids, random)
            pairs.append(await pair)
    return pairs


async def _seeded(both: Cluster, *, turns: int, random: Random) -> dict[str, int]:
    """Sampled turns with a seed: unmoved, and moved twice at the same token.

    A continuation's seed is derived from the seed and the tokens so far. Moved turns that left at
    the same token must therefore be equal, and equal to the unmoved one up to the move.
    """
    found = {"turns": 0, "equal_to_each_other": 0, "equal_up_to_the_move": 0, "equal_to_unmoved": 0}
    for number in range(turns):
        prompt = [BOS_ID, *(random.randrange(FIRST_ID, VOCABULARY) for _ in range(12))]
        sampling = _greedy({"temperature": 1.0, "seed": random.randrange(1 << 31)})
        at = [random.randrange(2, MAX_TOKENS - 8)]
        still = await both.turn(f"seeded-{number}", prompt, sampling)
        one, other = [
            await both.turn(f"seeded-{number}-{again}", prompt, sampling, moves=at)
            for again in ("a", "b")
        ]
        seams = [[span.start for span in turn.choice().spans] for turn in (one, other)]
        if len(seams[0]) < 2 or seams[0] != seams[1]:
            continue
        first = seams[0][1]
        found["turns"] += 1
        found["equal_to_each_other"] += one.token_ids == other.token_ids
        found["equal_up_to_the_move"] += one.token_ids[:first] == still.token_ids[:first]
        found["equal_to_unmoved"] += one.token_ids == still.token_ids
    return found


async def _pair(
    both: Cluster,
    setting: SurfaceSetting,
    number: int,
    prompt: list[int],
    pieces: list[str],
    plain: list[int],
    random: Random,
) -> ComparedTurns:
    sampling = _greedy(setting.sampling(pieces, plain, random))
    prompt = [*prompt, *setting.ends_prompt]
    name = f"{setting.name}-{number}".replace(" ", "_").replace(",", "")
    began_s = both.clock.now()
    still = await both.turn(f"{name}-still", prompt, sampling)
    each_s = (both.clock.now() - began_s) / len(still.token_ids)
    last = len(still.token_ids) - 1
    moves = [random.randint(1, last) for _ in range(random.randint(1, 3))] if last >= 1 else []
    how: dict[str, Any] = {"moves": moves}
    if number % 2:
        how = {"moves_s": [each_s * (at + random.random()) for at in moves]}
    moved = await both.turn(f"{name}-moved", prompt, sampling, **how)
    return ComparedTurns.of(setting.name, still, moved, planned_moves=len(set(moves)))


def _greedy(sampling: dict[str, Any]) -> dict[str, Any]:
    """A grammar ends by EOS; all other turns go on to their full length or their own stop."""
    endless = "structured_outputs" not in sampling
    usual = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "logprobs": 2, "ignore_eos": endless}
    return usual | sampling
