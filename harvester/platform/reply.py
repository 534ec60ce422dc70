"""Reads the body of a peer's HTTP reply in full, up to a bound."""

import aiohttp


async def body_of(reply: aiohttp.ClientResponse, *, most_bytes: int) -> bytes:
    """Body of a reply, cut at `most_bytes`; a cut JSON body fails in its reader's decoder.

    `reply.content.read(most_bytes)` differs: it returns the bytes received so far, on a network one
    or two segments.
    """
    body = bytearray()
    while len(body) < most_bytes:
        part = await reply.content.read(most_bytes - len(body))
        if not part:
            break
        body += part
    return bytes(body)
