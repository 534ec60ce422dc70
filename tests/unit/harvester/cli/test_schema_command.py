"""Schemas that `rosemux schema` prints, beside the files that are shipped."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from harvester.cli.root import main
from harvester.cli.schema_command import MODELS
from harvester.contracts.errors import ConfigError
from harvester.discovery.slot_template import DiscoveredEngine, SlotTemplate
from harvester.platform.tenants import Tenants
from tests.certificates import token_file

REPOSITORY = Path(__file__).parents[4]
SHIPPED = {
    "deploy/systemd/agent.yaml": "agent",
    "deploy/systemd/slot.yaml": "template",
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


def _checks(file: str, capsys: pytest.CaptureFixture[str]) -> jsonschema.Draft202012Validator:
    schema = _schema(file, capsys)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_every_file_of_settings_that_the_code_reads_has_a_schema() -> None:
    """`JobsFile` is a file of `jobs` of which only the jobs are read."""
    read = {
        name
        for package in ("harvester", "scheduler", "weightsync", "coserve")
        for file in (REPOSITORY / package).rglob("*.py")
        for name in re.findall(r"\bvalidated\((\w+),", file.read_text())
    }
    known = {model.partition(":")[2] for model in MODELS.values()}
    assert read - {"JobsFile"} <= known


def test_the_slots_of_a_template_are_of_the_slots_schema(
    capsys: pytest.CaptureFixture[str],
) -> None:
    template = yaml.safe_load((REPOSITORY / "deploy/systemd/slot.yaml").read_text())
    engine = DiscoveredEngine(
        slot="slot1", origin="test", port="8000", values={"guest_port": "8003"}
    )
    slot = SlotTemplate(template).slot(engine)
    checks = _checks("slots", capsys)
    checks.validate({"slots": [slot, json.loads(json.dumps(slot)) | {"name": "slot2"}]})
    assert not checks.is_valid({"slots": [slot | {"concurency": 1}]})
    assert not checks.is_valid({"slots": [template]}), "a slot has a name"


def test_a_template_may_have_a_placeholder_in_place_of_each_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks = _checks("template", capsys)
    for good in (
        {"concurrency": "$turns"},
        {"stop": "$stop", "pulses": ["pulse.$name.0"], "owners": {"guest": ["$user"]}},
        {"policy": {"mode": "$mode", "blocking_ratio": "$share", "ttft_slo_s": "$ttft"}},
    ):
        checks.validate(good)
        SlotTemplate(good)
    for bad in (
        {"name": "slot0"},
        {"concurrency": "many"},
        {"policy": {"mode": "open"}},
        {"policy": {"mod": "$mode"}},
        {"policy": "$policy"},
    ):
        assert not checks.is_valid(bad)


ALICE = "a" * 20


@pytest.mark.parametrize(
    ("entries", "good"),
    [
        ({"alice": ALICE}, True),
        ({"alice": [ALICE, "b" * 20], "operator": "o" * 20}, True),
        ({"alice": {"token": [ALICE], "stores": "job-a"}, "observer": "o" * 20}, True),
        ({"alice": {"token": ALICE, "stores": ["job-a", "job-a-*"]}}, True),
        ({"alice": "short"}, False),
        ({"alice": []}, False),
        ({"alice": [ALICE, "short"]}, False),
        ({"alice": 1 << 70}, False),
        ({"alice": None}, False),
        ({"al ice": ALICE}, False),
        ({"alice": {"stores": "job-a"}}, False),
        ({"alice": {"token": ALICE, "store": "job-a"}}, False),
        ({"alice": {"token": ALICE, "stores": []}}, False),
        ({"alice": {"token": ALICE, "stores": [1]}}, False),
    ],
)
def test_a_tenants_file_is_read_if_it_is_of_its_schema(
    entries: dict[str, Any], good: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _checks("tenants", capsys).is_valid(entries) == good
    file = token_file(tmp_path, "tenants", yaml.safe_dump(entries))
    if good:
        assert Tenants.load(file).caller(f"Bearer {ALICE}") == "alice"
    else:
        with pytest.raises(ConfigError) as refused:
            Tenants.load(file)
        assert ALICE not in str(refused.value)


def test_schemas_tell_what_a_field_means(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = _schema("gateway", capsys)
    assert "SQLite" in gateway["properties"]["state_file"]["description"]
    assert gateway["properties"]["capacity"]["properties"]["idle_release_s"]["default"] == 30.0


def test_another_name_than_a_file_s_is_answered_with_the_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["schema", "agents"])
    assert left.value.code == 2
    assert "agent|slots|template" in capsys.readouterr().err
