"""The open slots of a node, as slots of its configuration come and go.

A slot that cannot be opened or closed harms no other, and is tried again. Many may come and go at
once: the others beat in between.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping

from harvester.agent.audit.audit_log import AGENT, AuditLog
from harvester.agent.exposition import SlotExposition
from harvester.agent.metrics import AgentMetrics
from harvester.agent.slot_loop import Slot
from harvester.config import AgentConfig, SlotConfig
from harvester.contracts.audit import AuditKind
from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import SlotId
from harvester.contracts.page.directory import LAUNCH_DIRECTORY, make_directory
from harvester.policy.lease_table import LeaseTable

_log = logging.getLogger(__name__)

_OPENING_S = 1.0
"""Time for slots that come and go at once: a tenth of the unit's watchdog."""
_WAITS = "waits for its turn"


class OpenSlots:
    def __init__(
        self,
        config: AgentConfig,
        *,
        leases: LeaseTable,
        metrics: AgentMetrics,
        audit: AuditLog,
        clock: Clock,
        on_closed: Callable[[], object],
        beat_if_due: Callable[[], None],
    ) -> None:
        """`on_closed` is called with the slot still among the open ones, `beat_if_due` between two
        slots, whose grants must not expire meanwhile."""
        self._target = config
        self._leases, self._metrics, self._audit, self._clock = leases, metrics, audit, clock
        self._on_closed, self._beat_if_due = on_closed, beat_if_due
        self._slots = tuple[Slot, ...]()
        self._reopening: frozenset[str] = frozenset()
        self.unopened: dict[str, str] = {}
        """Why a slot of the configuration is not open yet, or one that is gone not closed."""

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def named(self, name: SlotId) -> Slot:
        return next(slot for slot in self._slots if slot.name == name)

    @property
    def config(self) -> AgentConfig:
        """The configuration that is followed, with the slots that are open."""
        return self._target.model_copy(update={"slots": tuple(slot.config for slot in self)})

    @property
    def waiting(self) -> bool:
        """Whether a slot waits for `open_more` without a fault."""
        return _WAITS in self.unopened.values()

    @property
    def failed(self) -> tuple[str, ...]:
        """Slots that cannot be opened or closed."""
        return tuple(name for name, why in self.unopened.items() if why != _WAITS)

    def open_all(self) -> None:
        """Opens the slots at the start. Raises the first slot's fault if none can be opened."""
        faults = [self._open(each, {}) for each in self._target.slots]
        if not self._slots and faults and faults[0]:
            raise faults[0]

    def follow(self, config: AgentConfig, *, reopened: frozenset[str]) -> None:
        """Close slots that the configuration has no more, open those that it has more, and both for
        the `reopened` ones."""
        self._target, self._reopening = config, reopened
        self.open_more()

    def open_more(self) -> None:
        """Go on for about a second."""
        began_s = self._clock.now()
        before, self.unopened = self.unopened, {}
        found = {slot.name: slot for slot in self._target.slots}
        for slot in self._slots:
            if slot.name not in found or slot.name in self._reopening:
                if self._clock.now() - began_s > _OPENING_S:
                    self.unopened[slot.name] = _WAITS
                else:
                    self._remove(slot)
        running = {slot.name for slot in self._slots}
        self._reopening &= running
        for name, each in found.items():
            if name in running:
                continue
            if self._clock.now() - began_s > _OPENING_S:
                self.unopened[name] = _WAITS
                continue
            if self._open(each, before) is None:
                self._note_opened(SlotId(name))
            self._beat_if_due()
        order = {name: number for number, name in enumerate(found)}
        self._slots = tuple(sorted(self._slots, key=lambda slot: order.get(slot.name, -1)))

    def _open(self, slot: SlotConfig, known: Mapping[str, str]) -> Exception | None:
        """Open a slot, or say why not, in the log too where that is not `known`."""
        try:
            make_page_root(self._target)
            self._slots += (self._opened(slot),)
        except Exception as error:
            self.unopened[slot.name] = str(error)
            if str(error) != known.get(slot.name):
                _log.error("slot %s cannot be opened; the agent tries again: %s", slot.name, error)
            self._forget(SlotId(slot.name))
            return error
        return None

    def _note_opened(self, name: SlotId) -> None:
        """Slots that open with the agent are in its own event."""
        mode = self.named(name).policy.settings.mode
        self._audit.note(AuditKind.SLOT_OPENED, slot=name, who=AGENT, reason=f"mode {mode}")

    def _opened(self, slot: SlotConfig) -> Slot:
        config = self._target
        try:
            return Slot(
                config,
                slot,
                leases=self._leases,
                exposition=SlotExposition(slot.name, self._metrics, tenants=config.tenants),
                audit=self._audit,
                now=self._clock.now(),
            )
        except OSError as error:
            raise ConfigError(
                f"slot {slot.name}: cannot use {error.filename}: {error.strerror}; "
                "check pages, page_root and state_dir"
            ) from error

    def _remove(self, slot: Slot) -> None:
        """End lease and grant of a slot that is configured no more, and forget it."""
        if not slot.saved(now=self._clock.now()):
            # The slot lends nothing meanwhile; without its state a quarantine would be forgotten.
            self.unopened[slot.name] = f"not closed before its state is on disk: {slot.fault}"
            return
        try:
            slot.close(now=self._clock.now(), wait=False)
        except Exception:  # The slot's page may be at fault; the grant then expires.
            _log.exception("slot %s: closing it failed", slot.name)
        self._on_closed()
        reopens = any(each.name == slot.name for each in self._target.slots)
        reason = "to be opened again" if reopens else "not in the configuration any more"
        self._audit.note(AuditKind.SLOT_CLOSED, slot=slot.name, who=AGENT, reason=reason)
        self._slots = tuple(each for each in self._slots if each is not slot)
        self._forget(slot.name)
        self._beat_if_due()

    def _forget(self, slot: SlotId) -> None:
        self._leases.remove_slot(slot)
        self._metrics.forget_slot(slot)


def make_page_root(config: AgentConfig) -> None:
    """Make the directory of kill switch and slots. Raises ConfigError if another user owns it."""
    root = config.page_root
    if config.slots_file is None and all(slot.pages for slot in config.slots) and not root.exists():
        return
    own = frozenset((os.geteuid(),))
    try:
        make_directory(root, owners=own, group=None)
        if config.page_gid is not None:
            # Guests of all slots wait there for their turn on a GPU.
            make_directory(root / LAUNCH_DIRECTORY, owners=own, group=config.page_gid)
    except OSError as error:
        raise ConfigError(f"cannot make page_root {root}: {error.strerror}") from error
