"""GPU memory that production and guest share page by page, as their kvcached segments say."""

from harvester.contracts.errors import Unsupported
from harvester.platform.kv_segment import KvSegment, KvUse
from harvester.policy.sample import KvReading, MemoryReading


class SharedKv:
    """Reads the KV segments of production and guest. `total_bytes` bounds both together on one
    GPU.
    """

    def __init__(
        self, production: tuple[KvSegment, ...], guest: KvSegment, *, total_bytes: int
    ) -> None:
        self._production, self._guest = production, guest
        self._total_bytes = total_bytes

    def read(self) -> MemoryReading:
        """Total KV mapped and its limit. No limit if a production segment is unreadable: unknown is
        not free.
        """
        used_bytes = 0
        for segment in self._production:
            use = _use(segment)
            if use is None:
                return MemoryReading()
            used_bytes += use.mapped_bytes
        guest = _use(self._guest)
        if guest is not None:
            used_bytes += guest.mapped_bytes
        return MemoryReading(used_bytes=used_bytes, limit_bytes=self._total_bytes)

    def read_guest(self) -> KvReading:
        """KV bytes that the guest has mapped, and the limit that it has set itself."""
        try:
            use = self._guest.read()
        except Unsupported as error:
            return KvReading(fault=str(error))
        if use is None:
            return KvReading(fault="no segment")
        return KvReading(mapped_bytes=use.mapped_bytes, limit_bytes=use.limit_bytes)


def _use(segment: KvSegment) -> KvUse | None:
    try:
        return segment.read()
    except Unsupported:
        return None
