"""An RL job's client in a process of its own: sends planned turns and records each raw reply.

    python -m benchmarks.migration.rollout_client --gateway URL --plan FILE --record FILE

Writes `ended N` after each trajectory, `arm NAME` before the first of an arm, `idle` once no turn
is open after the line `hold` on its standard input; `go` lets turns begin again. It mends nothing:
a refused or broken request is recorded, and its trajectory ends.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.migration.records import Reply, RequestRecord, append
from benchmarks.migration.rollout_plan import PlannedTrajectory, PlannedTurn
from harvester.contracts.clock import MonotonicClock


class RolloutClient:
    def __init__(self, session: aiohttp.ClientSession, record: Path) -> None:
        self._session = session
        self._record = record
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
            await self._may_begin.wait()
            self._open += 1
            pins = {"weight_version": {"minimum": version}} if turn.pinned and version else {}
            reply = await self._turn(planned.name, number, turn, context, pins)
            self._open -= 1
            self._say_if_idle()
            if not (reply.whole and reply.finish_reasons[-1:] in (["stop"], ["length"])):
                break
            context += reply.token_ids
            version = max(span["version"] for span in reply.spans)
        self._ended += 1
        say(f"ended {self._ended}")

    async def _turn(
        self,
        trajectory: str,
        number: int,
        turn: PlannedTurn,
        context: list[int],
        pins: dict[str, Any],
    ) -> Reply:
        body = {
            "request_id": f"{trajectory}-{number}",
            "token_ids": list(context),
            "sampling_params": turn.sampling,
            "stream": turn.stream,
            **pins,
        }
        if turn.breaks_off_after_s is not None:
            first = RequestRecord(trajectory=trajectory, body=body, sent_s=self._clock.now())
            try:
                async with asyncio.timeout(turn.breaks_off_after_s):
                    await self._send(first)
            except TimeoutError:
                first.broken_off = True
                self._write(first)
            else:
                # It was answered in time.
                return Reply.of(first)
        record = RequestRecord(trajectory=trajectory, body=body, sent_s=self._clock.now())
        await self._send(record)
        return Reply.of(record)

    async def _send(self, record: RequestRecord) -> None:
        headers = {"X-Session-ID": record.trajectory}
        try:
            async with self._session.post(
                "/inference/v1/generate", json=record.body, headers=headers
            ) as reply:
                record.status = reply.status
                if reply.content_type == "text/event-stream":
                    async for line in reply.content:
                        if text := line.decode().strip().removeprefix("data: "):
                            record.events.append(text)
                else:
                    record.reply = await reply.text()
        except (aiohttp.ClientError, ConnectionError) as error:
            record.error = repr(error)
        self._write(record)

    def _write(self, record: RequestRecord) -> None:
        record.ended_s = self._clock.now()
        append(self._record, record)

    def _say_if_idle(self) -> None:
        if not self._may_begin.is_set() and not self._open:
            say("idle")


def say(line: str) -> None:
    print(line, flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.migration.rollout_client")
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=24)
    given = parser.parse_args()
    plan = msgspec.json.decode(given.plan.read_bytes(), type=list[PlannedTrajectory])
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        given.gateway, timeout=timeout, connector=connector
    ) as session:
        client = RolloutClient(session, given.record)
        orders = asyncio.create_task(client.obey())
        await client.roll_out(plan, concurrency=given.concurrency)
        orders.cancel()


if __name__ == "__main__":
    asyncio.run(main())
