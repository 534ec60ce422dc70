"""Connections whose other side has gone, and those whose other side only reads nothing."""

import asyncio
import socket

from harvester.platform.keep_alive import keep_alive

SOON_S = 1.0
"""Stands for a minute."""


async def test_a_client_that_lives_may_leave_its_stream_unread() -> None:
    """As the event loop of a trainer does in a training step."""
    loop = asyncio.get_running_loop()
    body = b"x" * (1 << 22)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listening.getsockname())
        served = keep_alive(listening.accept()[0], within_s=SOON_S)
        with served:
            served.setblocking(False)
            client.setblocking(False)
            sending = asyncio.create_task(loop.sock_sendall(served, body))
            await asyncio.wait({sending}, timeout=5.0)
            assert not sending.done()
            read = 0
            while read < len(body):
                read += len(await loop.sock_recv(client, 1 << 16))
            await sending
