"""The agent exports exactly the metrics that the rules and the dashboard are written against."""

import importlib.util
import sys
from pathlib import Path

from harvester.agent.metrics import AgentMetrics

TABLE = Path(__file__).parents[3] / "deploy" / "metrics.py"


def _table() -> dict[str, tuple[str, tuple[str, ...]]]:
    spec = importlib.util.spec_from_file_location("deploy_metrics", TABLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["deploy_metrics"] = module
    spec.loader.exec_module(module)
    return {
        metric.name: (metric.kind.value, tuple(sorted(metric.labels)))
        for metric in module.METRICS
        if metric.exported_by.value == "agent"
    }


def test_names_types_and_labels_are_those_of_the_table() -> None:
    metrics = AgentMetrics(version="1")
    exported = {}
    for collector in set(metrics.registry._collector_to_names):
        names = getattr(collector, "_labelnames", None)
        if names is None:
            continue
        for family in collector.describe():
            suffix = "_total" if family.type == "counter" else ""
            exported[family.name + suffix] = (family.type, tuple(sorted(names)))
    assert exported == _table()
