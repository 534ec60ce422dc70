"""How the dashboard asks Prometheus: the newest value, a rate, quantiles of a histogram."""

from grafana_foundation_sdk.builders.timeseries import Panel as Lines

from deploy.grafana.panels import SECONDS, lines

SLOT = 'node=~"$node", slot=~"$slot"'
PLACE = "node, slot"
"""Two nodes have slots of one name: no panel folds them into one line."""


def latest(gauge: str, matchers: str = "", by: str = PLACE, fold: str = "max") -> str:
    return f"{fold} by ({by}) ({gauge}{{{matchers}}})"


def rate(counter: str, by: str, matchers: str = "") -> str:
    return f"sum by ({by}) (rate({counter}{{{matchers}}}[$__rate_interval]))"


def quantile(quantile: float, histogram: str, by: str, matchers: str = "") -> str:
    return f"histogram_quantile({quantile}, {rate(f'{histogram}_bucket', f'le, {by}', matchers)})"


def legend(by: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by.split(", "))


def quantiles(title: str, about: str, histogram: str, by: str, matchers: str = "") -> Lines:
    return lines(
        title,
        f"{about} A quantile is interpolated inside its histogram bucket.",
        SECONDS,
        (quantile(0.5, histogram, by, matchers), f"{legend(by)} p50"),
        (quantile(0.99, histogram, by, matchers), f"{legend(by)} p99"),
    )
