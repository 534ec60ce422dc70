"""Rules, dashboard, runbooks and exporters agree on the names in `deploy/metrics.py`."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from deploy.check_expressions import (
    DASHBOARD,
    DEPLOY,
    Expression,
    dashboard_expressions,
    metric_names,
    rule_expressions,
)
from deploy.metrics import METRICS, Exporter, Kind

KNOWN = {series: metric for metric in METRICS for series in metric.series}
RECORDED = {one.where.removeprefix("rule "): one for one in rule_expressions() if not one.is_alert}
SCRAPER_LABELS = {"job", "instance", "le"}


def all_expressions() -> tuple[Expression, ...]:
    return (*rule_expressions(), *dashboard_expressions(json.loads(DASHBOARD.read_text())))


def exported_labels(name: str) -> set[str]:
    if name in RECORDED:
        return set().union(*(exported_labels(one) for one in metric_names(RECORDED[name].text)))
    return set(KNOWN[name].labels)


@pytest.mark.parametrize("expression", all_expressions(), ids=lambda one: one.where)
def test_every_metric_that_is_asked_for_is_in_the_table(expression: Expression) -> None:
    names = metric_names(expression.text)

    assert names
    assert names - KNOWN.keys() - RECORDED.keys() == set()


@pytest.mark.parametrize("expression", all_expressions(), ids=lambda one: one.where)
def test_every_label_that_is_asked_for_is_exported(expression: Expression) -> None:
    grouped = re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", expression.text)
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression.text)
    asked = {label.strip() for group in grouped for label in group.split(",") if label.strip()}
    exported = set().union(*(exported_labels(one) for one in metric_names(expression.text)))

    assert (asked | set(matched)) - exported - SCRAPER_LABELS == set()


@pytest.mark.parametrize("runbook", sorted((DEPLOY / "runbooks").glob("*.md")), ids=str)
def test_runbooks_name_only_metrics_that_exist(runbook: Path) -> None:
    named = set(re.findall(r"(?<![\w:])(?:harvester|scheduler)_\w+", runbook.read_text()))

    assert named - KNOWN.keys() == set()


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert not set(metric.labels) & SCRAPER_LABELS, metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_installed_vllm_has_every_vllm_metric() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()

    for metric in METRICS:
        if metric.exported_by is Exporter.VLLM:
            assert f'"{metric.name.removesuffix("_total")}"' in source
