"""Rules, dashboard, runbooks and exporters agree on the names in `deploy/metrics.py`."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from deploy.check_expressions import (
    DASHBOARD,
    DEPLOY,
    RULES,
    Expression,
    dashboard_expressions,
    rule_expressions,
    selectors,
)
from deploy.metrics import METRICS, Exporter, MetricType

KNOWN = {series: metric for metric in METRICS for series in metric.series}
RECORDED = {one.where.removeprefix("rule "): one for one in rule_expressions() if not one.is_alert}
SCRAPER_LABELS = {"node", "job", "instance", "le"}
OF_A_NODE = {Exporter.AGENT, Exporter.VLLM}
"""Two nodes have slots and engines of one name."""


def all_expressions() -> tuple[Expression, ...]:
    return (*rule_expressions(), *dashboard_expressions(json.loads(DASHBOARD.read_text())))


def metric_names(text: str) -> frozenset[str]:
    return frozenset(one.split("{")[0].strip() for one in selectors(text))


def exported_labels(name: str) -> set[str]:
    if name in RECORDED:
        return set().union(*(exported_labels(one) for one in metric_names(RECORDED[name].text)))
    return set(KNOWN[name].labels)


@pytest.mark.parametrize("expression", all_expressions(), ids=lambda one: one.where)
def test_every_metric_of_an_expression_is_in_the_table(expression: Expression) -> None:
    names = metric_names(expression.text)

    assert names
    assert names - KNOWN.keys() - RECORDED.keys() == set()


@pytest.mark.parametrize("expression", all_expressions(), ids=lambda one: one.where)
def test_every_label_of_an_expression_is_exported(expression: Expression) -> None:
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
        assert metric.name.endswith("_total") == (metric.kind is MetricType.COUNTER), metric.name
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


def place_of(expression: Expression) -> set[str]:
    """Labels without which its series would be those of several slots or engines."""
    place: set[str] = set()
    for name in metric_names(expression.text):
        for metric in [KNOWN[one] for one in underlying(name)]:
            if metric.exported_by in OF_A_NODE:
                place |= {"node"} | set(metric.labels) & {"slot"}
    return place


def underlying(name: str) -> set[str]:
    if name not in RECORDED:
        return {name}
    return set().union(*(underlying(one) for one in metric_names(RECORDED[name].text)))


@pytest.mark.parametrize("expression", all_expressions(), ids=lambda one: one.where)
def test_nothing_is_added_up_over_nodes_or_slots(expression: Expression) -> None:
    for group in re.findall(r"\bby\s*\(([^)]*)\)", expression.text):
        kept = {label.strip() for label in group.split(",")}
        assert place_of(expression) <= kept, expression.text


@pytest.mark.parametrize(
    "expression",
    dashboard_expressions(json.loads(DASHBOARD.read_text())),
    ids=lambda one: one.where,
)
def test_every_panel_of_a_node_s_series_obeys_the_choice_of_nodes(expression: Expression) -> None:
    chosen = "node" in place_of(expression)
    for selector in selectors(expression.text):
        assert ('node=~"$node"' in selector) is chosen, selector


def test_every_legend_and_alert_names_the_place() -> None:
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            for label in place_of(Expression(where=panel["title"], text=target["expr"])):
                assert f"{{{{{label}}}}}" in target["legendFormat"], panel["title"]
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                said = rule["annotations"]["summary"]
                for label in place_of(Expression(where=rule["alert"], text=rule["expr"])):
                    assert f"$labels.{label}" in said, rule["alert"]
