"""Slots from a template and the engines that a source has found. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any

from pydantic import ValidationError

from harvester.config import SlotConfig
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import is_name

Fields = dict[str, Any]
_MAX_VALUE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredEngine:
    """A production engine on this node, as its source describes it."""

    slot: str
    """Name of its slot, not checked yet."""
    origin: str
    """Its unit or pod, for people."""
    host: str = "127.0.0.1"
    port: str = ""
    """Port of its API; "" where the source does not show one."""
    values: Mapping[str, str] = field(default_factory=dict)
    """More placeholders of the template, by the engine's own variables or annotations."""


class SlotTemplate:
    """A slot's fields, in which `$name`, `$host`, `$port` and an engine's own values are filled."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Raises ConfigError for fields that no engine could have."""
        if "name" in fields:
            raise ConfigError("name: is the engine's own; leave it out of the template")
        self._fields = dict(fields)
        example = DiscoveredEngine(slot="example", origin="the template", port="8000")
        try:
            self.slot(example)
        except _UnfilledError:
            return  # It has values of engines, which are not known here.
        except ValueError as error:
            raise ConfigError(f"the template gives no slot: {error}") from error

    def slot(self, engine: DiscoveredEngine) -> Fields:
        """Its slot's fields. Raises ValueError where they are none."""
        if not is_name(engine.slot):
            raise ValueError(f"{engine.slot[:80]!r} is no name of a slot")
        values = {**engine.values, "name": engine.slot, "host": engine.host, "port": engine.port}
        short = {name: value for name, value in values.items() if 0 < len(value) <= _MAX_VALUE}
        fields = {"name": engine.slot, **_filled(self._fields, short)}
        try:
            SlotConfig.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        return fields

    def slots(self, engines: Iterable[DiscoveredEngine]) -> tuple[dict[str, Fields], list[str]]:
        """Fields of each slot by its name, and why an engine has none. The first counts of two
        engines with one slot."""
        slots: dict[str, Fields] = {}
        origins: dict[str, str] = {}
        faults = []
        for engine in engines:
            first = origins.setdefault(engine.slot, engine.origin)
            if engine.slot in slots:
                faults.append(f"{engine.origin}: its slot {engine.slot} is that of {first}")
                continue
            try:
                slots[engine.slot] = self.slot(engine)
            except ValueError as error:
                faults.append(f"{engine.origin}: {error}")
        return slots, faults


class _UnfilledError(ValueError):
    """A placeholder without a value."""


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    match value:
        case str():
            try:
                return Template(value).substitute(values)
            except KeyError as error:
                raise _UnfilledError(
                    f"no value for ${error.args[0]}, or one that is too long"
                ) from error
            except ValueError as error:
                raise ValueError(f"{value!r}: write $$ for a dollar") from error
        case dict():
            return {key: _filled(each, values) for key, each in value.items()}
        case list():
            return [_filled(each, values) for each in value]
        case _:
            return value


class KeptSlots:
    """Slots that were found, and those that have been missing for less than `forget_s`: an engine
    that restarts keeps its slot. While a source gives no answer, nothing is missing."""

    def __init__(self, slots: Mapping[str, Fields], *, forget_s: float) -> None:
        """`slots` are those that were written last."""
        self._slots = dict(slots)
        self._missing_since_s: dict[str, float] = {}
        self._forget_s = forget_s

    def observe(self, found: Mapping[str, Fields], *, now: float) -> list[Fields]:
        """The slots to write, by name; `found` is what a source that answered has."""
        missing = self._slots.keys() - found.keys()
        since = {name: self._missing_since_s.get(name, now) for name in missing}
        self._missing_since_s = {
            name: at_s for name, at_s in since.items() if now - at_s < self._forget_s
        }
        kept = {name: self._slots[name] for name in self._missing_since_s}
        self._slots = {**kept, **found}
        return [self._slots[name] for name in sorted(self._slots)]
