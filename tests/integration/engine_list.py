"""Calls of slime 624b824a to its external engines and router, in its order, with its bodies.

`--rollout-external-engine-addrs HOST:PORT --sglang-router-ip HOST --sglang-router-port PORT` with
disk deltas: sglang_engine.py, server_control.py and update_weight_from_disk_delta.py. miles
31f1ca96 makes the same calls of an engine.
"""

from pathlib import Path
from typing import Any

import aiohttp


class EngineListTrainer:
    """The trainer's side of the calls. A status above 299 ends the trainer: ClientResponseError."""

    def __init__(self, session: aiohttp.ClientSession, gateway: str, store: Path) -> None:
        self._session = session
        self._url = gateway
        self._store = store

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self._session.request(method, self._url + path, json=body) as response:
            response.raise_for_status()
            return await response.json(content_type=None)

    async def attach(self) -> None:
        """The calls to each engine in the list; then the baseline, which publishes nothing."""
        told = await self.call("GET", "/server_info")
        # slime compares the fields that it would have started an engine with.
        assert told["enable_memory_saver"] is False
        assert not told.get("encoder_only")
        assert told.get("disaggregation_mode") not in ("prefill", "decode")
        await self.call("POST", "/workers", {"url": self._url, "worker_type": "regular"})
        await self.pull(0)

    async def pull(self, version: int) -> None:
        body = {
            "local_checkpoint_dir": "/local/checkpoint",
            "source_dir": str(self._store),
            "target_version": version,
        }
        await self.call("POST", "/pull_weights", body)

    async def update(self, version: int) -> None:
        """The version lies in the store."""
        await self.pull(version)
        await self.call("POST", "/pause_generation", {})
        await self.call("GET", "/flush_cache")
        loaded = {"model_path": "/local/checkpoint", "weight_version": str(version)}
        await self.call("POST", "/update_weights_from_disk", loaded)
        await self.call("POST", "/continue_generation", {})

    async def abort_until_idle(self) -> int:
        """Rounds of aborts that it took. slime sleeps 3 s between two."""
        (worker,) = (await self.call("GET", "/workers"))["workers"]
        assert worker["url"] == self._url
        for rounds in range(1, 10):
            await self.call("POST", "/abort_request", {"abort_all": True})
            (load,) = (await self.call("GET", "/v1/loads?include=core"))["loads"]
            if load["num_reqs"] == 0:
                return rounds
        raise AssertionError("never idle")
