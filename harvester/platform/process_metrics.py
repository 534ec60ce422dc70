"""The Prometheus metrics of a process: under one prefix, with its own use and its certificates."""

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from harvester.platform import certificate_expiry


class ProcessMetrics:
    def __init__(self, prefix: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._prefix = prefix
        self._certificates = self._gauge(
            certificate_expiry.NAME, certificate_expiry.HELP, certificate_expiry.LABELS
        )
        self._totals: dict[Counter, int] = {}

    def raise_to(self, counter: Counter, total: int) -> None:
        """Brings a counter to a total that is counted elsewhere."""
        counter.inc(total - self._totals.get(counter, 0))
        self._totals[counter] = total

    def render(self) -> bytes:
        """All metrics in Prometheus's text format."""
        certificate_expiry.show_expiries(self._certificates)
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"{self._prefix}_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"{self._prefix}_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Histogram:
        return Histogram(
            f"{self._prefix}_{name}", text, labels, buckets=buckets, registry=self.registry
        )
