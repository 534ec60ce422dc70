"""An agent's slots as tables: offers, engines, forecasts, guards and error budgets."""

import math
from collections.abc import Iterator

from rich.table import Table

from harvester.cli.row_table import add_row, row_table
from harvester.contracts.wire.leases import KILL_SWITCH, SlotOffer, SlotOffers

_SILENT_DISCOVERY_S = 300.0
"""Bound of the alert RoseMuxDiscoverySilent."""
_SUSPECTED_RATIO = 0.5
"""Least share that the proof withholds while it suspects harm."""
_NAMES = ("slot", "lease", "service", "model", "url", "guard")
_NUMBERS = ("epoch", "idle", "floor", "value", "limit", "budget", "spent", "known", "charged")


def agent_tables(offers: SlotOffers) -> Iterator[Table]:
    """The tables that have rows."""
    slots = _table("slot", "offer", "mode", "state", "lease", "epoch", "idle", "headroom")
    slots.title = f"Node {offers.node}"
    engines = _table("slot", "model", "url", "isolation", "floor")
    for offer in offers.slots:
        idle = "unknown" if offer.idle_ratio is None else f"{offer.idle_ratio:.0%}"
        lease = f"{offer.tenant}/{offer.job}" if offer.tenant or offer.job else ""
        add_row(
            slots, offer.slot, offer.state.value, offer.mode, offer.slot_state, lease,
            offer.epoch, idle, _headroom(offer),
        )  # fmt: skip
        floor = gib(offer.floor_bytes) if offer.floor_bytes else ""
        add_row(engines, offer.slot, offer.model, offer.engine_url, offer.isolation, floor)
    tables = slots, engines, _forecasts(offers), _guards(offers), _budgets(offers)
    yield from (each for each in tables if each.rows)


def agent_sentences(offers: SlotOffers) -> Iterator[str]:
    """Whatever is too long for a row, and must not be cut."""
    if not offers.slots:
        yield f"Node {offers.node} has no open slot"
    if offers.slots_file_absent:
        yield f"No slots file at {offers.slots_file_absent} yet: its slots open once it is there"
    for offer in offers.slots:
        if offer.lending.summary:
            yield f"Slot {offer.slot} can lend {offer.lending.summary}"
        yield from _withheld(offer)
        if offer.reason and offer.reason != _fault(offer):
            yield f"Slot {offer.slot}: {offer.reason}"
    for stop in offers.stops:
        scope = stop.slot or (f"tenant {stop.tenant}" if stop.tenant else "node")
        yield f"Stopped, {scope}: {stop.text}"
    yield from agent_faults(offers)
    yield from slot_faults(offers)


def _withheld(offer: SlotOffer) -> Iterator[str]:
    """More of the leased time than the proof's usual share. A proof that has found harm is not
    unsettled: it stops the slot."""
    if any(each.guard == "proof" and each.binds for each in offer.guards):
        return
    if offer.proving_left_s > 0:
        minutes = math.ceil(offer.proving_left_s / 60)
        yield f"Slot {offer.slot} has proven itself after {minutes} more min of leased time"
    until = "until then"
    if offer.withheld_ratio >= _SUSPECTED_RATIO:
        until = "until a suspicion of harm is settled"
    elif offer.proving_left_s <= 0:
        return
    yield f"Slot {offer.slot} withholds {offer.withheld_ratio:.0%} of its leased time {until}"


def agent_faults(offers: SlotOffers) -> Iterator[str]:
    """Faults of the agent as a whole: what is not in force, and what is not recorded."""
    if offers.kill_file_fault:
        yield f"The kill file drains the node, as its order is not clear: {offers.kill_file_fault}"
    for name, reason in offers.unopened.items():
        yield f"Slot {name} is not open: {reason}"
    if offers.config_refused:
        yield f"A reload was refused, the old configuration goes on: {offers.config_refused}"
    if offers.slots_file_age_s >= _SILENT_DISCOVERY_S:
        age = f"{offers.slots_file_age_s:.0f} s"
        yield f"Discovery has been silent for {age}: slots stay as they were"
    if offers.audit_fault:
        yield f"The audit cannot be written, the agent's log has its events: {offers.audit_fault}"
    if offers.restart_needed:
        yield f"The agent needs a restart for {', '.join(offers.restart_needed)}"


def slot_faults(offers: SlotOffers) -> Iterator[str]:
    """Slots for which `/readyz` is 503, and those that may not lend though their operator lets
    them: quarantined, unfit."""
    for offer in offers.slots:
        if fault := _fault(offer):
            yield f"Slot {offer.slot} needs a look: {fault}"


def _fault(offer: SlotOffer) -> str:
    ordered = offer.stop is not None or offer.reason.startswith(KILL_SWITCH)
    off = (offer.mode, offer.slot_state) == ("harvest", "off") and not ordered
    return offer.unready or (offer.reason if off else "")


def gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"


def _table(*columns: str, title: str = "") -> Table:
    return row_table(*columns, names=_NAMES, numbers=_NUMBERS, title=title)


def _headroom(offer: SlotOffer) -> str:
    if offer.headroom_ratio is None or offer.headroom_age_s is None:
        return "unknown"
    return f"{offer.headroom_ratio:.0%}, {offer.headroom_age_s:.0f} s old"


def _forecasts(offers: SlotOffers) -> Table:
    """Production's idle share in the time to come."""
    table = _table(
        "slot", "next", "9 of 10 times above", "median", "9 of 10 times below",
        title="Forecast of the idle share",
    )  # fmt: skip
    for offer in offers.slots:
        for each in offer.forecasts:
            quantiles = each.low_ratio, each.median_ratio, each.high_ratio
            shares = [f"{one:.0%}" for one in quantiles]
            add_row(table, offer.slot, f"{each.horizon_s:g} s", *shares)
    return table


def _guards(offers: SlotOffers) -> Table:
    """Every guard's value beside its limit."""
    table = _table("slot", "guard", "value", "limit", "", title="Guards")
    for offer in offers.slots:
        for guard in offer.guards:
            values = f"{guard.value:.4g}", f"{guard.limit:.4g}"
            add_row(table, offer.slot, guard.guard, *values, "binds" if guard.binds else "")
    return table


def _budgets(offers: SlotOffers) -> Table:
    """The service's error budget at the last allotment."""
    table = _table(
        "slot", "service", "budget", "spent", "known", "charged", "allotted",
        title="Error budgets, misses of 28 d",
    )  # fmt: skip
    for offer in offers.slots:
        if (report := offer.budget) is None:
            continue
        last = report.allotment
        whole = (
            ("the slot's own", "", "")
            if last is None
            else (f"{last.budget:.4g}", f"{last.spent:.4g}", f"{last.known_s / 3600:.1f} h")
        )
        limit = "no lease" if report.limit is None else f"{report.limit:.4g}"
        add_row(table, offer.slot, report.service, *whole, f"{report.charged:.4g}", limit)
    return table
