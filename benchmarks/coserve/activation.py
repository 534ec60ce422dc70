"""Time from a lease request to a guest's first token, awake and asleep, and its memory.

Production stands still. Timed from the request for a lease to the token's arrival, as a scheduler
would see it; the memory is that of the guest's processes alone.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from benchmarks.coserve.arms import BARE
from benchmarks.coserve.reclaim import percentile
from benchmarks.coserve.rounds import Runner
from benchmarks.testbed.slot import GUEST, url
from examples.grpo.vocabulary import VOCABULARY_SIZE
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Guest
from harvester.contracts.wire.leases import EPOCH_HEADER

_AWAKE: dict[str, Any] = {**BARE, "sleep_after_s": 0.0}
_ASLEEP: dict[str, Any] = {**BARE, "sleep_after_s": 0.2}
_REST_S = 0.7
_POLL_S = 0.001
_WITHIN_S = 10.0
_PROMPT = [place % VOCABULARY_SIZE for place in range(64)]
_NOT_YET = (409, 503)
_MIB = 1 << 20


@dataclass(slots=True)
class Activations:
    runner: Runner
    session: aiohttp.ClientSession

    async def run(self, trials: int) -> dict[str, Any]:
        """`trials` of each kind, in turn."""
        seen: dict[str, list[tuple[float, float]]] = {"awake": [], "asleep": []}
        for _ in range(trials):
            seen["awake"].append(await self._trial(_AWAKE, _has_all))
            seen["asleep"].append(await self._trial(_ASLEEP, _has_nothing))
        memory = msgspec.structs.asdict(self.runner.guest().memory)
        return {"guest_memory": memory} | {
            f"{kind}_{name}": percentile([trial[place] for trial in trials_of], percent)
            for kind, trials_of in seen.items()
            for name, place, percent in (
                ("first_token_p50_ms", 0, 50),
                ("first_token_max_ms", 0, 100),
                ("held_mib", 1, 50),
            )
        }

    async def _trial(
        self, policy: dict[str, Any], settled: Callable[[Guest], bool]
    ) -> tuple[float, float]:
        """Milliseconds to the first token, and MiB held before."""
        self.runner.policy(policy)
        await asyncio.sleep(_REST_S)
        try:
            async with asyncio.timeout(_WITHIN_S):
                while not settled(self.runner.guest()):  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            raise ConfigError("the guest neither falls asleep nor wakes up") from error
        held_mib = self._held_mib()
        start_s = self.runner.clock.now()
        async with self.runner.lease.holding():
            while not await self._first_token():  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(_POLL_S)
            return 1e3 * (self.runner.clock.now() - start_s), held_mib

    async def _first_token(self) -> bool:
        held = self.runner.lease.held
        assert held is not None
        request = {"model": GUEST, "prompt": _PROMPT, "max_tokens": 1, "ignore_eos": True}
        address = url(self.runner.slot.ports.guest)
        async with self.session.post(
            f"{address}/v1/completions",
            data=json.dumps(request),
            headers={"Content-Type": "application/json", EPOCH_HEADER: str(held.epoch)},
        ) as response:
            body = await response.text()
            if response.status not in (200, *_NOT_YET):
                raise ConfigError(f"the guest answers {response.status}: {body[:200]}")
            if response.status != 200:
                return False
            return bool(json.loads(body)["usage"]["completion_tokens"] == 1)

    def _held_mib(self) -> float:
        tree = self.runner.slot.parts.running[GUEST].tree()
        return sum(process.memory_full_info().uss for process in tree) / _MIB


def _has_all(guest: Guest) -> bool:
    return guest.kv_tokens_withheld == 0


def _has_nothing(guest: Guest) -> bool:
    return guest.kv_tokens_withheld == guest.kv_tokens_total
