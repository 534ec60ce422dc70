"""Schemas that `rosemux schema` prints, beside the files that are shipped."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from harvester.cli.root import main

REPOSITORY = Path(__file__).parents[4]
SHIPPED = {
    "deploy/systemd/agent.yaml": "agent",
    "examples/agent.yaml": "agent",
    "examples/gateway.yaml": "gateway",
    "examples/jobs.yaml": "jobs",
    "examples/nodes.yaml": "nodes",
}


def _schema(file: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as left:
        main(["schema", file])
    assert left.value.code == 0
    schema: dict[str, Any] = json.loads(capsys.readouterr().out)
    return schema


@pytest.mark.parametrize("path", SHIPPED)
def test_shipped_files_are_of_their_schema_and_misspelt_ones_are_not(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = _schema(SHIPPED[path], capsys)
    jsonschema.Draft202012Validator.check_schema(schema)
    checks = jsonschema.Draft202012Validator(schema)
    fields = yaml.safe_load((REPOSITORY / path).read_text())
    checks.validate(fields)
    first = next(iter(fields))
    assert not checks.is_valid({**fields, f"{first}s": 1})
    assert not checks.is_valid({**fields, first: object()})


def test_schemas_tell_what_a_field_means(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = _schema("gateway", capsys)
    assert "SQLite" in gateway["properties"]["state_file"]["description"]
    assert gateway["properties"]["capacity"]["properties"]["idle_release_s"]["default"] == 30.0
