"""Decides which configuration changes a running agent takes over.

It compares every field. Fields listed here take effect in a running slot. A slot of which another
field changed is opened again, which ends its lease. Any other field of the node, a new one too,
needs a restart: until then the agent runs on the old value and reports it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from harvester.config import AgentConfig, SlotConfig
from harvester.policy.settings import flat_fields

NODE_FIELDS = ("mode", "stop", "tenants", "unsafe_experiments")
SLOT_FIELDS = ("engine_url", "offered_url", "model", "concurrency", "kv_tokens", "stop", "policy")
_MAX_VALUE = 100
GUEST_FIELD = "guest"
"""`rosemux guest` reads it, when it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    config: AgentConfig
    """Configuration in force: new values where they can be, old ones elsewhere."""
    in_force: tuple[str, ...]
    reopened: frozenset[str]
    """Slots that are closed and opened again."""
    restart_needed: tuple[str, ...]
    guest_start_needed: tuple[str, ...]
    changes: tuple[str, ...]
    """Texts of the changes, with both values; a guest's only by name, since its arguments may hold
    secrets."""

    def without(self, slots: Iterable[str]) -> "Reload":
        """The same without these new slots, which could not be opened."""
        left_out = {_added(slot) for slot in slots}
        return replace(
            self,
            in_force=tuple(name for name in self.in_force if name not in left_out),
            changes=tuple(change for change in self.changes if change not in left_out),
        )


def reload(old: AgentConfig, new: AgentConfig) -> Reload:
    """Merge the fields that may change into `old`, the configuration in force; `new` is the file's.
    Slots are matched by name."""
    named = {slot.name: slot for slot in old.slots}
    judged = old.interlocks.accelerators.source != "none"
    reopened = frozenset(
        slot.name
        for slot in new.slots
        if slot.name in named and _fixed(named[slot.name]) != _fixed(slot)
    )
    slots = tuple(
        slot if slot.name in reopened else _taken_over(named.get(slot.name, slot), slot, judged)
        for slot in new.slots
    )
    taken = {name: getattr(new, name) for name in NODE_FIELDS}
    config = old.model_copy(update={**taken, "slots": slots})
    before, after, now = (dict(_values(each)) for each in (old, new, config))
    waiting = _differences(now, after)
    both = named.keys() & {slot.name for slot in new.slots}
    moved = tuple(f"slots.{name}." for name in named.keys() ^ {slot.name for slot in new.slots})
    changed = [name for name in _differences(before, now) if not name.startswith(moved)]
    changed = [name for name in changed if name not in waiting]
    came = tuple(_added(slot.name) for slot in new.slots if slot.name not in both)
    gone = tuple(f"slots.{slot.name}: removed" for slot in old.slots if slot.name not in both)
    gone += tuple(f"slots.{name}: opened again" for name in sorted(reopened))
    return Reload(
        config=config,
        reopened=reopened,
        in_force=(*came, *gone, *(name for name in changed if not _is_guests(name))),
        restart_needed=tuple(waiting),
        guest_start_needed=tuple(name for name in changed if _is_guests(name)),
        changes=(
            *came,
            *gone,
            *(
                name
                if _is_guests(name)
                else f"{name}: {_shown(before, name)} -> {_shown(after, name)}"
                for name in changed
            ),
            *(f"{name}: needs a restart" for name in waiting),
        ),
    )


def _added(slot: str) -> str:
    return f"slots.{slot}: added"


def _fixed(slot: SlotConfig) -> dict[str, Any]:
    """Fields that an open slot cannot change."""
    return slot.model_dump(exclude={*SLOT_FIELDS, GUEST_FIELD})


def _taken_over(old: SlotConfig, new: SlotConfig, judged: bool) -> SlotConfig:
    """`judged`: an interlock looks at the GPUs that the slot was first given. Without any it looks
    at all, until discovery has found the slot's."""
    taken = {name: getattr(new, name) for name in (*SLOT_FIELDS, GUEST_FIELD)}
    gpus = old.guest.gpus if old.guest else ()
    if judged and gpus and gpus != (new.guest.gpus if new.guest else ()):
        taken[GUEST_FIELD] = new.guest.model_copy(update={"gpus": gpus}) if new.guest else old.guest
    return old.model_copy(update=taken)


def _shown(values: dict[str, Any], name: str) -> str:
    return str(values.get(name, "absent"))[:_MAX_VALUE]


def _is_guests(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "slots" and len(parts) > 2 and parts[2] == GUEST_FIELD


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    absent = object()
    names = one.keys() | other.keys()
    return sorted(name for name in names if one.get(name, absent) != other.get(name, absent))


def _values(config: AgentConfig) -> Iterator[tuple[str, Any]]:
    """Every field by its dotted path; a slot's by its name."""
    fields = config.model_dump()
    slots = fields.pop("slots")
    yield from flat_fields(fields)
    for slot in slots:
        yield from flat_fields(slot, f"slots.{slot['name']}.")
