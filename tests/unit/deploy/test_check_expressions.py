"""The expression checker's parsing of PromQL and Grafana variables."""

import re

import pytest

from deploy.check_expressions import (
    Prometheus,
    components,
    dashboard_expressions,
    find,
    selectors,
    substitute,
)
from deploy.metrics import METRICS, Exporter


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("up", {"up"}),
        ("rate(a_total[5m]) / 1e3 > bool -Inf", {"a_total"}),
        ("sum by (slot, le) (rate(a_bucket[1m])) and on (slot) b", {"a_bucket", "b"}),
        ("a > on (x) group_left (y) b unless c offset 5m", {"a", "b", "c"}),
        ("slot:a:rate1h > 14.4 or vllm:b", {"slot:a:rate1h", "vllm:b"}),
        ('a{reason=~"lost (really) | b{c}"}', {"a"}),
        ("histogram_quantile(0.5, sum without (x) (rate(h_bucket[1m])))", {"h_bucket"}),
    ],
)
def test_finds_metrics_and_nothing_else(text: str, names: set[str]) -> None:
    assert {one.split("{")[0].strip() for one in selectors(text)} == names


def test_a_selector_keeps_its_matchers_and_loses_its_range() -> None:
    assert selectors('increase(a_total{x!="}", y=~"b|c"}[10m]) > 0') == (
        'a_total{x!="}", y=~"b|c"}',
    )


def test_known_variables_are_replaced_in_both_spellings() -> None:
    text = 'rate(a{x=~"$job", y="${job}", z="$other"}[$__rate_interval])'

    assert substitute(text, {"job": ".+"}, window="1m") == (
        'rate(a{x=~".+", y=".+", z="$other"}[1m])'
    )


def test_panels_inside_a_collapsed_row_are_found() -> None:
    inner = {"title": "inner", "targets": [{"expr": "a"}, {"expr": "b"}]}

    found = dashboard_expressions({"panels": [{"title": "row", "panels": [inner]}]})

    assert [one.text for one in found] == ["a", "b"]


class Scraping(Prometheus):
    """A Prometheus with all series of some components; the agent is scraped, if any of ours."""

    def __init__(self, *exporters: Exporter) -> None:
        self._names = [
            name for each in METRICS if each.exported_by in exporters for name in each.series
        ]

    def format_query(self, expr: str) -> str:
        return expr

    def values(self, expr: str) -> tuple[float, ...]:
        if regex := re.findall(r'__name__(=~|!~)"([^"]+)"', expr):
            matched = [
                all((re.fullmatch(names, name) is None) == (kind == "!~") for kind, names in regex)
                for name in self._names
            ]
            return (float(sum(matched)),) if any(matched) else ()
        jobs = re.findall(r'job="rosemux-(\w+)"', expr)
        asked = ":harvester_" in expr or any(name in expr for name in self._names)
        return (1.0,) if asked and {*jobs} <= {"agent"} else ()

    def label_values(self, label: str, selector: str) -> tuple[str, ...]:
        return ("a",)


def test_a_component_that_is_not_scraped_is_one_line_and_no_fault() -> None:
    found = find(Scraping(Exporter.AGENT, Exporter.VLLM, Exporter.PROMETHEUS))

    lines = [one.line for one in found if one.line.endswith("not scraped here")]
    assert lines == [f"{each}: not scraped here" for each in ("gateway", "phases", "weights")]
    assert [one.line for one in found if one.is_fault] == []


def test_a_series_that_a_scraped_component_lacks_is_a_fault() -> None:
    scraping = Scraping(Exporter.AGENT, Exporter.VLLM, Exporter.PROMETHEUS)
    scraping._names.remove("harvester_unrecorded")

    (found,) = [one for one in find(scraping) if one.is_fault]

    assert found.line == "rule RoseMuxSlotUnrecorded: no data: harvester_unrecorded"


def test_a_prometheus_without_any_component_is_a_fault() -> None:
    assert all(one.is_fault for one in find(Scraping()) if "not scraped" in one.line)


def test_an_expression_is_of_the_components_whose_series_it_asks_for() -> None:
    assert components('up{job="rosemux-phases"} == 0') == {"phases"}
    assert components('a > scheduler_phase_jobs{x="y"}') == {"phases"}
    assert components("rl_job:scheduler_tokens:rate1m / vllm:x") == {"gateway", "vllm"}
