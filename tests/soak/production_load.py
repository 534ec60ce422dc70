"""Production's clients: an open loop of light load, each request recorded."""

import random
from collections.abc import Iterator

from benchmarks.testbed.production import ProductionClient, RandomPrompts, production_session
from benchmarks.testbed.production_model import PROMPT_IDS
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.trace import Arrival
from harvester.contracts.clock import Clock
from tests.soak.parts import PRODUCTION
from tests.soak.records import ProductionAnswer, Sink

RATE_PER_S = 0.6
"""Mean of the open loop: production is idle for most of the time."""
_INPUT_TOKENS, _OUTPUT_TOKENS = (32, 700), (4, 24)
TIMEOUT_S = 120.0


def arrivals(seed: str, *, rate_per_s: float = RATE_PER_S) -> Iterator[Arrival]:
    """Poisson arrivals without end."""
    rng, at_s, index = random.Random(seed), 0.0, 0
    while True:
        at_s += rng.expovariate(rate_per_s)
        yield Arrival(
            index=index,
            t_s=at_s,
            input_tokens=rng.randint(*_INPUT_TOKENS),
            output_tokens=rng.randint(*_OUTPUT_TOKENS),
        )
        index += 1


async def serve_production(url: str, *, seed: int, piece: int, clock: Clock, sink: Sink) -> None:
    """Sends for ever; cancelled, it drops what is open."""

    def record(request: ProductionRequest) -> None:
        sink(
            ProductionAnswer(
                due_s=request.due_s,
                ended_s=clock.now(),
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                ttft_s=request.ttft_s,
                itl_s=tuple(round(each, 4) for each in request.itl_s),
                error=request.error,
            )
        )

    prompts = RandomPrompts(seed=seed, first_id=PROMPT_IDS[0], last_id=PROMPT_IDS[1])
    async with production_session() as session:
        client = ProductionClient(
            session=session,
            url=url,
            model=PRODUCTION,
            prompts=prompts,
            clock=clock,
            record=record,
            timeout_s=TIMEOUT_S,
        )
        await client.replay(
            arrivals(f"{seed} {piece}"), arm="soak", block=piece, start_s=clock.now()
        )
