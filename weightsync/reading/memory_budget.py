"""Budget of the memory that a receiver takes beside the weights that it writes to.

Half of it is kept: payloads and decoded changes that wait for the pause. The other half is lent to
tensors in transit. A tensor larger than a half goes alone. Decides on sizes only; allocates
nothing.
"""

from harvester.contracts.errors import ConfigError

STAGING_BYTES = 1 << 30
"""A step of a 70 GB model fits undecoded, and one of a 10 GB model decoded, which shortens the
pause; a full checkpoint of either waits in a file."""
MIN_STAGING_BYTES = 1 << 20


class MemoryBudget:
    """Memory budget of one staging. Used by one thread at a time."""

    def __init__(self, limit_bytes: int) -> None:
        """Raises ConfigError for a limit below MIN_STAGING_BYTES."""
        if limit_bytes < MIN_STAGING_BYTES:
            raise ConfigError(f"staging_bytes must be at least {MIN_STAGING_BYTES}")
        self.limit_bytes = limit_bytes
        self._kept_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """Largest number of bytes in transit at a time, for `spread` of batches.py."""
        return self.limit_bytes // 2

    def keep(self, size_bytes: int) -> bool:
        """Whether `size_bytes` more may stay in memory; if so, they count until given back."""
        fits = self._kept_bytes + size_bytes <= self.limit_bytes // 2
        self._kept_bytes += size_bytes if fits else 0
        return fits

    def give_back(self, size_bytes: int) -> None:
        self._kept_bytes -= size_bytes
