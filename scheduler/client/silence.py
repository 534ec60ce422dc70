"""Decides when a gateway is silent: from then on turns are served by dedicated engines."""


class GatewaySilence:
    """Silent once no probe has been answered for `limit_s`, until the next sign of life."""

    def __init__(self, limit_s: float, *, now: float) -> None:
        self._limit_s = limit_s
        self._heard_s = now
        self.silent = False

    def begin(self, *, now: float) -> None:
        """Probing begins after a rest: its time was not the gateway's."""
        self._heard_s = now

    def hear(self, *, now: float) -> None:
        self._heard_s, self.silent = now, False

    def miss(self, *, began_s: float, now: float) -> None:
        """A probe that began at `began_s` had no answer. One that took far longer than its own
        timeout says that this process stood still, not the gateway."""
        if now - began_s > 2 * self._limit_s:
            self._heard_s = now
        elif now - self._heard_s >= self._limit_s:
            self.silent = True
