"""`rosemux schema`: prints the JSON schema of a configuration file, for editors and checks."""

import importlib
import json
from collections.abc import Mapping
from typing import Annotated

import typer

from harvester.contracts.errors import ConfigError
from harvester.distribution import needing

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
MODELS: Mapping[str, str] = {
    "agent": "harvester.config:AgentConfig",
    "slots": "harvester.config_file:SlotsFile",
    "template": "harvester.discovery.slot_template:SlotTemplate",
    "gateway": "scheduler.gateway.settings:GatewaySettings",
    "tenants": "harvester.platform.tenants:TenantTokens",
    "jobs": "scheduler.rollmux.plan.jobs_file:PlanSettings",
    "nodes": "scheduler.rollmux.control.nodes_file:ClusterSettings",
}
"""Classes of configuration files, imported when they are asked for."""
_NAMES = "|".join(MODELS)


def schema(
    file: Annotated[str, typer.Argument(help="The file that it describes.", metavar=_NAMES)],
) -> None:
    if file not in MODELS:
        raise ConfigError(f"no schema of {file}: choose one of {_NAMES}")
    module, _, model = MODELS[file].partition(":")
    with needing("rollmux", subject=f"rosemux schema {file}"):
        fields = getattr(importlib.import_module(module), model).model_json_schema()
    typer.echo(json.dumps({"$schema": _DIALECT, **fields}, indent=1))
