"""The agent and the gateway export the metrics of the table, from their first scrape on."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deploy.metrics import METRICS, Exporter
from harvester.agent.metrics import AgentMetrics
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig, SlotConfig
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.platform.certificate_expiry import note_expiry
from tests.certificates import Authority
from tests.virtual_clock import VirtualClock

Shape = tuple[str, str, frozenset[str]]
SECOND_NS = 10**9


def table(exporter: Exporter) -> set[Shape]:
    return {
        (metric.name, metric.kind.value, frozenset(metric.labels))
        for metric in METRICS
        if metric.exported_by is exporter
    }


def exported(registry: CollectorRegistry) -> set[Shape]:
    shapes = set()
    for collector in registry._collector_to_names:
        if hasattr(collector, "_labelnames"):
            (family,) = collector.describe()
            suffix = "_total" if family.type == "counter" else ""
            shapes.add((family.name + suffix, family.type, frozenset(collector._labelnames)))
    return shapes


def sample_names(registry: CollectorRegistry) -> set[str]:
    return {sample.name for family in registry.collect() for sample in family.samples}


def test_the_agent_exports_the_table() -> None:
    assert exported(AgentMetrics(version="1").registry) == table(Exporter.AGENT)


def test_the_gateway_exports_the_table() -> None:
    from scheduler.gateway.gateway_metrics import GatewayMetrics

    assert exported(GatewayMetrics().registry) == table(Exporter.GATEWAY)


def test_the_phase_control_exports_the_table() -> None:
    from scheduler.rollmux.control.metrics import PhaseMetrics

    assert exported(PhaseMetrics().registry) == table(Exporter.PHASES)


def test_a_weight_server_exports_the_table() -> None:
    from weightsync.serve.metrics import TransferMetrics

    assert exported(TransferMetrics().registry) == table(Exporter.WEIGHTS)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeAgent]:
    """An agent beside a production engine that has just begun and a guest."""
    slot = SlotConfig(name="slot0")
    # A stop and an interlock have series only where there are some.
    alerts = {"url": "http://127.0.0.1:1", "alerts": ["Fire"]}
    config = AgentConfig.model_validate(
        {
            "page_root": tmp_path,
            "state_dir": tmp_path / "state",
            "slots": (slot,),
            "stop": "hold",
            "interlocks": {"alerts": alerts},
        }
    )
    pages = PageDirectory.create(config.pages_of(slot))
    pulse, guest = pages.pulse_writer("prod", 0), pages.guest_writer()
    pulse.write(Pulse(), now_ns=monotonic_ns(), ttl_ns=60 * SECOND_NS)
    guest.write(Guest(), now_ns=monotonic_ns(), ttl_ns=60 * SECOND_NS)
    node = NodeAgent(config, clock=VirtualClock(), version="1")
    yield node
    node.close()
    pulse.close()
    guest.close()


def test_after_one_beat_every_series_of_the_agent_is_there(node: NodeAgent, tmp_path: Path) -> None:
    node.beat()
    # A certificate has a series where there is one.
    context = ssl.create_default_context()
    note_expiry(context, Authority(tmp_path).file)
    node.refresh_metrics()

    wanted = {s for m in METRICS if m.exported_by is Exporter.AGENT for s in m.series}
    assert wanted - sample_names(node.metrics.registry) == set()


def test_unknown_idleness_is_no_number(node: NodeAgent) -> None:
    node.beat()
    node.refresh_metrics()

    idle = node.metrics.registry.get_sample_value("harvester_idle_ratio", {"slot": "slot0"})
    assert idle is not None
    assert idle != idle
