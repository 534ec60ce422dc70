"""The client against an engine in the same process, in virtual time."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.testbed.production import ProductionClient, RandomPrompts, StreamWatch
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.trace import Arrival
from examples.demo.records import DemoArm

EVENT = b'data: {"choices":[{"text":"x"}]}\n\n'
DONE = b"data: [DONE]\n\n"
START_S = 100.0


class LoopClock:
    def now(self) -> float:
        return START_S + asyncio.get_running_loop().time()


@dataclass(slots=True)
class Engine:
    """Stands for aiohttp's session: `first_s`, then a token every `step_s`."""

    first_s: float = 0.5
    step_s: float = 0.1
    status: int = 200
    cut_after: int | None = None
    refused: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def post(self, url: str, *, data: bytes, headers: dict[str, str]) -> AsyncIterator[Any]:
        self.sent_s.append(LoopClock().now())
        if self.refused:
            raise aiohttp.ClientConnectionError("nobody there")
        self.bodies.append(json.loads(data))
        yield Reply(self, self.bodies[-1]["max_tokens"])


@dataclass(slots=True)
class Reply:
    engine: Engine
    tokens: int

    @property
    def status(self) -> int:
        return self.engine.status

    @property
    def content(self) -> "Reply":
        return self

    async def read(self, most: int) -> bytes:
        return b"the engine is full"[:most]

    async def iter_any(self) -> AsyncIterator[bytes]:
        await asyncio.sleep(self.engine.first_s)
        for place in range(self.tokens):
            if place == self.engine.cut_after:
                return
            if place:
                await asyncio.sleep(self.engine.step_s)
            yield EVENT
        yield DONE


async def replayed(
    engine: Engine, arrivals: list[Arrival], *, stop_after_s: float | None = None, **given: Any
) -> list[ProductionRequest]:
    records: list[ProductionRequest] = []
    client = ProductionClient(
        session=cast(aiohttp.ClientSession, engine),
        url="http://engine",
        model="production",
        prompts=RandomPrompts(seed=1, first_id=5, last_id=90),
        clock=LoopClock(),
        record=records.append,
        **given,
    )
    stopped = asyncio.Event()
    if stop_after_s is not None:
        asyncio.get_running_loop().call_later(stop_after_s, stopped.set)
    await client.replay(
        arrivals, arm=DemoArm.FIXED, block=2, start_s=LoopClock().now(), stopped=stopped
    )
    return sorted(records, key=lambda record: record.trace_index)


def arrival(index: int, t_s: float, output_tokens: int = 3) -> Arrival:
    return Arrival(index=index, t_s=t_s, input_tokens=4, output_tokens=output_tokens)


async def test_sends_each_request_when_due_however_slow_the_others_are() -> None:
    engine = Engine(first_s=20.0)
    records = await replayed(engine, [arrival(0, 1.0), arrival(1, 1.5), arrival(2, 4.0)])
    assert engine.sent_s == pytest.approx([101.0, 101.5, 104.0])
    assert [record.due_s for record in records] == pytest.approx([101.0, 101.5, 104.0])
    assert [record.ttft_s for record in records] == pytest.approx([20.0] * 3)
    assert not any(record.failed for record in records)


async def test_counts_latency_from_the_due_time_even_when_sent_late() -> None:
    (record,) = await replayed(Engine(first_s=0.5), [arrival(0, -2.0)])
    assert record.ttft_s == pytest.approx(2.5)
    assert record.sent_s == pytest.approx(START_S), "and notes when it sent the request"


async def test_records_one_latency_per_later_token() -> None:
    (record,) = await replayed(Engine(step_s=0.1), [arrival(0, 0.0, output_tokens=4)])
    assert record.itl_s == pytest.approx([0.1, 0.1, 0.1])
    assert (record.arm, record.block, record.output_tokens) == (DemoArm.FIXED, 2, 4)


async def test_asks_for_exactly_the_tokens_of_the_trace() -> None:
    engine = Engine()
    await replayed(engine, [arrival(0, 0.0, output_tokens=9)])
    (body,) = engine.bodies
    assert body["max_tokens"] == 9
    assert len(body["prompt"]) == 4
    assert all(5 <= token <= 90 for token in body["prompt"])
    assert body["ignore_eos"]
    assert body["stream"]
    assert body["temperature"] == 0


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        (Engine(status=503), "503: the engine is full"),
        (Engine(refused=True), "nobody there"),
        (Engine(cut_after=2), "ended before its last event"),
        (Engine(first_s=61.0), "no last token within 60 s"),
    ],
)
async def test_a_request_that_does_not_end_well_has_failed(engine: Engine, fault: str) -> None:
    (record,) = await replayed(engine, [arrival(0, 0.0)])
    assert record.failed
    assert fault in record.error


async def test_a_request_beyond_the_bound_fails_at_once() -> None:
    records = await replayed(
        Engine(first_s=5.0), [arrival(0, 0.0), arrival(1, 0.1), arrival(2, 9.0)], open_max=1
    )
    assert [record.failed for record in records] == [False, True, False]


async def test_sends_nothing_once_stopped_but_hears_the_rest_out() -> None:
    engine = Engine(first_s=10.0)
    records = await replayed(engine, [arrival(0, 1.0), arrival(1, 50.0)], stop_after_s=2.0)
    assert [record.trace_index for record in records] == [0]
    assert not records[0].failed
    assert LoopClock().now() < START_S + 20


def test_no_two_blocks_ask_the_same_prompt_and_a_repeated_run_does() -> None:
    prompts = RandomPrompts(seed=1, first_id=0, last_id=200)
    asked = Arrival(index=3, t_s=0.0, input_tokens=64, output_tokens=1)
    first = prompts.of(asked, arm=DemoArm.FIXED, block=0)
    assert first == prompts.of(asked, arm=DemoArm.FIXED, block=0)
    assert first != prompts.of(asked, arm=DemoArm.FIXED, block=1)
    assert first != prompts.of(asked, arm=DemoArm.HARVEST, block=0)


@given(st.lists(st.integers(0, 200), max_size=12))
def test_sees_every_event_once_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    stream = EVENT * 4 + DONE
    watch = StreamWatch(due_s=0.0)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    tokens_seen = 0
    for begin, end in itertools.pairwise(places):
        before = (watch.ttft_s is not None) + len(watch.itl_s)
        watch.read(stream[begin:end], now=float(end))
        reads = (watch.ttft_s is not None) + len(watch.itl_s) - before
        whole = [at for at in range(4) if begin < at * len(EVENT) + len(b"data: {") <= end]
        assert reads == (1 if whole else 0)
        tokens_seen += len(whole)
    assert tokens_seen == 4
    assert watch.done
    assert not watch.error


@given(st.integers(1, 40))
def test_an_error_inside_the_stream_is_a_failure_however_it_is_cut(cut: int) -> None:
    stream = EVENT + b'data: {"error":{"message":"out of memory"}}\n\n' + DONE
    watch = StreamWatch(due_s=0.0)
    for begin in range(0, len(stream), cut):
        watch.read(stream[begin : begin + cut], now=float(begin))
    assert watch.error.startswith('{"error"')
