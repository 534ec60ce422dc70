"""Debian's Prometheus reads the configuration, judges the rules and answers every expression.

Exporters stand in for agent, gateway and engines: they serve the table in `deploy/metrics.py`
through the client library that the real ones use, with counters that grow.
"""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family

from deploy.check_expressions import (
    DASHBOARD,
    DEPLOY,
    Prometheus,
    dashboard_expressions,
    find,
    main,
    substitute,
    variable_values,
)
from deploy.local_prometheus import render, run_prometheus
from deploy.metrics import METRICS, Exporter, Metric, MetricType
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError

CONFIG = DEPLOY / "prometheus"
EXPORTERS = {
    "rosemux-agent": Exporter.AGENT,
    "rosemux-gateway": Exporter.GATEWAY,
    "rosemux-phases": Exporter.PHASES,
    "rosemux-weights": Exporter.WEIGHTS,
    "vllm-production": Exporter.VLLM,
    "vllm-rollout": Exporter.VLLM,
}
LABEL_VALUES = {
    "horizon": ("10", "30", "120"),
    "percentile": ("10", "50", "90"),
    "action": ("lift", "settle", "kill"),
    "backend": ("idle-group", "idle", "time-slicing", "mps", "none"),
    "bound": ("low", "mean", "high"),
    "decision": ("open", "closed"),
    "engine": ("0",),
    "guard": ("error_budget", "burn_1h", "proof"),
    "kind": ("dedicated", "guest"),
    "level": ("node",),
    "mode": ("off", "observe", "harvest"),
    "outcome": (
        *("started", "lost", "duplicated", "migrated", "undelivered", "repeated"),
        *("in_time", "missed", "done", "failed"),
    ),
    "part": ("weights", "context", "kv", "used"),
    "phase": ("rollout", "training"),
    "reason": ("breach", "silent"),
    "slo": ("ttft", "itl"),
    "source": ("pulse.prod.0", "guest"),
    "start": ("cold", "warm"),
    "state": (
        *("kept", "owed", "used", "missing", "held", "free", "together", "apart", "off", "open"),
    ),
}
NODES = ("127.0.0.1", "127.0.0.2")
"""Two machines that export the same: slots and engines of one name."""
BUCKETS = ("0.01", "0.05", "0.25", "1.0", "+Inf")

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(
        shutil.which("promtool") is None and os.environ.get("CI") != "true",
        reason="not installed: apt-get install --no-install-recommends prometheus",
    ),
]


class TableExporter:
    """The metrics of one exporter. Every scrape finds every counter 10 higher."""

    def __init__(self, exporter: Exporter) -> None:
        self._metrics = [metric for metric in METRICS if metric.exported_by is exporter]
        self._scrapes = 0

    def collect(self) -> Iterator[Family]:
        self._scrapes += 1
        for metric in self._metrics:
            yield self._family(metric)

    def _family(self, metric: Metric) -> Family:
        choices = [LABEL_VALUES.get(label, (f"{label}0",)) for label in metric.labels]
        count = 10.0 * self._scrapes
        if metric.kind is MetricType.HISTOGRAM:
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            shares = [count * (n + 1) / len(BUCKETS) for n in range(len(BUCKETS))]
            for labels in product(*choices):
                histogram.add_metric(labels, list(zip(BUCKETS, shares, strict=True)), count)
            return histogram
        is_counter = metric.kind is MetricType.COUNTER
        family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(
            metric.name, metric.help, labels=metric.labels
        )
        for labels in product(*choices):
            family.add_metric(labels, count if is_counter else 0.5)
        return family


def registry_of(exporter: Exporter) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(TableExporter(exporter))
    ProcessCollector(registry=registry)
    return registry


def promtool(*arguments: str, text: str | None = None) -> None:
    result = subprocess.run(
        ["promtool", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def prometheus_url() -> Iterator[str]:
    """A Prometheus that scrapes all exporters and has evaluated all rules."""
    with ExitStack() as stack:
        targets: dict[str, list[str]] = {}
        for (job, exporter), host in product(EXPORTERS.items(), NODES):
            server, thread = start_http_server(0, addr=host, registry=registry_of(exporter))
            stack.callback(thread.join, 5)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            targets.setdefault(job, []).append(f"{host}:{server.server_port}")
        url = stack.enter_context(run_prometheus(targets))
        wait_for_rules(Prometheus(url))
        yield url


def wait_for_rules(prometheus: Prometheus, *, timeout_s: float = 40.0) -> None:
    wait_for(lambda: not find(prometheus), timeout_s=timeout_s)


def wait_for(holds: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    clock = MonotonicClock()
    deadline = clock.now() + timeout_s
    while not holds() and clock.now() < deadline:
        time.sleep(0.5)


def _nodes(prometheus: Prometheus, asked: str) -> int:
    return len(prometheus.values(f"count by (node) ({asked})"))


def test_prometheus_accepts_the_configuration_and_the_rules() -> None:
    promtool("check", "config", str(CONFIG / "prometheus.yml"))


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", str(CONFIG / "tests" / "rosemux_test.yml"))


@pytest.mark.parametrize("exporter", sorted({*EXPORTERS.values()} - {Exporter.VLLM}))
def test_our_names_pass_the_linter_of_prometheus(exporter: Exporter) -> None:
    registry = CollectorRegistry()
    registry.register(TableExporter(exporter))

    promtool("check", "metrics", text=generate_latest(registry).decode())


def test_every_expression_returns_data(prometheus_url: str) -> None:
    assert [found.line for found in find(Prometheus(prometheus_url))] == []
    assert main(["--prometheus", prometheus_url]) == 0


def test_two_nodes_are_two_lines_of_every_panel(prometheus_url: str) -> None:
    prometheus = Prometheus(prometheus_url)
    board = json.loads(DASHBOARD.read_text())
    values = variable_values(board, prometheus)
    assert prometheus.label_values("node", "harvester_mode") == NODES
    of_a_node = 0
    for panel in dashboard_expressions(board):
        asked = substitute(panel.text, values, window="1m")
        if 'node=~"' in asked:
            of_a_node += 1
            # The second node is scraped later than the first, and its rules are evaluated after.
            wait_for(lambda asked=asked: _nodes(prometheus, asked) == 2)
            assert _nodes(prometheus, asked) == 2, panel
            one = asked.replace('node=~".*"', f'node=~"{NODES[0]}"')
            assert 2 * len(prometheus.values(one)) == len(prometheus.values(asked)), panel
    assert of_a_node > 30


@pytest.mark.parametrize(
    ("address", "labels", "node"),
    [
        ("127.0.0.1:9711", {}, "127.0.0.1"),
        ("gpu-7.example:9711", {}, "gpu-7.example"),
        ("gpu-7", {}, "gpu-7"),
        ("[fd00::7]:9711", {}, "fd00::7"),
        ("127.0.0.1:9711", {"node": "rack3-7"}, "rack3-7"),
    ],
)
def test_a_node_is_the_host_unless_the_target_names_it(
    address: str, labels: dict[str, str], node: str
) -> None:
    """Relabels like Prometheus: an anchored expression over the joined labels."""
    config = yaml.safe_load((CONFIG / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for job in ("rosemux-agent", "vllm-production", "vllm-rollout"):
        (rule,) = jobs[job]["relabel_configs"]
        target = labels | {"__address__": address}
        text = rule["separator"].join(target.get(name, "") for name in rule["source_labels"])
        found = re.fullmatch(rule["regex"], text)
        if found is not None:
            target[rule["target_label"]] = found[1]
        assert target["node"] == node


def test_names_of_vllm_keep_their_colon(prometheus_url: str) -> None:
    prometheus = Prometheus(prometheus_url)

    assert prometheus.values("vllm:num_requests_running")
    assert not prometheus.values("vllm_num_requests_running")


def test_the_client_library_does_drop_the_colon(prometheus_url: str) -> None:
    """Else the rewrite in the configuration were not tested above."""
    with urllib.request.urlopen(f"{prometheus_url}/api/v1/targets", timeout=5) as reply:
        active = json.load(reply)["data"]["activeTargets"]
    engine = next(one for one in active if one["labels"]["job"] == "vllm-production")
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    request = urllib.request.Request(engine["scrapeUrl"], headers=accept)

    with urllib.request.urlopen(request, timeout=5) as reply:
        assert b"\nvllm_num_requests_running{" in reply.read()


def dashboard_asking(expressions: Iterable[str], path: Path) -> Path:
    board = json.loads(DASHBOARD.read_text())
    board["panels"] = [
        {"title": expression, "targets": [{"expr": expression}]} for expression in expressions
    ]
    path.write_text(json.dumps(board))
    return path


@pytest.mark.parametrize(
    ("expression", "complaint", "is_fault"),
    [
        ("harvester_never_exported", "no data", True),
        ('up{job="$job"', "parse error", True),
        ("histogram_quantile(0.5, vllm:time_to_first_token_seconds_bucket * 0)", "nan", False),
    ],
)
def test_a_bad_expression_is_found_by_panel(
    prometheus_url: str, tmp_path: Path, expression: str, complaint: str, is_fault: bool
) -> None:
    board = dashboard_asking([expression], tmp_path / "board.json")

    (found,) = find(Prometheus(prometheus_url), dashboard_path=board)

    assert found.is_fault is is_fault
    assert found.line.startswith(f"panel {expression}")
    assert complaint in found.line


def test_a_prometheus_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prometheus", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_a_scrape_job_that_is_not_configured_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="rosemux-agent"):
        render({"agent": ["127.0.0.1:1"]}, interval="1s")
