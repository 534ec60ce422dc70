"""How the dashboard asks Prometheus: the newest value, a rate, quantiles of a histogram."""

from grafana_foundation_sdk.builders.timeseries import Panel as Lines

from deploy.grafana.panels import SECONDS, lines

SLOT = 'slot=~"$slot"'


def latest(gauge: str, matchers: str = "", by: str = "slot", fold: str = "max") -> str:
    return f"{fold} by ({by}) ({gauge}{{{matchers}}})"


def rate(counter: str, by: str, matchers: str = "") -> str:
    return f"sum by ({by}) (rate({counter}{{{matchers}}}[$__rate_interval]))"


def quantile(quantile: float, histogram: str, by: str, matchers: str = "") -> str:
    return f"histogram_quantile({quantile}, {rate(f'{histogram}_bucket', f'le, {by}', matchers)})"


def quantiles(title: str, about: str, histogram: str, by: str, matchers: str = "") -> Lines:
    return lines(
        title,
        f"{about} A quantile is interpolated inside its histogram bucket.",
        SECONDS,
        (quantile(0.5, histogram, by, matchers), f"{{{{{by}}}}} p50"),
        (quantile(0.99, histogram, by, matchers), f"{{{{{by}}}}} p99"),
    )
