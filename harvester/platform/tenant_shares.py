"""A bound that is shared by the tenants who use it: one tenant's load refuses no other's."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from aiohttp import web

from harvester.contracts.errors import Exhausted


class Pressure(Exhausted):
    """More waits here than may be held; the same request may be held a moment later."""


class TenantShares:
    """One bound, divided among the tenants that hold a part of it.

    A share is the bound divided by the number of these tenants. Up to its share a tenant is always
    admitted, beyond it only while the total stays within the bound. N tenants hold at most
    1 + 1/2 + ... + 1/N times the bound, and a first request each.
    """

    def __init__(self, most: int, *, name: str) -> None:
        """`name`: the bound's name in refusals."""
        self.most = most
        """May be replaced: what is held stays."""
        self._name = name
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        return self._held.total()

    @contextmanager
    def holding(self, tenant: str, amount: int) -> Iterator[None]:
        """Counts an amount while the context is open. Raises Pressure beyond the bound; a tenant's
        request alone is always taken."""
        own = self._held[tenant]
        share = self.most // len(self._held.keys() | {tenant})
        if own and own + amount > share and self.held + amount > self.most:
            raise Pressure(
                f"{self._name} is {self.most}: {self.held} are held, {own} of them by {tenant}, "
                f"which asks for {amount} more; its share is {share}"
            )
        with self.keeping(tenant, amount):
            yield

    def counter(self, tenant: str, held: ExitStack, *, most: int) -> Callable[[int], None]:
        """Counts a body that grows into `held`: what has come, and at most as much again. The
        counter raises Pressure, and HTTPRequestEntityTooLarge beyond `most`."""
        counted = 0

        def count(so_far: int) -> None:
            nonlocal counted
            if so_far > most:
                raise web.HTTPRequestEntityTooLarge(most, so_far)
            if so_far > counted:
                more = max(so_far - counted, min(counted, most - counted))
                held.enter_context(self.holding(tenant, more))
                counted += more

        return count

    @contextmanager
    def keeping(self, tenant: str, amount: int) -> Iterator[None]:
        """Like `holding`, for an amount that exists already and cannot be refused any more."""
        self._held[tenant] += amount
        try:
            yield
        finally:
            self._held[tenant] -= amount
            if not self._held[tenant]:
                del self._held[tenant]
