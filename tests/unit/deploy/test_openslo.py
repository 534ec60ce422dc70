"""The OpenSLO document says what the agent promises and the alerts watch."""

from typing import Any

import pytest
import yaml

from deploy.check_expressions import DEPLOY, rule_expressions, selectors
from deploy.metrics import METRICS, MetricType
from harvester.policy.settings import BudgetSettings


@pytest.fixture
def slo() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "openslo" / "harvesting.yaml").read_text())
    assert (loaded["apiVersion"], loaded["kind"]) == ("openslo/v1", "SLO")
    return loaded


def test_its_target_and_window_are_those_of_the_error_budget(slo: dict[str, Any]) -> None:
    (objective,), (window,) = slo["spec"]["objectives"], slo["spec"]["timeWindow"]
    assert objective["target"] == BudgetSettings().slo_target_ratio
    assert window == {"duration": "28d", "isRolling": True}


def test_its_counters_are_those_of_the_burn_rate(slo: dict[str, Any]) -> None:
    ratio = slo["spec"]["indicator"]["spec"]["ratioMetric"]
    queries = [ratio[part]["metricSource"]["spec"]["query"] for part in ("bad", "total")]
    names = [name for query in queries for name in selectors(query)]
    counters = {metric.name for metric in METRICS if metric.kind is MetricType.COUNTER}
    assert ratio["counter"]
    assert set(names) <= counters
    (burn,) = (each for each in rule_expressions() if each.where.endswith("slo_burn:ratio_rate1h"))
    assert names == list(selectors(burn.text))[:2]
