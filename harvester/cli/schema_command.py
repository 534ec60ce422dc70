"""`rosemux schema`: prints the JSON schema of a configuration file, for editors and checks."""

import importlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

from harvester.distribution import needing

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class ConfigFile(StrEnum):
    AGENT = "agent"
    GATEWAY = "gateway"
    JOBS = "jobs"
    NODES = "nodes"


_MODELS: Mapping[ConfigFile, str] = {
    ConfigFile.AGENT: "harvester.config:AgentConfig",
    ConfigFile.GATEWAY: "scheduler.gateway.settings:GatewaySettings",
    ConfigFile.JOBS: "scheduler.rollmux.plan.jobs_file:PlanSettings",
    ConfigFile.NODES: "scheduler.rollmux.control.nodes_file:ClusterSettings",
}


def schema(
    file: Annotated[ConfigFile, typer.Argument(help="The file that it describes.")],
) -> None:
    module, _, model = _MODELS[file].partition(":")
    with needing("rollmux", subject=f"rosemux schema {file}"):
        fields = getattr(importlib.import_module(module), model).model_json_schema()
    typer.echo(json.dumps({"$schema": _DIALECT, **fields}, indent=1))
