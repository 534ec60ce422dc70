"""A turn and the clients that wait for it."""

import asyncio
from typing import Any

import msgspec
import pytest

from harvester.contracts.ids import JobId, TrajectoryId
from harvester.contracts.wire.rollouts import FinishReason, GenerateRequest, SamplingParams
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engines.engine_faults import RequestRefused
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.job_turns import ClientRequest, IdInUse, JobTurns, Listen
from scheduler.gateway.policy.answered_turns import AnswerBounds, AnsweredTurns
from scheduler.gateway.policy.routing import RoutingPolicy
from scheduler.gateway.policy.routing_events import RoutingConfig
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.requests import decode_generate
from scheduler.gateway.samples import samples_of
from tests.unit.scheduler.gateway.registry import registry_of
from tests.virtual_clock import VirtualClock

JOB = JobId("job")


class Work(GatewayMetrics):
    """Turns that end when `goes_on` is set, and their metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.begun: list[Turn] = []
        self.ended: list[Turn] = []
        self.fault: Exception | None = None
        self.ledger = TurnLedger(JOB)
        self.clock = VirtualClock()

    async def run(self, turn: Turn, on_tokens) -> None:
        self.begun.append(turn)
        await self.goes_on.wait()
        if self.fault is not None:
            raise self.fault
        turn.end(FinishReason.LENGTH)

    def turn_ended(self, turn: Turn) -> None:
        super().turn_ended(turn)
        self.ended.append(turn)

    def open_turns(self, *, rejoin_s: float) -> JobTurns:
        bounds = AnswerBounds(keep_s=60, turns=8, size_bytes=1 << 20)
        registry, routing = registry_of(JOB, tenant="alice"), RoutingPolicy(RoutingConfig())
        return JobTurns(
            self.ledger,
            self,  # type: ignore[arg-type]
            registry,
            Dispatcher(routing, registry, self.clock, queue_s=60, queued=asyncio.Event()),
            AnsweredTurns(bounds),
            SchedulerState(None),
            self,
            self.clock,
            rejoin_s=rejoin_s,
        )


def serve(
    turns: JobTurns,
    *,
    stream: bool = False,
    prompt: int = 1,
    trajectory: str = "t",
    on_turn: Listen | None = None,
    named: bool = False,
    name: str = "r",
):
    """`named`: as the part `name` of the request `r`, whose client can send it again."""
    request = GenerateRequest(
        request_id=name,
        token_ids=(prompt,),
        stream=stream,
        sampling_params=SamplingParams(max_tokens=4),
    )
    part_of = ClientRequest("r", TrajectoryId(trajectory), named) if named else None
    work = turns.serve(
        request, trajectory=TrajectoryId(trajectory), on_turn=on_turn, part_of=part_of
    )
    return asyncio.create_task(work)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def gone(client: "asyncio.Task[object]") -> None:
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)


async def test_a_repeated_request_gets_the_open_turn_also_as_a_stream() -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    first, again = serve(turns), serve(turns, stream=True)
    await settle()
    await gone(first)
    work.goes_on.set()
    turn, refused = await again
    assert (turn.finish_reason, refused) == (FinishReason.LENGTH, None)
    assert work.ended == [turn]
    assert len(work.ledger) == 0


@pytest.mark.parametrize("changes", [{"prompt": 2}, {"trajectory": "u"}])
async def test_another_request_under_an_open_id_is_refused_by_name(changes) -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    first = serve(turns)
    await settle()
    with pytest.raises(IdInUse, match="'r'"):
        await serve(turns, **changes)
    work.goes_on.set()
    await first


@pytest.mark.parametrize("answered", [False, True])
async def test_a_request_without_max_tokens_is_the_same_under_another_context(
    answered: bool,
) -> None:
    """The longest engine may come or go between a client's tries."""
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    if answered:
        work.goes_on.set()

    async def sent(**sampling: Any) -> Turn:
        body = {"request_id": "r", "token_ids": [1, 2], "sampling_params": sampling}
        request = decode_generate(msgspec.json.encode(body), context_tokens=next(contexts))
        part, _ = samples_of(request)
        part_of = ClientRequest("r", TrajectoryId("t"), named=True)
        turn, _ = await turns.serve(
            part, trajectory=TrajectoryId("t"), on_turn=None, part_of=part_of
        )
        return turn

    contexts = iter((10, 20, 20, 20))
    first = asyncio.create_task(sent(n=2))
    await settle()
    again = asyncio.create_task(sent(n=2))
    await settle()
    for other in ({"n": 2, "max_tokens": 8}, {"n": 2, "seed": 1}):
        with pytest.raises(IdInUse):
            await sent(**other)
    work.goes_on.set()
    assert await first is await again
    assert (await first).request.sampling_params.max_tokens == 8


@pytest.mark.parametrize("ends_first", [True, False])
async def test_a_turn_and_its_end_outlive_the_last_client_for_a_while(ends_first: bool) -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    first = serve(turns)
    await settle()
    await gone(first)
    if ends_first:
        work.goes_on.set()
        await settle()
    again = serve(turns)
    await settle()
    work.goes_on.set()
    turn, _ = await again
    assert work.ended == [turn]
    next_, _ = await serve(turns)
    assert next_ is not turn, "an id that was answered is free"


async def test_after_that_it_is_aborted_and_its_id_is_free() -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=0)
    first = serve(turns)
    await settle()
    await gone(first)
    await settle()
    assert [turn.finish_reason for turn in work.ended] == [FinishReason.ABORT]
    work.goes_on.set()
    turn, _ = await serve(turns)
    assert turn.finish_reason is FinishReason.LENGTH


async def test_another_request_takes_the_id_that_its_client_has_left() -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    first = serve(turns)
    await settle()
    await gone(first)
    others = [serve(turns, prompt=2), serve(turns, prompt=2)]
    await settle()
    assert [turn.finish_reason for turn in work.ended] == [FinishReason.ABORT]
    work.goes_on.set()
    (turn, _), (same, _) = await asyncio.gather(*others)
    assert turn is same
    assert turn.request.token_ids == (2,)


async def test_a_refusal_reaches_all_waiting_requests_and_frees_the_id() -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    work.fault = RequestRefused("no")
    clients = [serve(turns), serve(turns)]
    await settle()
    work.goes_on.set()
    told = await asyncio.gather(*clients, return_exceptions=True)
    assert [str(error) for error in told] == ["no", "no"]
    work.fault = None
    assert (await serve(turns))[0].finish_reason is FinishReason.LENGTH


async def test_closing_ends_turns_without_a_waiting_client() -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    first = serve(turns)
    await settle()
    await gone(first)
    await turns.close()
    assert len(work.ended) == 1
    assert len(work.ledger) == 0


async def test_a_stream_that_joins_hears_at_once_of_tokens_and_not_of_none() -> None:
    """A stream's head is sent with its first tokens: before them a refusal still has a status."""
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    heard: list[str] = []
    first = serve(turns, stream=True, on_turn=lambda turn: lambda: heard.append("first"))
    await settle()
    assert heard == []
    work.begun[0].token_ids.append(1)
    again = serve(turns, stream=True, on_turn=lambda turn: lambda: heard.append("again"))
    await settle()
    assert heard == ["again"]
    work.goes_on.set()
    await asyncio.gather(first, again)


async def test_an_aborted_turn_gives_its_clients_what_it_has() -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    first, second = serve(turns), serve(turns)
    await settle()
    assert await turns.abort(ids=["another"]) == 0
    assert await turns.abort(ids=["r"]) == 1
    for client in (first, second):
        turn, refused = await client
        assert (turn.finish_reason, turn.fault, refused) == (FinishReason.ABORT, "", None)
    assert work.ledger.counters.aborted == 1
    assert await turns.abort() == 0


async def test_an_abort_names_the_request_that_a_turn_is_part_of_or_its_session() -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    for ids, session in ((["batch"], None), (None, TrajectoryId("s"))):
        request = GenerateRequest(
            request_id="batch.3", token_ids=(1,), sampling_params=SamplingParams(max_tokens=4)
        )
        part_of = ClientRequest("batch", TrajectoryId("s"))
        client = asyncio.create_task(
            turns.serve(request, trajectory=TrajectoryId("s.3"), on_turn=None, part_of=part_of)
        )
        await settle()
        assert await turns.abort(ids=["batch.4"]) == 0
        assert await turns.abort(session=TrajectoryId("s.3")) == 0
        assert await turns.abort(ids=ids, session=session) == 1
        assert (await client)[0].finish_reason is FinishReason.ABORT


class Unlisted(dict[str, Any]):
    def values(self) -> Any:
        raise AssertionError("all turns were looked at")


async def test_an_abort_looks_at_no_turn_that_it_does_not_name() -> None:
    """Beside 10,000 open turns a look at each took 2.7 ms, at the end of every session."""
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    clients = [serve(turns, name=name, trajectory=name) for name in ("a", "b", "c")]
    await settle()
    turns._open = Unlisted(turns._open)
    for ids, session in ((["another"], None), (None, TrajectoryId("another"))):
        assert await turns.abort(ids=ids, session=session) == 0
    assert await turns.abort(ids=["a", "b", "a"]) == 2
    assert await turns.abort(session=TrajectoryId("c")) == 1
    await asyncio.gather(*clients)
    assert not turns._named


async def test_parts_of_an_aborted_request_that_have_not_begun_end_as_they_begin() -> None:
    """A large request's samples begin a few in each pass of the loop."""
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    aborted, other = (ClientRequest(name, TrajectoryId("s")) for name in ("batch", "other"))

    def begin(part: int, part_of: ClientRequest) -> "asyncio.Task[object]":
        request = GenerateRequest(
            request_id=f"{part_of.request}.{part}",
            token_ids=(1,),
            sampling_params=SamplingParams(max_tokens=4),
        )
        work = turns.serve(request, trajectory=TrajectoryId("t"), on_turn=None, part_of=part_of)
        return asyncio.create_task(work)

    clients = [begin(0, aborted), begin(0, other)]
    await settle()
    assert await turns.abort(ids=["batch"], fault="over") == 1
    for part in (1, 2):
        turn, refused = await begin(part, aborted)
        assert (turn.finish_reason, turn.fault, refused) == (FinishReason.ABORT, "over", None)
        begin(part, other)
    await settle()
    assert [turn.request.request_id for turn in work.begun] == [
        *("batch.0", "other.0", "other.1", "other.2"),
    ]
    assert await turns.abort(ids=["other.1"]) == 1
    begin(3, other)
    await settle()
    assert len(work.begun) == 5, "one part's abort is not its request's"
    work.goes_on.set()
    await asyncio.gather(*clients)


async def test_an_answered_request_that_is_sent_again_gets_the_same_turn() -> None:
    """Its client may have broken off a moment before it would have received it."""
    work = Work()
    turns = work.open_turns(rejoin_s=0)
    work.goes_on.set()
    first, _ = await serve(turns, named=True)
    told: list[Turn] = []
    again, refused = await serve(
        turns, named=True, stream=True, on_turn=lambda turn: lambda: told.append(turn)
    )
    assert (again is first, refused, work.begun) == (True, None, [first])
    assert work.ledger.counters.completed == 1
    assert "r" in turns
    work.clock.advance_to(60)
    assert (await serve(turns, named=True))[0] is not first, "it is not kept for ever"


async def test_a_turn_that_ends_after_its_client_left_is_kept_as_well() -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    client = serve(turns, named=True)
    await settle()
    await gone(client)
    work.goes_on.set()
    await settle()
    (turn,) = work.ended
    assert (await serve(turns, named=True))[0] is turn
    work.clock.advance_to(60)
    assert (await serve(turns, named=True))[0] is not turn


@pytest.mark.parametrize("changes", [{"prompt": 2}, {"trajectory": "u"}])
async def test_another_request_under_an_answered_id_is_refused_by_name(changes) -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    work.goes_on.set()
    await serve(turns, named=True)
    with pytest.raises(IdInUse, match="'r' was answered with another body"):
        await serve(turns, named=True, **changes)
    assert len(work.begun) == 1


async def test_a_request_that_is_refused_again_and_again_frees_the_id_in_its_time() -> None:
    """As a trainer's that starts again: its client repeats every request for a minute."""
    work = Work()
    turns = work.open_turns(rejoin_s=0)
    work.goes_on.set()
    first, _ = await serve(turns, named=True)
    for second in range(1, 60):
        work.clock.advance_to(second)
        with pytest.raises(IdInUse, match="answered with another body"):
            await serve(turns, named=True, prompt=2)
    work.clock.advance_to(60)
    assert (await serve(turns, named=True, prompt=2))[0] is not first


async def test_an_aborted_turn_is_no_whole_answer() -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    client = serve(turns, named=True)
    await settle()
    await turns.abort()
    turn, _ = await client
    work.goes_on.set()
    assert (await serve(turns, named=True))[0] is not turn


async def test_samples_of_a_request_are_kept_until_the_last_of_them_was_answered() -> None:
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    slow = serve(turns, named=True, name="r.1")
    await settle()
    work.goes_on = asyncio.Event()
    fast = serve(turns, named=True, name="r.0")
    await settle()
    work.goes_on.set()
    first, _ = await fast
    work.clock.advance_to(1000)
    assert (await serve(turns, named=True, name="r.0"))[0] is first, "the request is open"
    assert len(work.begun) == 2
    await gone(slow)
    work.clock.advance_to(1060)
    assert (await serve(turns, named=True, name="r.0"))[0] is not first


async def test_a_client_that_comes_back_while_its_turn_gives_way_gets_an_answer() -> None:
    """It joined the turn that was being ended, and its connection broke without a reply."""
    work = Work()
    turns = work.open_turns(rejoin_s=60)
    client = serve(turns)
    await settle()
    await gone(client)
    other, back = serve(turns, prompt=2), serve(turns)
    with pytest.raises(IdInUse, match="'r' is being served with another body"):
        await back
    work.goes_on.set()
    assert (await other)[0].request.token_ids == (2,)


async def test_a_run_that_begins_anew_drops_the_answers_of_its_own_job_alone() -> None:
    work, other = Work(), JobId("other")
    turns = work.open_turns(rejoin_s=60)
    work.goes_on.set()
    first, _ = await serve(turns, named=True)
    turns._answered.forget(other)
    assert (await serve(turns, named=True))[0] is first
    await turns.end_run("another run")
    turns.begin_run()
    assert (await serve(turns, named=True))[0] is not first
