"""Replies as server-sent events."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from harvester.contracts.errors import RoseMuxError
from harvester.platform.keep_alive import end_unreachable

_ENCODER = msgspec.json.Encoder()


class EventSender:
    """Server-sent events of one reply; its status is decided by what comes before the first."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._request = request

    async def __call__(self, event: object) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(b"data: " + _ENCODER.encode(event) + b"\n\n")


@asynccontextmanager
async def event_stream(request: web.Request) -> AsyncIterator[EventSender]:
    """Ends the stream by `[DONE]`, or by an error event where a fault comes after the start."""
    send = EventSender(request)
    watch = asyncio.create_task(end_unreachable(request.transport))
    try:
        try:
            yield send
        except (RoseMuxError, web.HTTPException) as error:
            if not send.response.prepared:
                raise
            await send({"error": {"message": str(error), "code": getattr(error, "status", 500)}})
        if not send.response.prepared:
            await send.response.prepare(request)
        await send.response.write(b"data: [DONE]\n\n")
        await send.response.write_eof()
    finally:
        watch.cancel()
