"""What a peer's HTTP reply says, in full and bounded."""

import aiohttp


async def body_of(reply: aiohttp.ClientResponse, *, most_bytes: int) -> bytes:
    """What is longer is cut there, for its reader to find out.

    `reply.content.read(most_bytes)` is not this: it returns what has come by then, on a network a
    segment or two.
    """
    body = bytearray()
    while len(body) < most_bytes:
        part = await reply.content.read(most_bytes - len(body))
        if not part:
            break
        body += part
    return bytes(body)
