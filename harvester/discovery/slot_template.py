"""Slots from a template and the engines that a source has found. Pure."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any

from pydantic import ValidationError

from harvester.config import MAX_SLOTS, AgentConfig, SlotConfig, values_of_one_slot
from harvester.config_file import unsafe_settings
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import is_name
from harvester.contracts.page import is_gpu_uuid

Fields = dict[str, Any]
_PLACED = {"type": "string", "pattern": r"\$"}
"""Schema of a text with a placeholder."""
_HARMLESS = re.compile(r"[A-Za-z0-9._:/\[\]-]{1,256}")
GPU = "gpu"
"""The engine's own value that names its GPUs, with commas, if it begins with `GPU-`: it may as well
be a number for a placeholder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredEngine:
    """A production engine on this node, as its source describes it."""

    slot: str
    """Name of its slot, not checked yet."""
    origin: str
    """The engine's unit or pod, for people; not empty."""
    instance: str = ""
    """Differs between two pods that had one name after the other."""
    host: str = "127.0.0.1"
    port: str = ""
    """Port of its API; "" where the source does not show one."""
    values: Mapping[str, str] = field(default_factory=dict)
    """More placeholders of the template, by the engine's own variables or annotations. Values that
    could redirect a URL or a path are ignored."""


StatedGpus = Callable[[SlotConfig, DiscoveredEngine], tuple[str, ...]]
"""UUIDs of the GPUs that the engine states on the slot's pages; empty if unknown."""


def no_statement(_slot: SlotConfig, _engine: DiscoveredEngine) -> tuple[str, ...]:
    """Where no pages can be read."""
    return ()


class SlotTemplate:
    """The fields of a slot, with places for `$name`, `$host`, `$port` and the engine's values."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Raises ConfigError for fields that no engine could have."""
        if "name" in fields:
            raise ConfigError("name: each engine gives its own; leave it out of the template")
        self._fields = dict(fields)
        example = DiscoveredEngine(slot="example", origin="the template", port="8000")
        try:
            self.slot(example)
        except _UnfilledError:
            return  # The template has values of engines, which are not known here.
        except ValueError as error:
            raise ConfigError(f"the template gives no slot: {error}") from error

    @staticmethod
    def model_json_schema() -> Fields:
        """The schema of a slot without its name, whose values may have placeholders."""
        schema: Fields = _placed(SlotConfig.model_json_schema())
        del schema["properties"]["name"]
        schema["required"].remove("name")
        return schema

    def slot(self, engine: DiscoveredEngine) -> Fields:
        """The fields of the engine's slot. Raises ValueError if they make no valid slot."""
        if not is_name(engine.slot):
            raise ValueError(f"{engine.slot[:80]!r} is no name of a slot")
        port = engine.port if engine.port.isdecimal() and 0 < int(engine.port) < 65536 else ""
        values = {**engine.values, "name": engine.slot, "host": engine.host, "port": port}
        good = {name: value for name, value in values.items() if _is_harmless(value)}
        fields = {"name": engine.slot, **_filled(self._fields, good)}
        try:
            config = AgentConfig.model_validate({"slots": [fields]})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"][2:]))
            raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error
        for path, fault in unsafe_settings(config):
            raise ValueError(f"{'.'.join(map(str, path[2:]))}: {fault}")
        return fields

    def slots(
        self,
        engines: Iterable[DiscoveredEngine],
        stated: StatedGpus = no_statement,
        *,
        first: Collection[str] = (),
    ) -> tuple[dict[str, Fields], list[str]]:
        """Fields of each slot by name, and a fault for each engine without one. If two engines
        claim one slot, page directory or URL, the first gets it. A second engine on a GPU gets
        a slot without a guest, and a fault. `first`: slots that come before others, since they had
        their GPUs at the last look."""
        slots: dict[str, Fields] = {}
        origins: dict[_Claim, str] = {}
        faults = []
        for engine in sorted(engines, key=lambda engine: engine.slot not in first):
            try:
                if len(slots) == MAX_SLOTS:
                    raise ValueError(f"more than {MAX_SLOTS} slots")
                fields = self.slot(engine)
                names = ("slot", engine.slot), ("pages", pages_of(fields))
                if first := next((origins[name] for name in names if name in origins), ""):
                    raise ValueError(f"slot {engine.slot} belongs to {first}")
                fields = _on_gpus(fields, engine, stated)
                if shared := sorted(_gpu_claims(fields) & origins.keys()):
                    faults.append(
                        f"{engine.origin}: no guest: {' '.join(shared[0])} belongs to "
                        f"{origins[shared[0]]}"
                    )
                    fields = {name: each for name, each in fields.items() if name != "guest"}
                claims = {*names, *_claims(fields)}
                if taken := sorted(claims & origins.keys()):
                    raise ValueError(f"{' '.join(taken[0])} belongs to {origins[taken[0]]}")
            except ValueError as error:
                faults.append(f"{engine.origin}: {error}")
            else:
                slots[engine.slot] = fields
                origins |= dict.fromkeys(sorted(claims), engine.origin)
        return slots, faults


def pages_of(slot: Fields) -> str:
    """Names a slot's page directory."""
    return str(slot.get("pages", slot["name"]))


_Claim = tuple[str, str]
"""A field, and a value that one slot alone may have."""


def _claims(slot: Fields) -> set[_Claim]:
    shared = values_of_one_slot(SlotConfig.model_validate(slot))
    return {("pages", pages_of(slot)), *shared}


def _gpu_claims(slot: Fields) -> set[_Claim]:
    return {claim for claim in _claims(slot) if claim[0] == "guest.gpus"}


def _on_gpus(slot: Fields, engine: DiscoveredEngine, stated: StatedGpus) -> Fields:
    """The slot with its guest on GPUs that template, annotation or variable name, else on those
    that production states. Raises ValueError if production runs on others than are named."""
    if not isinstance(guest := slot.get("guest"), dict):
        return slot
    own = engine.values.get(GPU, "")
    listed = [each for each in own.split(",") if each] if own.startswith("GPU-") else []
    named = guest.get("gpus") or listed
    if strange := next((uuid for uuid in named if not is_gpu_uuid(uuid)), ""):
        raise ValueError(f"{strange[:80]!r} is no GPU's UUID: write GPU-..., with commas")
    used = stated(SlotConfig.model_validate(slot), engine)
    if used and (others := [uuid for uuid in named if uuid not in used]):
        raise ValueError(
            f"{', '.join(others)} is named as its GPU, and production runs on {', '.join(used)}: "
            f"remove {GPU} (annotation or variable) or mend it"
        )
    gpus = [*(named or used)]
    return {**slot, "guest": {**guest, "gpus": gpus}} if gpus else slot


def _is_harmless(value: str) -> bool:
    return _HARMLESS.fullmatch(value) is not None and ".." not in value


class _UnfilledError(ValueError):
    """A placeholder without a value."""


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    match value:
        case str():
            try:
                return Template(value).substitute(values)
            except KeyError as error:
                unfilled = f"no value for ${error.args[0]}, or one that is none"
                raise _UnfilledError(unfilled) from error
            except ValueError as error:
                raise ValueError(f"{value!r}: write $$ for a dollar") from error
        case dict():
            return {key: _filled(each, values) for key, each in value.items()}
        case list():
            return [_filled(each, values) for each in value]
        case _:
            return value


def _placed(schema: Any) -> Any:
    match schema:
        case {"type": "boolean" | "integer" | "number" | "string"} | {"enum": _}:
            return {"anyOf": [schema, _PLACED]}
        case dict():
            return {name: _placed(each) for name, each in schema.items()}
        case list():
            return [_placed(each) for each in schema]
        case _:
            return schema


class KeptSlots:
    """Slots that were found, and slots that have been missing for less than `forget_s`: an engine
    that restarts keeps its slot. While a source gives no answer, nothing is missing."""

    def __init__(self, slots: Mapping[str, Fields], *, forget_s: float) -> None:
        """`slots`: the slots that were written last."""
        self._slots = dict(slots)
        self._missing_since_s: dict[str, float] = {}
        self._forget_s = forget_s

    @property
    def on_gpus(self) -> frozenset[str]:
        """Names of the last slots whose guests have GPUs."""
        return frozenset(name for name, slot in self._slots.items() if _gpu_claims(slot))

    def observe(self, found: Mapping[str, Fields], *, now: float) -> list[Fields]:
        """The slots to write, by name; `found`: slots of a source that answered."""
        missing = self._slots.keys() - found.keys()
        since = {name: self._missing_since_s.get(name, now) for name in missing}
        self._missing_since_s = {
            name: at_s for name, at_s in since.items() if now - at_s < self._forget_s
        }
        taken = {claim for slot in found.values() for claim in _claims(slot)}
        kept = {name: self._slots[name] for name in self._missing_since_s}
        kept = {name: slot for name, slot in kept.items() if taken.isdisjoint(_claims(slot))}
        self._slots = {**dict(list(kept.items())[: MAX_SLOTS - len(found)]), **found}
        return [self._slots[name] for name in sorted(self._slots)]
