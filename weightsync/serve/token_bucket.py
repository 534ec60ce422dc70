"""The bandwidth cap: seconds that the next bytes must wait. Pure; the time is an argument."""

from harvester.contracts.errors import ConfigError

BURST_S = 0.25
"""Burst after a pause, in seconds of the rate: a few socket buffers."""


class TokenBucket:
    """Limits to `bytes_per_s` on average, in request order."""

    def __init__(self, bytes_per_s: float, *, burst_bytes: float | None = None) -> None:
        if bytes_per_s <= 0:
            raise ConfigError(f"a bandwidth cap of {bytes_per_s:g} bytes/s: use more than 0")
        self._rate = bytes_per_s
        self._burst_bytes = bytes_per_s * BURST_S if burst_bytes is None else burst_bytes
        self._level_bytes = self._burst_bytes
        self._at_s: float | None = None

    def take(self, size_bytes: int, *, now: float) -> float:
        """Seconds to wait before these bytes may be sent. They count as sent from here on."""
        earned = 0.0 if self._at_s is None else max(0.0, now - self._at_s) * self._rate
        self._at_s = now if self._at_s is None else max(now, self._at_s)
        self._level_bytes = min(self._burst_bytes, self._level_bytes + earned) - size_bytes
        return max(0.0, -self._level_bytes / self._rate)
