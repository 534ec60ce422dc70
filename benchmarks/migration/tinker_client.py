"""Tinker's protocol as its client speaks it: sessions, samplers, promises.

A sampler names all weights or pins one version; a sample is begun and its promise then waited for.
The same sample begun again is the same promise.
"""

import asyncio
import base64

import aiohttp
import msgspec

from benchmarks.migration.records import RequestRecord
from benchmarks.migration.rollout_routes import JOB, RolloutRoute, sent

_PENDING = 408


class TinkerClient:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._name = ""
        self._samplers = 0
        self._naming = asyncio.Lock()

    async def request_id(self, version: int | None, number: int) -> str:
        """The name of a sampler's request `number`; `version` is what the sampler is pinned to."""
        async with self._naming:
            if not self._name:
                self._name = (await self._answered("create_session", {}))["session_id"]
        self._samplers += 1
        model = (
            {"base_model": JOB} if version is None else {"model_path": f"tinker://{JOB}/{version}"}
        )
        asked = {"session_id": self._name, "sampling_session_seq_id": self._samplers}
        sampler = await self._answered("create_sampling_session", asked | model)
        return f"{sampler['sampling_session_id']}.{number}"

    async def ask(self, record: RequestRecord, headers: dict[str, str]) -> None:
        """Writes the reply to the record: a promise's protobuf in base 64, or JSON of an error."""
        body = sent(RolloutRoute.TINKER, record.body)
        async with self._session.post(record.route.value, json=body, headers=headers) as begun:
            if begun.status != 200:
                record.status, record.reply = begun.status, await begun.text()
                return
            promise = {"request_id": (await begun.json())["request_id"]}
        record.status = _PENDING
        while record.status == _PENDING:
            async with self._session.post("/api/v1/retrieve_future", json=promise) as reply:
                record.status, content = reply.status, await reply.read()
        is_json = content[:1] == b"{"
        record.reply = content.decode() if is_json else base64.b64encode(content).decode()

    async def _answered(self, path: str, body: dict[str, object]) -> dict[str, str]:
        async with self._session.post(f"/api/v1/{path}", json=body) as reply:
            reply.raise_for_status()
            return msgspec.json.decode(await reply.read(), type=dict[str, str])
