"""Does a Prometheus hold data for everything that the dashboard and the rules ask of it?

    python deploy/check_expressions.py --prometheus http://127.0.0.1:9090

Prints each expression that does not parse or returns no series and exits 1, else exits 0. A
component of which there is no series at all is one line, and expressions on it are no faults.
Expressions whose series hold only NaN or infinity, such as a quantile of nothing, are printed too,
but are no fault. A dashboard query or a recording rule must itself return something. An alert that
does not fire returns nothing, so each of its selectors must return something. Only reads.
"""

import argparse
import json
import math
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent
DASHBOARD = DEPLOY / "grafana" / "rosemux.json"
RULES = DEPLOY / "prometheus" / "rules" / "rosemux.yml"
MAX_REPLY_BYTES = 16 << 20

_STRING = r'"(?:[^"\\]|\\.)*"'
_MATCHERS = rf"\s*\{{(?:{_STRING}|[^}}\"])*\}}"
_SELECTOR = re.compile(rf"(?<![\w.:])[a-zA-Z_:][\w:]*(?:{_MATCHERS})?(?!\s*\(|[\w:])")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_IF_CONFIGURED = frozenset(
    {
        "harvester_interlock_known",
        *(
            f"{prefix}_certificate_expiry_timestamp_seconds"
            for prefix in ("harvester", "scheduler", "scheduler_phase", "weightsync")
        ),
    }
)
"""Selectors of alerts on what is off by default."""
_COMPONENTS = {
    "agent": "harvester_.+",
    "gateway": "scheduler_.+",
    "phases": "scheduler_phase_.+",
    "weights": "weightsync_.+",
    "vllm": "vllm:.+",
}
"""Names of each component's series. `phases` comes after `gateway`, whose names begin alike."""
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "Inf", "NaN"}


@dataclass(frozen=True, slots=True)
class Expression:
    where: str
    text: str
    is_alert: bool = False


def selectors(text: str) -> tuple[str, ...]:
    """The instant selectors of an expression, in order: name and matchers, no range."""
    text = re.sub(r"\[[^\]]*\]", " ", _GROUPING.sub(" ", text))
    found = (match.group() for match in _SELECTOR.finditer(text))
    return tuple(one for one in found if one not in _WORDS)


def rule_expressions(path: Path = RULES) -> tuple[Expression, ...]:
    groups = yaml.safe_load(path.read_text())["groups"]
    return tuple(
        Expression(
            where=f"rule {rule.get('alert') or rule['record']}",
            text=rule["expr"],
            is_alert="alert" in rule,
        )
        for group in groups
        for rule in group["rules"]
    )


def dashboard_expressions(dashboard: dict[str, Any]) -> tuple[Expression, ...]:
    """Each panel's queries, with Grafana's variables still in them."""
    return tuple(
        Expression(where=f"panel {panel['title']}", text=target["expr"])
        for panel in _panels(dashboard["panels"])
        for target in panel.get("targets", ())
    )


def _panels(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels") or [])


class Prometheus:
    """The three queries that the checker needs. ValueError carries Prometheus's message about a bad
    query."""

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s

    def format_query(self, expr: str) -> str:
        return str(self._get("/api/v1/format_query", query=expr))

    def values(self, expr: str) -> tuple[float, ...]:
        reply = self._get("/api/v1/query", query=expr)
        if reply["resultType"] == "scalar":
            return (float(reply["result"][1]),)
        return tuple(float(series["value"][1]) for series in reply["result"])

    def label_values(self, label: str, selector: str) -> tuple[str, ...]:
        found = self._get(f"/api/v1/label/{label}/values", **{"match[]": selector})
        return tuple(sorted(str(value) for value in found))

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=self._timeout_s) as reply:
                body = reply.read(MAX_REPLY_BYTES)
        except urllib.error.HTTPError as error:
            message = error.read(MAX_REPLY_BYTES).decode(errors="replace")
            raise ValueError(f"HTTP {error.code}: {message[:500]}") from error
        return json.loads(body)["data"]


def variable_values(dashboard: dict[str, Any], prometheus: Prometheus) -> dict[str, str]:
    """Values of Grafana's variables: a match for everything if several may be chosen, else the
    current or first value. Raises ValueError for an unknown kind of query."""
    values: dict[str, str] = {}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "query":
            continue
        if variable.get("multi"):
            values[variable["name"]] = variable.get("allValue") or ".+"
            continue
        query = re.fullmatch(r"label_values\((.+),\s*(\w+)\)", variable["query"])
        if query is None:
            raise ValueError(f"variable {variable['name']}: not label_values(selector, label)")
        found = prometheus.label_values(query[2], substitute(query[1], values, window=""))
        chosen = (variable.get("current") or {}).get("value")
        values[variable["name"]] = chosen if chosen in found else next(iter(found), "none")
    return values


def substitute(text: str, values: dict[str, str], *, window: str) -> str:
    known = {"__rate_interval": window, "__interval": window, **values}
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: known.get(m[1] or m[2], m[0]), text)


def components(text: str) -> frozenset[str]:
    """Components whose series an expression asks for, recorded series and their scrapes too."""
    found = set(re.findall(r'\bjob="rosemux-(\w+)"', text))
    for selector in selectors(text):
        name = selector.partition("{")[0]
        of_name = [each for each, names in _COMPONENTS.items() if re.search(rf"\b{names}", name)]
        found.update(of_name[-1:])
    return frozenset(found)


def absent_components(prometheus: Prometheus) -> tuple[str, ...]:
    """Components of which there is no series."""
    matchers = {each: f'__name__=~"{names}"' for each, names in _COMPONENTS.items()}
    matchers["gateway"] += f', __name__!~"{_COMPONENTS["phases"]}"'
    return tuple(each for each in matchers if not prometheus.values(f"count({{{matchers[each]}}})"))


@dataclass(frozen=True, slots=True)
class ExpressionFinding:
    line: str
    is_fault: bool
    """False if the series exist but have no finite value yet."""


def find(
    prometheus: Prometheus, *, dashboard_path: Path = DASHBOARD, window: str = "1m"
) -> tuple[ExpressionFinding, ...]:
    """Findings over every rule and panel: faults, components that are not scraped, and series
    without a value yet."""
    dashboard = json.loads(dashboard_path.read_text())
    values = variable_values(dashboard, prometheus)
    panels = (
        Expression(one.where, substitute(one.text, values, window=window))
        for one in dashboard_expressions(dashboard)
    )
    absent, none = absent_components(prometheus), len(_COMPONENTS)
    found = [
        ExpressionFinding(f"{each}: not scraped here", is_fault=len(absent) == none)
        for each in absent
    ]
    for one in (*rule_expressions(), *panels):
        found += _findings(prometheus, one, frozenset(absent))
    return tuple(found)


def _findings(
    prometheus: Prometheus, expression: Expression, absent: frozenset[str]
) -> Iterator[ExpressionFinding]:
    where, text = expression.where, expression.text
    try:
        prometheus.format_query(text)
        for query in selectors(text) if expression.is_alert else (text,):
            values = prometheus.values(query)
            if not values and absent & components(query):
                continue
            if not values:
                off = query.partition("{")[0] in _IF_CONFIGURED
                line = f"{where}: no data: {query}{' (off unless configured)' if off else ''}"
                yield ExpressionFinding(line, is_fault=not off)
            elif not any(math.isfinite(value) for value in values):
                yield ExpressionFinding(f"{where}: {values[0]} so far: {query}", is_fault=False)
    except ValueError as error:
        yield ExpressionFinding(f"{where}: {error}: {text}", is_fault=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--window", default="1m", help="range of rates in panels (default 1m)")
    options = parser.parse_args(arguments)
    try:
        found = find(Prometheus(options.prometheus), window=options.window)
    except OSError as error:
        print(f"no answer from {options.prometheus}: {error}; is it running?", file=sys.stderr)
        return 2
    faults = [one for one in found if one.is_fault]
    for one in found:
        print(one.line)
    print(f"{len(faults)} faults, {len(found) - len(faults)} not scraped or without a value yet")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
