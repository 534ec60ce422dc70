"""How a panel of the dashboard looks: one place for units, sizes and the data source.

Knows Grafana's builders, no metric.
"""

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import QueryVariable, ThresholdsConfig
from grafana_foundation_sdk.models.common import (
    DataSourceRef,
    LegendDisplayMode,
    LegendPlacement,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
SECONDS, RATIO, BYTES, COUNT, PER_SECOND = "s", "percentunit", "bytes", "short", "cps"
DOLLARS = "currencyUSD"

Query = tuple[str, str]
"""An expression and the legend of its series."""


def _targets(queries: tuple[Query, ...]) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + index))
        for index, (expr, legend) in enumerate(queries)
    ]


def lines(title: str, about: str, unit: str, *queries: Query, width: int = 8) -> timeseries.Panel:
    """Values over time."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
    return (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(width)
        .height(8)
        .fill_opacity(8)
        .show_points(VisibilityMode.NEVER)
        .legend(legend.placement(LegendPlacement.BOTTOM).show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .targets(_targets(queries))
    )


def number(
    title: str, about: str, unit: str, *queries: Query, bad_above: float | None = None
) -> stat.Panel:
    """The newest value, red from `bad_above` on."""
    steps = [Threshold(value=None, color="green")]
    if bad_above is not None:
        steps.append(Threshold(value=bad_above, color="red"))
    thresholds = ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(4)
        .height(4)
        .thresholds(thresholds)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .targets(_targets(queries))
    )


def choice(
    name: str, label: str, query: str, *, first: str | None = None, everything: str = ".+"
) -> QueryVariable:
    """A variable filled from label values: several at once, or one that starts as `first`.

    `everything` is what All matches.
    """
    variable = (
        QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(DATASOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    if first is not None:
        chosen = VariableOption(selected=True, text=first, value=first)
        return variable.sort(VariableSort.NUMERICAL_ASC).current(chosen)
    all_of_them = VariableOption(selected=True, text="All", value="$__all")
    return (
        variable.multi(True)
        .include_all(True)
        .all_value(everything)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .current(all_of_them)
    )
