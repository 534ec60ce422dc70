"""The pages of docs/protocol match the code: fields, routes, states, layout and examples."""

import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from coserve.law.gate import Closed
from harvester.agent.http import application
from harvester.contracts import audit, journal
from harvester.contracts.ids import WeightVersion
from harvester.contracts.page import (
    PAGE_BYTES,
    Calibration,
    EngineCore,
    Grant,
    GrantMode,
    Guest,
    GuestMemory,
    Lending,
    PageFault,
    ProductionModel,
    Pulse,
)
from harvester.contracts.page.seal import (
    BODY_OFFSET,
    CRC_OFFSET,
    LAYOUT_VERSION,
    MAGIC,
    MAX_RECORD_BYTES,
    RECORD_OFFSET,
    SEQUENCE_OFFSET,
)
from harvester.contracts.served import Served
from harvester.contracts.wire import engines, error_budget, leases, rollouts, stops
from harvester.proxy.routes import ROUTES
from scheduler.gateway.dialects.session_names import SESSION_HEADERS
from scheduler.gateway.dialects.text_fields import SESSION_FIELDS
from scheduler.gateway.dialects.weight_sync import REFUSED_ROUTES
from scheduler.gateway.job_paths import JOB_BASE
from scheduler.gateway.requests import (
    REFUSED_FIELDS,
    REFUSED_SAMPLING_FIELDS,
    RefusedField,
    decode_generate,
)
from tests.integration.openapi_replies import APPLICATION
from weightsync.layout.manifest import AdapterRecord, FileRecord, IndexSection, decoded_manifest
from weightsync.layout.slices import SliceRecord

PAGES = "docs/protocol"
STRUCTS: tuple[type[msgspec.Struct], ...] = (
    ProductionModel,
    Calibration,
    EngineCore,
    Pulse,
    Grant,
    Guest,
    GuestMemory,
    Lending,
    leases.SlotOffers,
    leases.GuardReading,
    leases.SlotOffer,
    leases.IdleForecast,
    stops.Stop,
    stops.StopRequest,
    stops.StopReply,
    stops.StopsInForce,
    stops.ClusterStopReply,
    error_budget.BudgetReport,
    error_budget.Allotment,
    Served,
    leases.LeaseRequest,
    leases.LeaseRenewal,
    leases.LeaseGranted,
    leases.LeaseRefused,
    leases.LeaseEnded,
    rollouts.GenerateRequest,
    rollouts.SamplingParams,
    rollouts.VersionPin,
    rollouts.PromptScores,
    rollouts.GenerateReply,
    rollouts.Usage,
    rollouts.Choice,
    rollouts.Logprobs,
    rollouts.TokenLogprob,
    rollouts.Span,
    rollouts.VersionRange,
    rollouts.AnnouncedVersion,
    rollouts.VersionSwitched,
    engines.EngineReport,
    engines.EngineDescription,
    IndexSection,
    FileRecord,
    SliceRecord,
    AdapterRecord,
    audit.AuditEvent,
    journal.Opened,
    journal.Decided,
)
TableAfter = Callable[[str, str], list[list[str]]]
TablesAfter = Callable[[str, str], list[list[list[str]]]]
TextOf = Callable[[str], str]


def shown_type(of: Any) -> str:
    if isinstance(of, typing.NewType):
        return shown_type(of.__supertype__)
    origin, arguments = typing.get_origin(of), typing.get_args(of)
    if origin is typing.Annotated:
        return shown_type(arguments[0])
    if origin in (types.UnionType, typing.Union):
        kinds = [shown_type(each) for each in arguments if each is not type(None)]
        return " or ".join([*kinds, "null"] if len(kinds) < len(arguments) else kinds)
    if origin is tuple:
        return f"list of {shown_type(arguments[0])}"
    if origin is dict:
        return f"map of {shown_type(arguments[1])}"
    return "any" if of is Any else {str: "string"}.get(of) or of.__name__


def shown_default(field: Any) -> str:
    if field.required:
        return "–"
    given = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return "{}" if isinstance(given, msgspec.Struct) else msgspec.json.encode(given).decode()


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_the_table_of_a_record_lists_its_fields_types_and_defaults(
    struct: type[msgspec.Struct], table_after: TableAfter
) -> None:
    rows = table_after(PAGES, f"**`{struct.__name__}`**")

    assert [tuple(row[:3]) for row in rows] == [
        (field.encode_name, shown_type(field.type), shown_default(field))
        for field in msgspec.structs.fields(struct)
    ]
    assert all(row[3] for row in rows), "every field has a meaning"


def test_the_index_leads_to_every_page(repository: Path) -> None:
    linked = re.findall(r"\(protocol/([\w-]+\.md)\)", (repository / f"{PAGES}.md").read_text())
    assert sorted(linked) == sorted(page.name for page in (repository / PAGES).iterdir())


def test_every_record_that_crosses_a_process_has_a_table() -> None:
    defined = {
        value
        for module in (leases, rollouts, stops, journal, audit)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }

    assert defined <= set(STRUCTS)


@pytest.mark.parametrize(
    ("struct", "field", "of"),
    [
        (Grant, "mode", GrantMode),
        (leases.SlotOffer, "state", leases.SlotState),
        (leases.LeaseEnded, "reason", leases.EndReason),
        (stops.Stop, "source", stops.StopSource),
        (stops.StopRequest, "order", stops.StopOrder),
        (rollouts.Choice, "finish_reason", rollouts.FinishReason),
        (rollouts.GenerateRequest, "on_interrupt", rollouts.OnInterrupt),
        (rollouts.VersionSwitched, "engines", rollouts.VersionSwitchState),
    ],
)
def test_the_values_of_a_closed_set_are_all_named(
    struct: type[msgspec.Struct], field: str, of: type[StrEnum], text_of: TextOf
) -> None:
    table = text_of(PAGES).partition(f"**`{struct.__name__}`**")[2]
    row = next(line for line in table.splitlines() if line.startswith(f"| `{field}` |"))
    meaning = row.split("|")[4]

    assert set(re.findall(r"`([a-z_]+)`", meaning)) == {each.value for each in of}


@pytest.mark.parametrize(
    ("mark", "fields"),
    [
        ("may be sent with a value that changes nothing", REFUSED_FIELDS),
        ("that are not honoured:\n", REFUSED_SAMPLING_FIELDS),
    ],
)
def test_every_field_of_vllm_that_is_not_honoured_is_listed_with_what_to_do(
    mark: str, fields: Mapping[str, RefusedField], table_after: TableAfter
) -> None:
    assert [tuple(row) for row in table_after(PAGES, mark)] == [
        (name, ", ".join(map(json.dumps, rule.may_be)) or "any value", rule.instead)
        for name, rule in fields.items()
    ]


def test_the_layout_of_a_page_is_that_of_the_code(table_after: TableAfter) -> None:
    rows = table_after(PAGES, "copied by one `pread`, little-endian")
    offsets = [int(row[0]) for row in rows]
    sizes = [int(row[1].removeprefix("up to ")) for row in rows]
    named = {row[2].split(",")[0].split(" ")[0]: int(row[0]) for row in rows}

    assert offsets == [sum(sizes[:index]) for index in range(len(sizes))]
    assert sum(sizes) == PAGE_BYTES
    assert sizes[-1] == MAX_RECORD_BYTES
    assert (named["sequence"], named["stamp"]) == (SEQUENCE_OFFSET, BODY_OFFSET)
    assert (named["CRC-32"], named["the"]) == (CRC_OFFSET, RECORD_OFFSET)
    assert rows[0][2] == f"magic {MAGIC.decode()}"
    assert rows[1][2].endswith(f"now {LAYOUT_VERSION}")
    kinds = {record.KIND: record.__name__.lower() for record in (Pulse, Grant, Guest)}
    assert rows[2][2].endswith(", ".join(f"{kind} {name}" for kind, name in sorted(kinds.items())))


@pytest.mark.parametrize(
    ("mark", "of"), [("| fault | means |", PageFault), ("| gate closed because |", Closed)]
)
def test_every_fault_and_every_reason_is_explained(
    mark: str, of: type[StrEnum], table_after: TableAfter
) -> None:
    assert [row[0] for row in table_after(PAGES, mark)] == [each.value for each in of]


def test_every_kind_of_audit_event_is_explained(table_after: TableAfter) -> None:
    rows = table_after(PAGES, "### Kinds of audit events")
    assert [kind for row in rows for kind in row[0].split(", ")] == [
        *(each.value for each in audit.AuditKind),
    ]


def test_the_routes_of_agent_and_gateway_are_all_there_and_no_others(
    table_after: TableAfter, tables_after: TablesAfter
) -> None:
    apps = {
        "| method | path | takes |": application(cast(Any, None)),
        "| method | path | what |": APPLICATION,
    }

    for mark, app in apps.items():
        served = {
            (route.method, route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
        known = {(row[0], row[1]) for table in tables_after(PAGES, mark) for row in table}
        if app is APPLICATION:
            known |= {
                (row[0], prefix + row[1])
                for row in table_after(PAGES, "| method | control route | what |")
                for prefix in ("", "/v1/jobs/{job}/vllm")
            } | {("POST", path) for path in REFUSED_ROUTES}
            known |= {(method, JOB_BASE + path) for method, path in known}
        assert known == served


def test_the_names_of_a_session_are_all_there_in_their_order(table_after: TableAfter) -> None:
    rows = table_after(PAGES, "| name | sent by |")
    assert [row[0] for row in rows] == [*SESSION_HEADERS, *SESSION_FIELDS]


def test_the_routes_of_the_engine_proxy_are_all_there_and_no_others(
    table_after: TableAfter,
) -> None:
    rows = table_after(PAGES, "| method | path | role | parameters |")
    assert rows == [
        [method, path, route.role, ", ".join(sorted(route.parameters)) or "–"]
        for (method, path), route in ROUTES.items()
    ]


def test_the_examples_are_accepted(text_of: TextOf) -> None:
    found = dict(re.findall(r"```json ([^\n]+)\n(.*?)```", text_of(PAGES), re.S))

    assert decode_generate(found.pop("GenerateRequest").encode()).weight_version.exact == 3
    published = msgspec.json.decode(found.pop("AnnouncedVersion"), type=rollouts.AnnouncedVersion)
    assert published.store == "job-a"
    manifest = decoded_manifest(found.pop("index 4").encode(), expected=WeightVersion(4))
    assert manifest.base_version == 3
    report = msgspec.json.decode(found.pop("EngineReport"), type=engines.EngineReport)
    assert report.description.features == (engines.WEIGHTS_FEATURE,)
    assert not found
