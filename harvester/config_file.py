"""The agent's configuration: flags over environment over file over defaults.

A file is YAML. A variable is `ROSEMUX_AGENT_` and the field's path in capitals with `__` for a dot,
such as `ROSEMUX_AGENT_HTTP__PORT`. Every mistake is a ConfigError that names the field and, if the
value came from the file, its line. Valid but odd values (a variable over the file, an experiment,
an SLO that dashboards cannot count) are notes, to be logged.
"""

import os
import re
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import Field, ValidationError

from harvester.config import MAX_SLOTS, AgentConfig, SlotConfig
from harvester.contracts.errors import ConfigError
from harvester.contracts.page.owners import uids
from harvester.platform.yaml_file import (
    FrozenSettings,
    Where,
    named,
    parse_fields,
    parse_value,
    read_text,
    validated,
)
from harvester.policy.bounds import Range, beyond, slo_warnings

ENVIRONMENT_PREFIX = "ROSEMUX_AGENT_"
DISCOVERED: Final = "# Written by `rosemux discover`"
"""How a slots file begins that a discovery keeps up to date, and writes again at least so often:"""
DISCOVERED_AGAIN_S: Final = 60.0
_LEASE_TTL_S = Range(1.0, 300.0, "s", "a holder that falls silent keeps the slot for as long")
_SERVICE_LINK = re.compile(
    r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
_LINKED = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    config: AgentConfig
    notes: tuple[str, ...] = ()
    """Warnings about a configuration that is valid."""
    discovered: bool = False
    """Whether it has the slots of a file that a discovery keeps up to date."""


class SlotsFile(FrozenSettings):
    """More slots of an agent, in a file of their own that may change while the agent runs."""

    slots: tuple[SlotConfig, ...] = Field(max_length=MAX_SLOTS)


def load_agent_config(
    path: Path | None,
    *,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    slot: str | None = None,
) -> AgentConfig:
    """The configuration with the slots of its `slots_file`. If `slot` is in the file itself,
    `slots_file` is not read, so its faults do not matter. Raises ConfigError."""
    written = read_agent_config(path, flags=flags, environment=environment)
    if slot in {each.name for each in written.config.slots}:
        return written.config
    return with_slots(written, read_slots_file(written, written.config.slots_file)).config


def read_agent_config(
    path: Path | None,
    *,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """The file alone; `with_slots` adds what its `slots_file` has. `flags` maps dotted field
    paths to values. Raises ConfigError."""
    text = "" if path is None else read_text(path)
    in_file = parse_fields(text, path)
    values = dict(in_file)
    notes = []
    for name, value in sorted((os.environ if environment is None else environment).items()):
        if name.startswith(ENVIRONMENT_PREFIX) and not _is_kubernetes_link(name, value):
            where = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            given, was = _parse_variable(name, value), _in(in_file, where)
            _put(values, where, given, origin=name)
            if was not in (_ABSENT, given):
                notes.append(f"variable {name} gives {given} over {was} in {path}")
    for dotted, value in (flags or {}).items():
        _put(values, dotted.split("."), value, origin=f"flag {dotted}")
    config = validated(AgentConfig, values, text, path)
    notes += _checked(config, values, text, path)
    strangers = {*config.owners.guest} - {*config.owners.agent}
    if strangers and config.http.token_file is None:
        names = ", ".join(map(str, sorted(strangers, key=str)))
        notes.append(
            f"http has no token_file: the guest's user ({names}), as every user of this machine, "
            "may lift the operator's stops and take leases"
        )
    return LoadedConfig(config=config, notes=tuple(notes))


def read_slots_file(
    written: LoadedConfig, path: Path | None, *, may_be_absent: bool = True
) -> LoadedConfig | None:
    """The agent's configuration with the slots of a slots file instead of its own; None without the
    file. Raises ConfigError."""
    if path is None:
        return None
    try:
        path.stat()
    except FileNotFoundError:
        if may_be_absent:
            return None
        raise ConfigError(f"{path} is gone") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    agents = uids(written.config.owners.agent, what="agent")
    text = read_text(path, writers={0, os.geteuid(), *agents})
    values = parse_fields(text, path)
    slots = validated(SlotsFile, values, text, path).slots
    found = _with(written.config, slots, path)
    notes = _checked(found, values, text, path)
    found.check_users()
    discovered = text.startswith(DISCOVERED)
    return LoadedConfig(config=found, notes=tuple(notes), discovered=discovered)


def with_slots(written: LoadedConfig, found: LoadedConfig | None) -> LoadedConfig:
    """The configuration with the slots of its own file and of a slots file; its own slot counts if
    both have one of a name. Raises ConfigError."""
    if found is None:
        return written
    own = {slot.name for slot in written.config.slots}
    pages = {written.config.pages_of(slot) for slot in written.config.slots}
    twice = [
        slot
        for slot in found.config.slots
        if slot.name in own or found.config.pages_of(slot) in pages
    ]
    more = tuple(slot for slot in found.config.slots if slot not in twice)
    notes = [f"slot {slot.name} of the slots file is the agent's own file's" for slot in twice]
    whole = _with(written.config, (*written.config.slots, *more), written.config.slots_file)
    return LoadedConfig(config=whole, notes=(*written.notes, *found.notes, *notes))


def _with(config: AgentConfig, slots: tuple[SlotConfig, ...], path: Path | None) -> AgentConfig:
    fields = dict(config) | {"slots": slots, "slots_file": path}
    try:
        return AgentConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{path}: {error.errors()[0]['msg']}") from error


def _checked(config: AgentConfig, values: Any, text: str, path: Path | None) -> list[str]:
    """Notes about settings that were read from `values`. Raises ConfigError for settings that only
    an experiment may have."""

    def messages(found: Iterator[tuple[Where, str]]) -> list[str]:
        return [named(where, note, text, path) for where, note in found]

    mistakes, unsafe = messages(_booleans(values, config, ())), messages(unsafe_settings(config))
    if unsafe and not config.unsafe_experiments:
        mistakes += [*unsafe, "only experiments go beyond (unsafe_experiments)"]
    if mistakes:
        raise ConfigError("; ".join(mistakes))
    notes = []
    if config.unsafe_experiments:
        unneeded = [] if config.slots_file else ["nothing needs it"]
        notes += [f"unsafe_experiments: {note}" for note in unsafe or unneeded]
    return [*notes, *messages(_slo_notes(config))]


def _is_kubernetes_link(name: str, value: str) -> bool:
    """Whether Kubernetes put it there, for a Service that is named `rosemux-agent` or begins so."""
    return "__" not in name and bool(
        _SERVICE_LINK.search(name) or (name.endswith("_PORT") and _LINKED.match(value))
    )


def unsafe_settings(config: AgentConfig) -> Iterator[tuple[Where, str]]:
    """Path and fault of each setting that only an experiment may have."""
    if fault := _LEASE_TTL_S.fault(config.lease_ttl_s):
        yield ("lease_ttl_s",), fault
    for number, slot in enumerate(config.slots):
        for path, fault in beyond(slot.policy):
            yield ("slots", number, "policy", *path), fault


def _slo_notes(config: AgentConfig) -> Iterator[tuple[Where, str]]:
    for number, slot in enumerate(config.slots):
        policy = slot.policy
        for name, note in slo_warnings(ttft_slo_s=policy.ttft_slo_s, itl_slo_s=policy.itl_slo_s):
            yield ("slots", number, "policy", name), note


def _booleans(given: Any, taken: Any, where: Where) -> Iterator[tuple[Where, str]]:
    """Paths at which `true` or `false` was given and taken for the number 1 or 0."""
    if isinstance(given, dict):
        for name, value in given.items():
            yield from _booleans(value, getattr(taken, name, None), (*where, name))
    elif isinstance(given, list) and isinstance(taken, tuple):
        for number, (value, kept) in enumerate(zip(given, taken, strict=False)):
            yield from _booleans(value, kept, (*where, number))
    elif isinstance(given, bool) and not isinstance(taken, bool) and taken is not None:
        yield where, f"{str(given).lower()} is no number"


_ABSENT = object()


def _in(values: Any, where: list[str]) -> Any:
    """Value at a field's path, or _ABSENT."""
    for step in where:
        if isinstance(values, list) and step.isdigit() and int(step) < len(values):
            values = values[int(step)]
        elif isinstance(values, dict) and step in values:
            values = values[step]
        else:
            return _ABSENT
    return values


def _parse_variable(name: str, value: str) -> Any:
    try:
        return parse_value(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not a YAML value") from error


def _put(values: dict[str, Any], where: list[str], value: Any, *, origin: str) -> None:
    node: Any = values
    for position, step in enumerate(where):
        last = position == len(where) - 1
        key: Any = int(step) if isinstance(node, list) and step.isdigit() else step
        if isinstance(node, list) and not (isinstance(key, int) and key < len(node)):
            raise ConfigError(f"{origin}: {step!r} is not an item of the list")
        if not isinstance(node, dict | list):
            raise ConfigError(f"{origin}: {'.'.join(where[:position])} has no fields")
        if last:
            node[key] = value
        else:
            # A copy: with YAML's aliases one mapping may appear in several places.
            child = node.get(key, {}) if isinstance(node, dict) else node[key]
            node[key] = copy(child)
            node = node[key]
