"""The dashboard as code.

    python -m deploy.grafana.dashboard          writes deploy/grafana/rosemux.json

From top to bottom it answers: does production feel it, what does harvesting take and why, what do
the RL jobs get, what does RoseMux itself cost. Variables are named as in vLLM's own dashboards.
Its rendering in Grafana is not tested; its expressions are, against a real Prometheus.
"""

from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana import gpu_rows, harvesting_rows, plan_rows, rows
from deploy.grafana.panels import choice

OUTPUT = Path(__file__).with_name("rosemux.json")

_RUNNING = "vllm:num_requests_running"


def _variables() -> tuple[builder.DatasourceVariable | builder.QueryVariable, ...]:
    return (
        builder.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        choice("job", "Job", f"label_values({_RUNNING}, job)"),
        choice("model_name", "Model", f'label_values({_RUNNING}{{job=~"$job"}}, model_name)'),
        choice(
            "instance",
            "Instance",
            f'label_values({_RUNNING}{{job=~"$job", model_name=~"$model_name"}}, instance)',
        ),
        # A scrape without the shipped relabelling gives no node: All shows it all the same.
        choice("node", "Node", "label_values(harvester_mode, node)", everything=".*"),
        choice("slot", "Slot", 'label_values(harvester_mode{node=~"$node"}, slot)'),
        choice(
            "ttft_slo",
            "TTFT SLO (s)",
            "label_values(vllm:time_to_first_token_seconds_bucket, le)",
            first="0.25",
        ),
        choice(
            "itl_slo",
            "ITL SLO (s)",
            "label_values(vllm:inter_token_latency_seconds_bucket, le)",
            first="0.05",
        ),
    )


def build() -> Dashboard:
    board = (
        builder.Dashboard("RoseMux")
        .uid("rosemux")
        .description("Production beside harvesting: what each feels, takes and gets.")
        .tags(["rosemux", "vllm"])
        .time("now-1h", "now")
        .refresh("30s")
        .readonly()
    )
    for variable in _variables():
        board = board.with_variable(variable)
    for title, panels in (
        ("Production", rows.production()),
        ("Harvesting", harvesting_rows.harvesting()),
        ("GPU guests", gpu_rows.gpu_guests()),
        ("Rollouts", rows.rollouts()),
        ("Phases", rows.phases()),
        ("Plan", plan_rows.plan()),
        ("Own cost", rows.own_cost()),
    ):
        board = board.with_row(builder.Row(title))
        for panel in panels:
            board = board.with_panel(panel)
    return board.build()


def to_json() -> str:
    return f"{JSONEncoder(sort_keys=True, indent=1).encode(build())}\n"


if __name__ == "__main__":
    OUTPUT.write_text(to_json())
