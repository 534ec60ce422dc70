"""A reload reports truthfully, for every field, whether it is in force."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from harvester.agent import agent_process
from harvester.agent.node import NodeAgent
from harvester.agent.reload import SLOT_FIELDS, reload
from harvester.config import (
    AgentConfig,
    HttpConfig,
    KvcachedConfig,
    MpsConfig,
    OwnersConfig,
    SlotConfig,
)
from harvester.config_file import LoadedConfig
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from harvester.contracts.journal import Opened, read_journal
from harvester.contracts.page.records import Law
from harvester.contracts.wire.stops import StopOrder
from harvester.guest_config import GuestConfig
from harvester.interlock_config import (
    AcceleratorsConfig,
    AlertConfig,
    AlertsConfig,
    InterlocksConfig,
)
from harvester.platform.tls import Credentials, ServerTls
from harvester.policy.sample import KillSwitch
from harvester.policy.settings import Mode
from harvester.policy.slot import SlotPolicy

# Changed values are not validated, so some are of another type.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer")
Where = tuple[str, ...]
FILES: dict[str, Any] = {
    "server_name": "agents.example",
    **{name: Path("/f") for name in ("token_file", "ca_file", "cert_file", "key_file")},
}
FULL = AgentConfig(
    kill_switch_file=Path("/k"),
    stop_file=Path("/s"),
    slots_file=Path("/more"),
    guests=Credentials(**FILES),
    interlocks=InterlocksConfig(
        alerts=AlertsConfig(url="http://127.0.0.1:9090", alerts=(AlertConfig(name="A"),), **FILES),
        accelerators=AcceleratorsConfig(
            source="dcgm-exporter",
            url="http://127.0.0.1:9400",
            power_watts_max=1.0,
            temperature_celsius_max=1.0,
            xids_ignored=(31,),
            **FILES,
        ),
    ),
    http=HttpConfig(
        token_file=Path("/t"),
        operator_token_file=Path("/o"),
        observer_token_file=Path("/b"),
        tls=ServerTls(cert_file=Path("/c"), key_file=Path("/k"), client_ca_file=Path("/a")),
    ),
    owners=OwnersConfig(agent=(1,)),
    page_group=5,
    slots=(
        SlotConfig(
            name="slot0",
            pages=Path("/p"),
            owners=OwnersConfig(guest=(2,)),
            pulses=("pulse.a.0",),
            memory_group=Path("/g"),
            metrics_url="http://h:1/metrics",
            mps=MpsConfig(pipe_directory=Path("/m")),
            guest=GuestConfig(
                model=Path("/a"), weights=Path("/b"), context_tokens=1, kv_cache_bytes=1
            ),
        ),
    ),
)
"""Every optional part is present; `kvcached` excludes `memory_group`."""
SHARED = KvcachedConfig(production=("prod",), guest="guest", total_bytes=1)


def leaves(part: Any, where: Where = ()) -> Iterator[tuple[Where, Any]]:
    """Every leaf field of a configuration, with its value."""
    names = (
        type(part).model_fields
        if isinstance(part, BaseModel)
        else [each.name for each in fields(part)]
    )
    for name in names:
        value = getattr(part, name)
        if name == "slots":
            yield from leaves(value[0], ("slots", value[0].name))
        elif isinstance(value, BaseModel) or is_dataclass(value):
            yield from leaves(value, (*where, name))
        else:
            yield (*where, name), value


def another(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case Mode():
            return Mode.OFF if value is not Mode.OFF else Mode.OBSERVE
        case StopOrder():
            return StopOrder.DRAIN if value is not StopOrder.DRAIN else StopOrder.HOLD
        case Law():
            return Law.ROSE
        case StrEnum():
            raise AssertionError(f"say what another {type(value).__name__} is")
        case int() | float():
            return value * 0.99 if isinstance(value, float) and value else value + 1
        case "auto":
            return 0.5
        case str():
            return value + "x"
        case Path():
            return value / "x"
        case (int(), *_):
            return (*value, 8)
        case tuple():
            return (*value, "pulse.b.0")
        case None:
            return "none"
    raise AssertionError(f"say what another {type(value).__name__} is")


def changed(part: Any, where: Where) -> Any:
    """`part` with another value in one field, not validated."""
    name, rest = where[0], where[1:]
    if name == "slots":
        return part.model_copy(update={"slots": (changed(part.slots[0], rest[1:]),)})
    old = getattr(part, name)
    new = changed(old, rest) if rest else another(old)
    if isinstance(part, BaseModel):
        return part.model_copy(update={name: new})
    # Not through `replace`: the settings refuse values that contradict another field.
    copy = object.__new__(type(part))
    for each in fields(part):
        value = new if each.name == name else getattr(part, each.name)
        object.__setattr__(copy, each.name, value)
    return copy


EVERY = [where for where, _ in leaves(FULL)]
REOPENING = [
    where
    for where in EVERY
    if where[:1] == ("slots",) and where[2] not in (*SLOT_FIELDS, "guest", "name")
]
"""Fields that an open slot cannot change: it is closed and opened again."""


def test_there_is_no_part_whose_fields_are_not_looked_at() -> None:
    seen = {type(part) for part in (FULL, FULL.slots[0], FULL.http)}
    missing = [where for where, value in leaves(FULL) if value is None]
    assert seen == {AgentConfig, SlotConfig, HttpConfig}
    assert missing == [("slots", "slot0", "kvcached"), ("slots", "slot0", "guest", "isolation")]


@pytest.mark.parametrize("where", EVERY, ids=".".join)
def test_every_field_that_changes_is_in_force_or_needs_a_start(where: Where) -> None:
    done = reload(FULL, changed(FULL, where))
    said = (*done.in_force, *done.restart_needed, *done.guest_start_needed)
    if where == ("slots", "slot0", "name"):
        assert said == ("slots.slot0x: added", "slots.slot0: removed")
        return
    anew = ("slots.slot0: opened again",) if where in REOPENING else ()
    assert said == (*anew, ".".join(where))
    kept = dict(leaves(done.config))[where]
    taken_over = not done.restart_needed
    assert (kept != dict(leaves(FULL))[where]) == taken_over


def test_a_pending_restart_is_reported_until_the_file_has_the_old_value_again() -> None:
    new = changed(changed(FULL, ("http", "port")), ("slots", "slot0", "model"))
    once = reload(FULL, new)
    assert (once.in_force, once.restart_needed) == (("slots.slot0.model",), ("http.port",))
    again = reload(once.config, new)
    assert (again.in_force, again.restart_needed) == ((), ("http.port",))
    back = reload(again.config, FULL)
    assert (back.in_force, back.restart_needed) == (("slots.slot0.model",), ())


@pytest.mark.parametrize(
    ("source", "old_gpus", "new_gpus", "needs"),
    [
        ("nvml", ("GPU-a",), ("GPU-b",), "restart"),
        ("nvml", (), ("GPU-b",), "start"),
        ("nvml", ("GPU-a",), None, "restart"),
        ("nvml", None, ("GPU-b",), "start"),
        ("none", ("GPU-a",), ("GPU-b",), "start"),
        ("nvml", ("GPU-a",), ("GPU-a",), ""),
    ],
)
def test_gpus_that_an_interlock_judges_are_the_first_that_were_named(
    source: str,
    old_gpus: tuple[str, ...] | None,
    new_gpus: tuple[str, ...] | None,
    needs: str,
) -> None:
    def config(gpus: tuple[str, ...] | None) -> AgentConfig:
        guest = {"model": "/m", "weights": "/w", "context_tokens": 1, "kv_cache_bytes": 1}
        slot = {"name": "slot0", "guest": None if gpus is None else {**guest, "gpus": gpus}}
        return AgentConfig.model_validate(
            {"slots": [slot], "interlocks": {"accelerators": {"source": source}}}
        )

    done = reload(config(old_gpus), config(new_gpus))
    name = "slots.slot0.guest.gpus"
    assert (name in done.restart_needed) == (needs == "restart")
    assert (name in done.guest_start_needed) == (needs == "start")
    assert done.in_force == ()
    again = reload(done.config, config(old_gpus))
    assert (name in again.restart_needed) == (source == "nvml" and needs == "start")


@pytest.mark.parametrize("names", [["slot0"], ["slot0", "slot1", "slot2"], ["slot1", "slot0"]])
def test_slots_are_known_by_their_names(names: list[str]) -> None:
    old = AgentConfig(slots=(SlotConfig(name="slot0"), SlotConfig(name="slot1")))
    new = AgentConfig(slots=tuple(SlotConfig(name=name, model=f"m-{name}") for name in names))
    done = reload(old, new)
    assert [(slot.name, slot.model) for slot in done.config.slots] == [
        (name, f"m-{name}") for name in names
    ]
    others = {"slot0": "removed", "slot1": "removed", "slot2": "added"}
    expected = {f"slots.{name}: {others[name]}" for name in {"slot0", "slot1"} ^ {*names}}
    assert {name for name in done.in_force if ": " in name} == expected
    assert done.restart_needed == ()


def order_of_slot(node: NodeAgent) -> StopOrder:
    node.beat()
    stop = node.slots[0].offer().stop
    return StopOrder.NONE if stop is None else stop.order


SIMPLE = AgentConfig(tenants=("t",), slots=(SlotConfig(name="slot0"),))
IN_FORCE: dict[Where, Callable[[NodeAgent], Any]] = {
    ("mode",): lambda node: node.slots[0].policy.settings.mode,
    ("slots", "slot0", "policy", "mode"): lambda node: node.slots[0].policy.settings.mode,
    ("slots", "slot0", "engine_url"): lambda node: node.slots[0].offer().engine_url,
    ("slots", "slot0", "offered_url"): lambda node: node.slots[0].offer().engine_url,
    ("slots", "slot0", "model"): lambda node: node.slots[0].offer().model,
    ("slots", "slot0", "concurrency"): lambda node: node.slots[0].offer().concurrency,
    ("slots", "slot0", "kv_tokens"): lambda node: node.slots[0].offer().kv_tokens,
    ("stop",): order_of_slot,
    ("slots", "slot0", "stop"): order_of_slot,
    ("unsafe_experiments",): lambda node: bool(sample(node, "harvester_unsafe_experiments")),
    ("tenants",): lambda node: tuple(
        tenant
        for tenant in ("t", "pulse.b.0")
        if sample(node, "harvester_leases_active", slot="slot0", tenant=tenant) is not None
    ),
}
"""Each field's value as the running parts show it; policy fields come from the policy's
settings.
"""


def sample(node: NodeAgent, name: str, **labels: str) -> float | None:
    node.refresh_metrics()
    return node.metrics.registry.get_sample_value(name, labels)


def of_policy(where: Where) -> Callable[[NodeAgent], Any]:
    def say(node: NodeAgent) -> Any:
        value: Any = node.slots[0].policy.settings
        for name in where[3:]:
            value = getattr(value, name)
        return value

    return say


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeAgent]:
    config = SIMPLE.model_copy(
        update={"page_root": tmp_path / "pages", "state_dir": tmp_path / "state"}
    )
    node = NodeAgent(config, clock=MonotonicClock(), version="1")
    node.beat()
    yield node
    node.close()


PROVEN = [where for where in EVERY if where in IN_FORCE or where[2:3] == ("policy",)]


def test_no_field_is_reported_in_force_without_a_proof() -> None:
    # A slot that is opened anew, or another one: test_slots_that_come_and_go.py has those.
    fields = [where for where in EVERY if where[2:] != ("name",) and where not in REOPENING]
    assert [where for where in fields if reload(FULL, changed(FULL, where)).in_force] == PROVEN


@pytest.mark.parametrize("where", PROVEN, ids=".".join)
def test_a_field_that_a_reload_reports_in_force_is(node: NodeAgent, where: Where) -> None:
    # The more careful of two modes holds, so each is seen beside `harvest` only.
    base = node.slots.config.model_copy(update={"mode": Mode.HARVEST})
    node.reconfigure(base)
    new = changed(base, where)
    done = node.reconfigure(new)
    assert done.in_force == (".".join(where),)
    node.beat()
    say = IN_FORCE.get(where) or of_policy(where)
    assert say(node) == dict(leaves(new))[where]


def test_the_policy_of_a_reload_decides_with_what_it_was_given(node: NodeAgent) -> None:
    slot = node.slots.config.slots[0]
    settings = changed(slot.policy, ("grant_ttl_s",))
    new = node.slots.config.model_copy(
        update={"slots": (slot.model_copy(update={"policy": settings}),)}
    )
    node.reconfigure(new)
    effects = node.slots[0].policy.observe(
        node.slots[0].sensor.sample(
            lease=node.leases.view(node.slots[0].name), kill_switch=KillSwitch.NONE
        ),
        now=node.clock.now(),
    )
    assert effects[0].ttl_s == settings.grant_ttl_s  # type: ignore[union-attr]


def test_a_field_not_in_force_stands_in_metrics_journal_and_offers(
    node: NodeAgent, tmp_path: Path
) -> None:
    new = changed(changed(node.slots.config, ("http", "port")), ("lease_ttl_s",))
    node.reconfigure(new)
    assert node.restart_needed == ("http.port", "lease_ttl_s")
    assert sample(node, "harvester_config_restart_needed") == 2
    assert sample(node, "harvester_config_last_reload_successful") == 0
    opened = [
        line
        for line in read_journal(tmp_path / "state" / "slot0.journal")
        if isinstance(line, Opened)
    ]
    assert opened[-1].restart_needed == ("http.port", "lease_ttl_s")
    node.reconfigure(node.slots.config)
    assert sample(node, "harvester_config_restart_needed") == 0
    assert sample(node, "harvester_config_last_reload_successful") == 1


@pytest.mark.parametrize("error", [ConfigError("no YAML"), RuntimeError("a mistake of ours")])
def test_a_reload_that_fails_is_counted_and_ends(
    node: NodeAgent, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load() -> LoadedConfig:
        raise error

    said: list[str] = []
    monkeypatch.setattr(agent_process, "notify", lambda text: said.append(text.split("=")[0]))
    process = agent_process.AgentProcess(LoadedConfig(config=FULL), reload=load, version="1")
    # Asyncio logs what a signal's handler raises.
    with contextlib.suppress(RuntimeError):
        process._reconfigure(node)
    assert said == ["RELOADING", "READY"]
    assert sample(node, "harvester_config_last_reload_successful") == 0


def test_a_slot_that_cannot_be_reconfigured_keeps_every_slot_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = tuple(SlotConfig(name=name, model="old") for name in ("slot0", "slot1"))
    update = {"page_root": tmp_path / "pages", "state_dir": tmp_path / "state", "slots": slots}
    old = SIMPLE.model_copy(update=update)
    new = old.model_copy(
        update={
            "mode": Mode.OFF,
            "tenants": ("u",),
            "slots": tuple(slot.model_copy(update={"model": "new"}) for slot in slots),
        }
    )
    node = NodeAgent(old, clock=MonotonicClock(), version="1")
    node.beat()
    restore, times = SlotPolicy.restore, iter(range(2))

    def fails_at_the_second(policy: SlotPolicy, snapshot: Any) -> None:
        if next(times):
            raise ConfigError("slot1 cannot")
        restore(policy, snapshot)

    monkeypatch.setattr(SlotPolicy, "restore", fails_at_the_second)
    monkeypatch.setattr(agent_process, "notify", lambda _: None)
    monkeypatch.setattr(AgentConfig, "check_here", lambda _: None)
    loaded = LoadedConfig(config=new)
    process = agent_process.AgentProcess(loaded, reload=lambda: loaded, version="1")
    process._reconfigure(node)
    assert sample(node, "harvester_config_last_reload_successful") == 0
    assert [slot.offer().model for slot in node.slots] == ["old", "old"]
    assert [slot.policy.settings.mode for slot in node.slots] == [old.mode] * 2
    monkeypatch.setattr(SlotPolicy, "restore", restore)
    process._reconfigure(node)
    assert sample(node, "harvester_config_last_reload_successful") == 1
    assert [slot.offer().model for slot in node.slots] == ["new", "new"]
    node.close()


def test_the_sections_that_exclude_each_other_are_compared_too() -> None:
    slot = FULL.slots[0].model_copy(update={"memory_group": None, "kvcached": SHARED})
    old = FULL.model_copy(update={"slots": (slot,)})
    for where in (("production",), ("guest",), ("total_bytes",)):
        full = ("slots", "slot0", "kvcached", *where)
        assert reload(old, changed(old, full)).in_force[1:] == (".".join(full),)
