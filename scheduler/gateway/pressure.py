"""Bounds what open requests hold in memory, before their bodies are read.

The queue of routing bounds turns. Their prompts are bounded here: a body counts from the time at
which its length is known until its request is answered, so that a thousand large requests at once
are refused at the door and not in the middle of their decoding. Only one job is active at a time,
so tenants compete for memory and never for places in the queue.

A body is decoded by one call, which no other task interrupts. Token ids and text are cheap: a
million ids take 60 ms. Arrays, objects and members cost 20 times as much, so their number is bound.
"""

import asyncio
from contextlib import ExitStack
from typing import Final

from aiohttp import web

MOST_VALUES = 1 << 19
"""Arrays, objects and members of a body: a row for each prompt token that may be scored."""
_LARGE_BYTES = 1 << 20
_PIECE_BYTES = 1 << 18
_OWN_DESCRIPTORS = 64
"""Files, probes of engines and agents, scrapes, and clients that are being refused."""
HELD_BODY: Final = web.RequestKey("held_body", ExitStack)
"""Count of a request's body: closed with its reply, unless its handler takes it over."""


async def check_values(body: bytes) -> None:
    """Raises HTTPRequestEntityTooLarge for a JSON body of more than MOST_VALUES arrays, objects and
    members. Text is not counted, and other tasks run meanwhile."""
    if len(body) < _LARGE_BYTES or _values_in(body) <= MOST_VALUES:
        return
    count, in_text, escape = 0, False, b""
    for start in range(0, len(body), _PIECE_BYTES):
        piece = (escape + body[start : start + _PIECE_BYTES]).replace(rb"\\", b"")
        escape = piece[-1:] if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(escape).replace(rb"\"", b"").split(b'"')
        count += _values_in(b"".join(parts[in_text::2]))
        in_text ^= len(parts) % 2 == 0
        if count > MOST_VALUES:
            reason = f"a body of more than {MOST_VALUES} arrays, objects and members"
            raise web.HTTPRequestEntityTooLarge(MOST_VALUES, count, reason=reason)
        await asyncio.sleep(0)


def _values_in(json: bytes) -> int:
    return sum(map(json.count, (b"[", b"{", b":")))


def connection_room(most: int, *, places: int) -> int:
    """Requests that may be open with `most` descriptors: each is a connection, and each turn on one
    of the engines' `places` another."""
    usable = max(2, most - _OWN_DESCRIPTORS)
    return usable - min(places, usable // 2)
