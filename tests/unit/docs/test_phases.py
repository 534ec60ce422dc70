"""docs/phases.md draws the transitions and names the settings and attributes that there are."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from deploy.metrics import METRICS, Exporter
from scheduler.rollmux.cluster.job_limits import spec_fault
from scheduler.rollmux.control.nodes_file import ClusterSettings
from scheduler.rollmux.control.permit import Permit
from scheduler.rollmux.control.wire import CALLS
from scheduler.rollmux.permits import leased_tail
from scheduler.rollmux.permits.job_permit import TRANSITIONS
from scheduler.rollmux.permits.leased_tail import TailState
from scheduler.rollmux.permits.terms import PermitsConfig

PAGE = "docs/phases.md"
TableAfter = Callable[[str, str], list[list[str]]]


def test_a_job_s_stages_are_those_of_the_policy(table_after: TableAfter) -> None:
    rows = table_after(PAGE, "| stage | on | next |")
    assert {(row[0], row[1]): row[2] for row in rows} == {
        (stage.value, trigger.value): to.value for (stage, trigger), to in TRANSITIONS.items()
    }


def test_the_states_of_a_leased_tail_are_those_of_the_policy(table_after: TableAfter) -> None:
    rows = table_after(PAGE, "| state | event | next |")
    one = {(row[0], row[1]): row[2] for row in rows if row[0] != "any"}
    of_any = {
        (state.value, row[1]): row[2] for row in rows for state in TailState if row[0] == "any"
    }
    assert one | of_any == {
        (state.value, event.value): to.value
        for (state, event), to in leased_tail.TRANSITIONS.items()
    }


def test_the_settings_and_their_defaults_are_the_policy_s(table_after: TableAfter) -> None:
    rows = table_after(PAGE, "## Settings")
    assert {row[0]: float(row[1]) for row in rows} == msgspec.to_builtins(PermitsConfig())


def test_settings_of_a_nodes_file_are_the_documented_ones(
    table_after: TableAfter,
) -> None:
    rows = table_after(PAGE, "| `nodes.yaml` | default |")
    assert {row[0]: yaml.safe_load(row[1]) for row in rows} == {
        name: field.default
        for name, field in ClusterSettings.model_fields.items()
        if not field.is_required()
    }


def test_the_calls_and_what_they_say_are_those_of_the_wire(table_after: TableAfter) -> None:
    rows = table_after("docs/protocol/phases-api.md", "| call | says | answers |")
    assert {row[0]: tuple(row[1].split(", ")) for row in rows} == {
        name: kind.__struct_fields__ for name, kind in CALLS.items()
    }


def test_the_metrics_are_those_of_the_exporter_with_their_labels(table_after: TableAfter) -> None:
    rows = table_after(PAGE, "| `scheduler_phase_…` | labels |")
    documented = {
        f"scheduler_phase_{name}": set(filter(None, row[1].split(", ")))
        for row in rows
        for name in row[0].split(", ")
    }
    assert documented == {
        metric.name: set(metric.labels)
        for metric in METRICS
        if metric.exported_by is Exporter.PHASES
    }


def test_the_documented_attributes_of_a_permit_exist(table_after: TableAfter) -> None:
    named = [word for row in table_after(PAGE, "| a permit says |") for word in row[0].split(", ")]
    assert all(hasattr(Permit, word.removesuffix("()")) for word in named)
    assert named


def test_the_examples_parse_and_declare_a_job_that_there_can_be(repository: Path) -> None:
    planned, pinned, *_ = re.findall(
        r"```python\n(.*?)```", (repository / PAGE).read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    for code in (planned, pinned):
        compile(code, PAGE, "exec")
        exec(code.partition("phases = PhaseClient")[0], names)
    assert spec_fault(names["job"]) == ""
    assert {phase.kind for phase in names["terms"].phases} == {"rollout", "training"}
