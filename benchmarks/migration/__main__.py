"""`python -m benchmarks.migration --json PATH`: does a turn that moves equal the one that stays?

Two real engines in float32 follow a store through the gateway. Each setting of the sampling surface
is asked for twice: once unmoved, once cut and moved to the other engine at one to three random
tokens. Greedy, so that the ids must be equal; a turn that differs is listed with the gap between
the two best candidates where it first does. The control moves the same turns as longer prompts.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from benchmarks.migration.cluster import Cluster, cluster, engines
from benchmarks.migration.comparison import Pair, summary
from benchmarks.migration.model import BOS_ID, VOCABULARY, publish_model, write_model
from benchmarks.migration.surface import MAX_TOKENS, SURFACE, Setting
from scheduler.gateway.engine_fleet import Member
from scheduler.gateway.policy.trajectories import Turn

CONTEXT_TOKENS = 512
PORTS = [18461, 18462]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.migration", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--turns", type=int, default=20, help="moved turns of each setting")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    result = asyncio.run(measured(turns=given.turns, seed=given.seed))
    text = json.dumps(result, indent=1)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text)
    print(text)


async def measured(*, turns: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rosemux-migration-") as folder:
        root = Path(folder)
        texts = [path.read_text() for path in sorted(Path("docs").glob("*.md"))]
        write_model(root / "model", texts=texts, context_tokens=CONTEXT_TOKENS, seed=seed)
        publish_model(root / "model", root / "store")
        with engines(root / "model", ports=PORTS, context_tokens=CONTEXT_TOKENS, logs=root):
            async with cluster(PORTS) as both:
                await both.ready()
                await both.publish("store")
                pairs = await _pairs(both, turns=turns, random=Random(seed))
                counters = asdict(both.counters)
                with output_as_prompt():
                    control = await _pairs(both, turns=turns, random=Random(seed), name="control")
    found = summary(pairs) | {"ledger": counters, "seed": seed, "turns_each": turns}
    return found | {"control": summary(control)["settings"]}


@contextmanager
def output_as_prompt() -> Iterator[None]:
    """The control: turns go on elsewhere as longer prompts, whatever their sampling."""
    with (
        mock.patch.object(Member, "resumes", False),
        mock.patch.object(Turn, "counts_output", False),
    ):
        yield


async def _pairs(both: Cluster, *, turns: int, random: Random, name: str = "pair") -> list[Pair]:
    pairs = []
    for number in range(turns):
        prompt = [
            BOS_ID,
            *(random.randrange(3, VOCABULARY) for _ in range(random.randrange(4, 24))),
        ]
        plain = await both.turn(f"{name}-plain-{number}", prompt, _greedy({}), moves=[])
        pieces = [await both.text([token]) for token in plain.token_ids]
        for setting in SURFACE:
            pairs.append(
                await _pair(both, setting, number, prompt, pieces, plain.token_ids, random)
            )
    return pairs


async def _pair(
    both: Cluster,
    setting: Setting,
    number: int,
    prompt: list[int],
    pieces: list[str],
    plain: list[int],
    random: Random,
) -> Pair:
    sampling = _greedy(setting.sampling(pieces, plain, random))
    name = f"{setting.name}-{number}".replace(" ", "_").replace(",", "")
    still = await both.turn(f"{name}-still", prompt, sampling, moves=[])
    last = len(still.token_ids) - 1
    moves = [random.randint(1, last) for _ in range(random.randint(1, 3))] if last >= 1 else []
    moved = await both.turn(f"{name}-moved", prompt, sampling, moves=moves)
    return Pair.of(setting.name, still, moved)


def _greedy(sampling: dict[str, Any]) -> dict[str, Any]:
    """A grammar ends by EOS; all other turns go on to their full length or their own stop."""
    endless = "structured_outputs" not in sampling
    usual = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "logprobs": 2, "ignore_eos": endless}
    return usual | sampling


if __name__ == "__main__":
    main()
