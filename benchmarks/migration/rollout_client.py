"""An RL job's client in a process of its own: sends planned turns and records each raw reply.

    python -m benchmarks.migration.rollout_client --gateway URL --plan FILE --record FILE
        [--store FOLDER]

Writes `ended N` after each trajectory, `arm NAME` before the first of an arm, `idle` once no turn
is open after the line `hold` on its standard input; `go` lets turns begin again. It mends nothing:
a refused or broken request is recorded, and its trajectory ends, but one whose exact pin is refused
(409, 410) is asked for again: exactly at the newest version of the store, then at least at it.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.migration.records import RequestRecord, append
from benchmarks.migration.replies import Reply, replies
from benchmarks.migration.rollout_plan import PATIENCE_S, PinKind, PlannedTrajectory, PlannedTurn
from benchmarks.migration.rollout_routes import RolloutRoute, sent
from benchmarks.migration.tinker_client import TinkerClient
from harvester.contracts.clock import MonotonicClock

_EXACT_ASKS = 4
"""Versions that follow each other at once may pass each of them."""


class RecordingClient:
    def __init__(
        self, session: aiohttp.ClientSession, record: Path, store: Path | None = None
    ) -> None:
        """`store`: of the job's weights; plans with exact pins need it."""
        self._session = session
        self._record = record
        self._store = store
        self._tinker = TinkerClient(session)
        self._clock = MonotonicClock()
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._open = 0
        self._ended = 0

    async def roll_out(self, plan: list[PlannedTrajectory], *, concurrency: int) -> None:
        places = asyncio.Semaphore(concurrency)
        arm = ""
        tasks: list[asyncio.Task[None]] = []
        for planned in plan:
            if planned.arm != arm:
                await asyncio.gather(*tasks)
                arm = planned.arm
                say(f"arm {arm}")
            await places.acquire()
            task = asyncio.create_task(self._trajectory(planned))
            task.add_done_callback(lambda _task: places.release())
            tasks.append(task)
        await asyncio.gather(*tasks)

    async def obey(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode().strip():
            (self._may_begin.clear if line == "hold" else self._may_begin.set)()
            self._say_if_idle()

    async def _trajectory(self, planned: PlannedTrajectory) -> None:
        context: list[int] = []
        version = 0
        for number, turn in enumerate(planned.turns):
            context += turn.new_tokens
            reply = Reply.of(await self._answered(planned.name, number, turn, context, version))
            if not _ended_well(reply):
                break
            context += reply.token_ids
            version = max((span["version"] for span in reply.spans), default=version)
        self._ended += 1
        say(f"ended {self._ended}")

    async def _answered(
        self, trajectory: str, number: int, turn: PlannedTurn, context: list[int], version: int
    ) -> RequestRecord:
        """The last request for the turn."""
        name = f"{trajectory}-{number}"
        for ask in range(_EXACT_ASKS + 1):
            await self._may_begin.wait()
            self._open += 1
            body = {
                "request_id": f"{name}-again{ask}" if ask else name,
                "token_ids": list(context),
                "sampling_params": turn.sampling,
                "stream": turn.stream,
            }
            if pin := self._pin(turn, version, ask):
                body["weight_version"] = pin
            if turn.route is RolloutRoute.TINKER:
                body["request_id"] = await self._tinker.request_id(pin.get("exact"), number)
            if turn.equal_numerics:
                body["equal_numerics"] = turn.equal_numerics
            if turn.chat:
                body |= turn.chat.fields
            record = await self._turn(trajectory, number, turn, body)
            self._open -= 1
            self._say_if_idle()
            if "exact" not in pin or record.refusal not in (409, 410):
                break
            await asyncio.sleep(float(record.retry_after or 0.0))
        return record

    def _pin(self, turn: PlannedTurn, version: int, ask: int) -> dict[str, Any]:
        if turn.pin is PinKind.LAG:
            return {"max_lag": turn.max_lag}
        if turn.pin is None or not version:
            return {}
        if turn.pin is PinKind.MINIMUM:
            return {"minimum": version}
        by_tinker = turn.route is RolloutRoute.TINKER
        if ask == _EXACT_ASKS:
            return {} if by_tinker else {"minimum": self._newest()}
        if ask:
            patience_s = turn.patience_s if by_tinker else PATIENCE_S
            return {"exact": self._newest(), "wait_s": patience_s}
        exact = {
            PinKind.EXACT: version,
            PinKind.NEWEST: self._newest(),
            PinKind.NEXT: self._newest() + 1,
        }[turn.pin]
        return {"exact": exact, "wait_s": turn.patience_s}

    def _newest(self) -> int:
        assert self._store is not None
        return int((self._store / "LATEST").read_text().strip().removeprefix("weight_v"))

    async def _turn(
        self, trajectory: str, number: int, turn: PlannedTurn, body: dict[str, Any]
    ) -> RequestRecord:
        def record() -> RequestRecord:
            now = self._clock.now()
            return RequestRecord(
                trajectory=trajectory, turn=number, body=body, route=turn.route, sent_s=now
            )

        if turn.breaks_off_after_s is not None:
            first = record()
            try:
                async with asyncio.timeout(turn.breaks_off_after_s):
                    await self._send(first)
            except TimeoutError:
                first.broken_off = True
                self._write(first)
            else:
                # It was answered in time.
                return first
        last = record()
        await self._send(last)
        if turn.repeats and _is_whole(last):
            last = record()
            await self._send(last)
        return last

    async def _send(self, record: RequestRecord) -> None:
        headers = {"X-Session-ID": record.trajectory}
        try:
            if record.route is RolloutRoute.TINKER:
                await self._tinker.ask(record, headers)
            else:
                await self._ask(record, headers)
        except (aiohttp.ClientError, ConnectionError) as error:
            record.error = repr(error)
        self._write(record)

    async def _ask(self, record: RequestRecord, headers: dict[str, str]) -> None:
        async with self._session.post(
            record.route.value, json=sent(record.route, record.body), headers=headers
        ) as reply:
            record.status = reply.status
            record.retry_after = reply.headers.get("Retry-After", "")
            if reply.content_type == "text/event-stream":
                async for line in reply.content:
                    if text := line.decode().strip().removeprefix("data: "):
                        record.events.append(text)
            else:
                record.reply = await reply.text()

    def _write(self, record: RequestRecord) -> None:
        record.ended_s = self._clock.now()
        append(self._record, record)

    def _say_if_idle(self) -> None:
        if not self._may_begin.is_set() and not self._open:
            say("idle")


def _ended_well(reply: Reply) -> bool:
    return reply.whole and reply.finish_reasons[-1:] in (["stop"], ["length"])


def _is_whole(record: RequestRecord) -> bool:
    """Whether each of its samples is: the gateway keeps the answer then."""
    found = replies(record)
    return len(found) == record.samples and all(map(_ended_well, found.values()))


def say(line: str) -> None:
    print(line, flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.migration.rollout_client")
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--concurrency", type=int, default=24)
    given = parser.parse_args()
    plan = msgspec.json.decode(given.plan.read_bytes(), type=list[PlannedTrajectory])
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        given.gateway, timeout=timeout, connector=connector
    ) as session:
        client = RecordingClient(session, given.record, given.store)
        orders = asyncio.create_task(client.obey())
        await client.roll_out(plan, concurrency=given.concurrency)
        orders.cancel()


if __name__ == "__main__":
    asyncio.run(main())
