"""The expression checker's parsing of PromQL and Grafana variables."""

import pytest

from deploy.check_expressions import dashboard_expressions, selectors, substitute


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
