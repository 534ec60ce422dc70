"""The RL job of a soak: trajectories whose turns go through the gateway for the whole time.

A client of its own, not the product's: it sends a request under one id until that is answered, as
docs/protocol says, and records every attempt. It mends nothing that a reply lacks.
"""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.wire.leases import JOB_HEADER, SESSION_HEADER
from tests.soak.parts import JOB
from tests.soak.records import Sink, TrajectoryEnded, TurnAnswer, TurnAttempt, TurnLost

TRAJECTORIES = 8
"""At once."""
_ROUTE = "/inference/v1/generate"
_FIRST_ID, _LAST_ID = 4, 63
GIVE_UP_S = 900.0
"""A turn without an answer for so long is lost."""
_AGAIN = (409, 429, 503)
"""Refusals that docs/protocol says to try again."""
_RETRY_S = 0.5
_ASK_AGAIN_RATIO = 0.05
"""Turns whose request is sent once more behind its answer, as after a lost reply."""


@dataclass(slots=True)
class StreamedTurn:
    """Parts of one attempt's reply."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, int, str]] = field(default_factory=list)
    finish_reason: str = ""
    fault: str = ""
    done: bool = False
    refusal: int = 0
    error: str = ""

    def fold(self, event: dict[str, Any]) -> None:
        if "error" in event:
            error = event["error"]
            self.refusal = int(error.get("code") or 0) if isinstance(error, dict) else 500
            self.error = str(error)
        for choice in event.get("choices") or ():
            self.token_ids += choice.get("token_ids") or ()
            content = (choice.get("logprobs") or {}).get("content") or ()
            self.logprobs += [one["logprob"] for one in content]
            if choice.get("finish_reason"):
                self.finish_reason = choice["finish_reason"]
                self.fault = choice.get("fault") or ""
                self.spans = [
                    (span["start"], span["end"], span["version"], span["engine"])
                    for span in choice.get("spans") or ()
                ]


@dataclass(slots=True, kw_only=True)
class RolloutJob:
    session: aiohttp.ClientSession
    url: str
    seed: str
    clock: Clock
    sink: Sink
    newest_served: int = 0
    """Version that the gateway has confirmed; some turns ask for it at least."""
    closing: bool = False
    _number: int = 0

    async def run(self) -> None:
        """Returns once every trajectory that was open when `closing` was set has ended its turn."""
        async with asyncio.TaskGroup() as tasks:
            for place in range(TRAJECTORIES):
                tasks.create_task(self._place(place))

    async def _place(self, place: int) -> None:
        rng = random.Random(f"{self.seed} {place}")
        while not self.closing:
            self._number += 1
            await self._trajectory(f"{self.seed}-{self._number}", rng)

    async def _trajectory(self, name: str, rng: random.Random) -> None:
        context: list[int] = []
        turns = rng.randint(2, 6)
        for turn in range(turns):
            if self.closing:
                self.sink(TrajectoryEnded(trajectory=name, at_s=self.clock.now(), complete=False))
                return
            context += rng.choices(range(_FIRST_ID, _LAST_ID + 1), k=rng.randint(4, 40))
            answer = await self._turn(name, turn, tuple(context), rng)
            if answer is None:
                return
            context += answer.token_ids
            # The tools' time.
            await asyncio.sleep(rng.uniform(0.0, 4.0))
        self.sink(TrajectoryEnded(trajectory=name, at_s=self.clock.now(), complete=True))

    async def _turn(
        self, name: str, turn: int, prompt: tuple[int, ...], rng: random.Random
    ) -> TurnAnswer | None:
        max_tokens, stream = rng.randint(16, 96), rng.random() < 0.5
        minimum = self.newest_served if rng.random() < 0.3 else 0
        again = rng.random() < _ASK_AGAIN_RATIO
        body: dict[str, Any] = {
            "request_id": f"{name}-{turn}",
            "token_ids": prompt,
            "sampling_params": {
                "max_tokens": max_tokens, "temperature": 1.0, "ignore_eos": True,
            },
            "stream": stream,
        }  # fmt: skip
        if minimum:
            body["weight_version"] = {"minimum": minimum}
        asked_s = self.clock.now()
        while True:
            sent_s = self.clock.now()
            status, reply, wait_s = await self._attempt(name, body)
            if reply.done and reply.finish_reason:
                break
            attempt = TurnAttempt(
                trajectory=name,
                turn=turn,
                sent_s=sent_s,
                ended_s=self.clock.now(),
                status=reply.refusal or status,
                error=reply.error[:300],
                received=tuple(reply.token_ids),
            )
            self.sink(attempt)
            lasts = self.clock.now() - asked_s < GIVE_UP_S
            if not lasts or (attempt.status not in (*_AGAIN, 0, 200)):
                lost = TurnLost(
                    trajectory=name,
                    turn=turn,
                    asked_s=asked_s,
                    ended_s=attempt.ended_s,
                    error=f"{attempt.status} {attempt.error}",
                )
                self.sink(lost)
                return None
            await asyncio.sleep(wait_s)
        repeated = None
        if again and reply.finish_reason != "abort":
            status, second, _ = await self._attempt(name, body)
            repeated = tuple(second.token_ids) if second.done else None
        answer = TurnAnswer(
            trajectory=name,
            turn=turn,
            asked_s=asked_s,
            sent_s=sent_s,
            ended_s=self.clock.now(),
            prompt=prompt,
            max_tokens=max_tokens,
            minimum_version=minimum,
            token_ids=tuple(reply.token_ids),
            logprobs=tuple(round(each, 5) for each in reply.logprobs),
            spans=tuple(reply.spans),
            finish_reason=reply.finish_reason,
            fault=reply.fault,
            repeated=repeated,
        )
        self.sink(answer)
        return answer

    async def _attempt(self, name: str, body: dict[str, Any]) -> tuple[int, StreamedTurn, float]:
        """Status (0 without a reply), what came, and the wait before another attempt."""
        reply, status, wait_s = StreamedTurn(), 0, _RETRY_S
        headers = {JOB_HEADER: JOB, SESSION_HEADER: name}
        try:
            async with self.session.post(self.url + _ROUTE, json=body, headers=headers) as response:
                status = response.status
                with suppress(ValueError):
                    wait_s = max(wait_s, min(10.0, float(response.headers.get("Retry-After", "0"))))
                if status != 200:
                    reply.error = await response.text()
                elif body["stream"]:
                    await _read_stream(response, reply)
                else:
                    reply.fold(msgspec.json.decode(await response.read()))
                    reply.done = True
        except (KeyError, ValueError) as error:
            reply.error, reply.done = f"malformed reply: {error!r}", False
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reply.error, reply.done = f"{type(error).__name__}: {error}", False
            status = 0
        return status, reply, wait_s


async def _read_stream(response: aiohttp.ClientResponse, reply: StreamedTurn) -> None:
    async for line in response.content:
        text = line.strip()
        if text == b"data: [DONE]":
            reply.done = True
        elif text.startswith(b"data: "):
            reply.fold(msgspec.json.decode(text[len(b"data: ") :]))
