"""Prometheus exports of a weight server and a relay."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from harvester.platform import certificate_expiry


class TransferMetrics:
    """Labels: stores that exist, closed sets of outcomes."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.transfers = self._counter("transfers", "Files or ranges sent.", "store", "outcome")
        self.sent = self._counter("sent_bytes", "Bytes of files sent.", "store")
        self.composed = self._counter("composed_deltas", "Skip deltas made.", "store", "outcome")
        self.refused = self._counter("refused", "Requests refused.", "reason")
        self.active = Gauge(
            "weightsync_transfers_active", "Transfers under way.", registry=self.registry
        )
        self.pulled = self._counter("pulled_bytes", "Bytes that a relay pulled.", "store")
        self.dropped = self._counter("dropped_objects", "Cached files dropped.", "reason")
        self.cached = Gauge(
            "weightsync_cached_bytes", "Bytes that a relay's cache holds.", registry=self.registry
        )
        self._certificates = Gauge(
            f"weightsync_{certificate_expiry.NAME}",
            certificate_expiry.HELP,
            certificate_expiry.LABELS,
            registry=self.registry,
        )

    def render(self) -> bytes:
        certificate_expiry.show_expiries(self._certificates)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"weightsync_{name}", text, labels, registry=self.registry)
