"""The trainer as a process, against a gateway that plays by itself. No engine."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.grpo.environment import KEY_DIGITS, Line
from examples.grpo.vocabulary import STOP_ID, digit_of
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.platform.backoff import RetryLimits
from scheduler import AsyncRolloutClient

QUICK = RetryLimits(first_wait_s=0.001, wait_max_s=0.002, attempts_max=5)
TINY_JOB = {
    "warm_up": {
        "policy": {"hidden": 32, "intermediate": 64, "layers": 1, "heads": 2, "kv_heads": 2},
        "tasks": {"prompts_per_step": 3, "latency_max_s": 0.01},
        "steps": 2,
        "demonstrations_per_step": 2,
    },
    "samples_per_prompt": 4,
}


class PlayingGateway:
    """Plays the environment from its context, with mistakes drawn from each request's seed."""

    def __init__(self) -> None:
        self.announced: list[int] = []
        self.pinned: set[int] = set()
        self.refuse_first: set[int] = set()
        self.hang = False
        self.app = web.Application()
        self.app.router.add_post("/inference/v1/generate", self._generate)
        self.app.router.add_post("/v1/jobs/{job}/versions", self._versions)

    async def _versions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.announced.append(body["version"])
        return web.json_response({"version": body["version"], "engines": {"e0": "switched"}})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refuse_first:
            status = self.refuse_first.pop()
            return web.json_response(
                {"error": "not now"}, status=status, headers={"Retry-After": "0"}
            )
        if self.hang:
            await asyncio.Event().wait()
        version = body["weight_version"]["exact"]
        self.pinned.add(version)
        ids = _fake(body["token_ids"], Random(body["sampling_params"]["seed"]))
        span = {"start": 0, "end": len(ids), "version": version, "engine": "e0", "numerics": "x"}
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": i, "logprob": -1.0} for i in ids]},
            "finish_reason": "stop",
            "spans": [span],
        }
        return web.json_response({"request_id": body["request_id"], "choices": [choice]})


def _fake(context: list[int], random: Random) -> list[int]:
    digits = [digit_of(token_id) or 0 for token_id in context]
    hops, turn = digits[2], context.count(STOP_ID) // 2
    line = Line(
        turn=turn + 1,
        left=hops - turn,
        key=tuple(digits[-KEY_DIGITS - 1 : -1]),
        is_answer=turn == hops or random.random() < 0.3,
    )
    return list(line.ids())


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[PlayingGateway, str]]:
    playing = PlayingGateway()
    async with TestServer(playing.app) as server:
        yield playing, str(server.make_url("")).rstrip("/")


async def started(tmp_path: Path, url: str) -> Process:
    config = TINY_JOB | {
        "job": "job",
        "gateway_url": url,
        "weight_root": str(tmp_path / "weights"),
        "store": "job",
        "cache_dir": str(tmp_path / "cache"),
    }
    (tmp_path / "job.json").write_text(json.dumps(config))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.grpo.trainer"),
        *("--config", str(tmp_path / "job.json")),
        stdin=PIPE,
        stdout=PIPE,
        stderr=None,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


async def event_of(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    event: dict[str, Any] = json.loads(await process.stdout.readline())
    return event


async def say(process: Process, line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    await process.stdin.drain()


async def test_it_publishes_steps_and_stops_on_request(
    tmp_path: Path, gateway: tuple[PlayingGateway, str]
) -> None:
    playing, url = gateway
    process = await started(tmp_path, url)
    ready = await event_of(process)
    assert (ready["event"], ready["version"]) == ("ready", 1)
    playing.refuse_first = {409, 503}
    await say(process, b'{"cmd":"step"}')
    step = await event_of(process)
    assert (step["event"], step["step"], step["version"]) == ("step", 1, 2)
    assert step["trajectories"] | {"migrated": 0} == {
        "started": 12,
        "completed": 12,
        "lost": 0,
        "duplicated": 0,
        "migrated": 0,
    }
    assert step["stale_tokens"] == 0
    assert step["tokens_by_engine"] == {"e0": step["rollout_tokens"]}
    assert step["logprob_gap"]["e0"][1] == step["rollout_tokens"]
    assert step["bytes_sent"] > 0
    await say(process, b'{"cmd":"stop"}')
    assert (await event_of(process))["event"] == "stopped"
    assert await process.wait() == 0
    assert playing.announced == [1, 2]
    assert playing.pinned == {1}


@pytest.mark.parametrize("how", ["signal", "end of stdin"])
async def test_it_ends_at_once_and_cleanly_in_the_middle_of_a_step(
    tmp_path: Path, gateway: tuple[PlayingGateway, str], how: str
) -> None:
    playing, url = gateway
    playing.hang = True
    process = await started(tmp_path, url)
    assert (await event_of(process))["event"] == "ready"
    await say(process, b'{"cmd":"step"}')
    await asyncio.sleep(0.3)
    if how == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        assert process.stdin is not None
        process.stdin.close()
    assert await asyncio.wait_for(process.wait(), timeout=20) == 0


async def test_it_says_what_is_wrong_when_the_gateway_refuses(tmp_path: Path) -> None:
    async with TestServer(web.Application()) as server:
        process = await started(tmp_path, str(server.make_url("")).rstrip("/"))
        failed = await event_of(process)
        assert failed["event"] == "failed"
        assert "404" in failed["reason"]
        assert await process.wait() == 1


PROMPT = (1, 13, 4, 14, *range(3, 13), STOP_ID)
SAMPLING = {"max_tokens": 18, "seed": 1, "stop_token_ids": [STOP_ID]}


async def test_a_client_asks_again_after_what_passes(
    gateway: tuple[PlayingGateway, str],
) -> None:
    playing, url = gateway
    playing.refuse_first = {409, 503}
    async with AsyncRolloutClient(url, "job", retries=QUICK) as client:
        choice = await client.generate(PROMPT, SAMPLING, weight_version=1)
        switched = await client.announce(3, "job")
    assert choice.token_ids[-1] == STOP_ID
    assert switched.version == 3
    assert playing.refuse_first == set()


async def test_a_client_gives_up_on_a_gateway_that_is_not_there(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with AsyncRolloutClient(url, "job", retries=QUICK) as client:
        with pytest.raises(Exhausted, match="gave up"):
            await client.generate(PROMPT, SAMPLING)


async def test_a_client_does_not_repeat_a_bad_request(
    gateway: tuple[PlayingGateway, str],
) -> None:
    playing, url = gateway
    playing.refuse_first = {400}
    async with AsyncRolloutClient(url, "job", retries=QUICK) as client:
        with pytest.raises(ConfigError, match=r"400: .*not now"):
            await client.generate(PROMPT, SAMPLING, weight_version=1)
