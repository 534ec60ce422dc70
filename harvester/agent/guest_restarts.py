"""Restarts a failed guest engine after waits that double; apart so that the command stays thin.

A failing guest costs the host its start each time: memory, a core, the store's link. systemd 252
restarts at one pace only.
"""

import asyncio
import logging
from collections.abc import Callable

from harvester.agent.guest_engine import GuestEngine
from harvester.contracts.clock import Clock
from harvester.contracts.doubling import doubled_s
from harvester.platform.http_kit import stop_event

_log = logging.getLogger(__name__)

_FIRST_WAIT_S, _MOST_WAIT_S = 10.0, 600.0
_STEADY_S = 600.0
"""A guest that lived for this long restarts after the first wait again."""


def restart_wait(life_s: float, failures: int) -> tuple[float, int]:
    """Seconds until the next start, after a life of `life_s` that ended in failure, and the
    failures in a row with this one; `failures` are those before."""
    failures = 0 if life_s >= _STEADY_S else failures
    return doubled_s(_FIRST_WAIT_S, failures, most_s=_MOST_WAIT_S), failures + 1


async def run_with_restarts(engine: Callable[[], GuestEngine], *, clock: Clock) -> int:
    """Run one engine after the other until one ends without failure or a stop is requested: 0.
    Raises ConfigError for an engine that cannot be started."""
    failures = 0
    while True:
        began_s = clock.now()
        status = await engine().run()
        if status == 0:
            return 0
        stop = stop_event()
        life_s = clock.now() - began_s
        wait_s, failures = restart_wait(life_s, failures)
        _log.error(
            "the guest ended with status %d after %.0f s; the next one starts in %.0f s",
            status,
            life_s,
            wait_s,
        )
        try:
            await asyncio.wait_for(stop.wait(), wait_s)
        except TimeoutError:
            continue
        return 0
