"""Bounded explorations for every change, and that each invariant can fail.

`make explore` goes on to a million states of each protocol.
"""

from collections.abc import Callable
from typing import Any

import pytest

from harvester.policy.lease_table import LeaseTable
from harvester.policy.slot import SlotPolicy
from harvester.policy.states import Condition
from scheduler.gateway.policy import engine_selection
from scheduler.gateway.policy.versions import EngineState, VersionPolicy
from scheduler.model import Lease
from scheduler.rollmux.control.permit import Permit
from scheduler.rollmux.permits import permits
from scheduler.rollmux.permits.permit_table import PermitTable
from tests.explore import lease
from tests.explore.lease import LeaseModel
from tests.explore.permit import PermitModel
from tests.explore.search import Explored, explore
from tests.explore.version import VersionModel

STATES, MUTATED_STATES = 8_000, 12_000
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("model", [LeaseModel, PermitModel, VersionModel])
def test_every_invariant_holds_in_each_state_that_is_reached(model: Any) -> None:
    found = explore(model(), states=STATES)
    assert not found.fault, str(found)
    assert found.states >= STATES


def _set(owner: object, name: str, value: object) -> Patch:
    return lambda patch: patch.setattr(owner, name, value)


def _around(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """`change` is called with the method itself before its arguments."""
    own = getattr(owner, name)
    return _set(owner, name, lambda *given, **named: change(own, *given, **named))


def _takes_twice(own: Any, self: LeaseTable, request: Any, **named: Any) -> Any:
    self._slots[request.slot].lease = None
    return own(self, request, **named)


def _frees_in_silence(own: Any, self: LeaseTable, entry: Any, *given: Any) -> Any:
    epoch = entry.epoch
    ended = own(self, entry, *given)
    entry.epoch = epoch
    return ended


def _opens_always(own: Any, self: SlotPolicy, *given: Any) -> Any:
    return Condition.CLEAR, ""


def _found_by_name(own: Any, self: LeaseTable, wanted: Any) -> Any:
    held = ((entry, entry.lease) for entry in self._slots.values() if entry.lease is not None)
    return next(((e, one) for e, one in held if wanted in (one.lease, one.name)), None)


LEASE: list[tuple[str, Patch]] = [
    ("was granted while", _around(LeaseTable, "take", _takes_twice)),
    ("beyond its TTL", _set(LeaseTable, "expire", lambda self, *, now: None)),
    ("uses a lease that is not in force", _set(Lease, "usable", lambda self, **_: True)),
    ("the grant is open under", _around(SlotPolicy, "_harvestable", _opens_always)),
    ("whose lease has ended", _around(LeaseTable, "_free", _frees_in_silence)),
    ("is given again", _set(LeaseTable, "_raise_epoch", lambda self, entry: None)),
    ("was released by 'stranger'", _around(LeaseTable, "_find", _found_by_name)),
    (
        "was drained by no order",
        _set(lease, "binding", lambda stops, **_: stops[0] if stops else None),
    ),
    ("no progress", _set(LeaseTable, "offer", lambda self, *_: None)),
]


def _held_beyond(own: Any, self: PermitTable, job: Any, epoch: Any) -> Any:
    return self.jobs.get(job)


PERMIT: list[tuple[str, Patch]] = [
    ("is used by", _set(Permit, "lost", property(lambda self: self._lost))),
    ("which came first", _set(PermitTable, "is_first", lambda self, *_: True)),
    ("is given again", _set(PermitTable, "next_epoch", lambda self: 1)),
    ("has orders after its end", _around(PermitTable, "holder", _held_beyond)),
    ("no progress", _set(permits, "start_jobs", lambda *_, **__: [])),
]


def _serves_at_once(own: Any, self: VersionPolicy, event: Any) -> Any:
    effects = own(self, event)
    self._engines[event.engine].state = EngineState.SERVING
    return effects


def _serves_any(own: Any, load: Any, turn: Any) -> bool:
    return load.offered


def _published_down(own: Any, self: VersionPolicy, event: Any) -> Any:
    self._published.pop(event.job, None)
    return own(self, event)


VERSION: list[tuple[str, Patch]] = [
    ("is labelled", _set(VersionPolicy, "serves", lambda self, *_: True)),
    ("a turn pinned to", _around(engine_selection, "_may_serve", _serves_any)),
    ("it is not known who it is", _around(VersionPolicy, "_join", _serves_at_once)),
    ("refused is False", _around(VersionPolicy, "_publish", _published_down)),
    ("no progress", _set(VersionPolicy, "_retry", lambda self, now: [])),
]


def _finds(model: Any, words: str) -> None:
    found: Explored = explore(model, states=MUTATED_STATES)
    assert words in found.fault, str(found)


@pytest.mark.parametrize(("words", "mutated"), LEASE)
def test_a_broken_lease_policy_is_found(
    words: str, mutated: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutated(monkeypatch)
    _finds(LeaseModel(faults=0, commands=1), words)


@pytest.mark.parametrize(("words", "mutated"), PERMIT)
def test_a_broken_permit_policy_is_found(
    words: str, mutated: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutated(monkeypatch)
    _finds(PermitModel(faults=0), words)


@pytest.mark.parametrize(("words", "mutated"), VERSION)
def test_a_broken_version_policy_is_found(
    words: str, mutated: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutated(monkeypatch)
    _finds(VersionModel(), words)
