"""Bounds what open requests hold in memory, before their bodies are read.

The queue of routing bounds turns. Their prompts are bounded here: a body counts from the time at
which its length is known until its request is answered, so that a thousand large requests at once
are refused at the door and not in the middle of their decoding. Only one job is active at a time,
so tenants compete for memory and never for places in the queue.
"""

from contextlib import ExitStack
from typing import Final

from aiohttp import web

_OWN_DESCRIPTORS = 64
"""Files, probes of engines and agents, scrapes, and clients that are being refused."""
HELD_BODY: Final = web.RequestKey("held_body", ExitStack)
"""Count of a request's body: closed with its reply, unless its handler takes it over."""


def connection_room(most: int, *, places: int) -> int:
    """Requests that may be open with `most` descriptors: each is a connection, and each turn on one
    of the engines' `places` another."""
    usable = max(2, most - _OWN_DESCRIPTORS)
    return usable - min(places, usable // 2)
