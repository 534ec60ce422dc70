"""The pulses of one slot as one view, and whether production may be believed at all.

Missing data is a breach, never idleness: an absent pulse, counters that went backwards, requests
without steps, and steps without requests are separate conditions.
"""

from collections.abc import Collection, Iterable, Mapping, Set
from functools import reduce
from operator import attrgetter, le

import msgspec

from harvester.contracts.page import (
    EngineCore,
    PageFault,
    ProductionModel,
    Pulse,
    engine_of,
    latest_cores,
)
from harvester.policy.sample import SCRAPED_PULSE, PulseReading
from harvester.policy.settings import SlotSettings
from harvester.policy.states import Condition
from harvester.policy.unseen import UnseenSteps, unseen_requests

_IDLE_WINDOW_S = 10.0


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Latency samples that are new in this beat."""

    seen_s: tuple[float, ...] = ()
    total: float = 0.0
    """Count of new samples, including those beyond a pulse's capacity."""

    weights: tuple[float, ...] = ()
    """New samples that each seen one stands for; empty: each for as many."""

    def __add__(self, other: "Latencies") -> "Latencies":
        if not (self.seen_s and other.seen_s):
            return self if self.seen_s else other
        return Latencies(
            seen_s=self.seen_s + other.seen_s,
            total=self.total + other.total,
            weights=tuple(weight for _, weight in (*self.weighed, *other.weighed)),
        )

    @property
    def weighed(self) -> Iterable[tuple[float, float]]:
        """Each seen sample, and the number of new ones that it stands for."""
        if self.weights:
            return zip(self.seen_s, self.weights, strict=True)
        return [(seen_s, self.total / len(self.seen_s)) for seen_s in self.seen_s]

    def above(self, slo_s: float) -> "Latencies":
        late = [(x, weight) for x, weight in self.weighed if x > slo_s]
        if not late:
            return NO_LATENCIES
        late_s, weights = zip(*late, strict=True)
        return Latencies(seen_s=late_s, total=sum(weights), weights=weights)


NO_LATENCIES = Latencies()


class ProductionView(msgspec.Struct, frozen=True, kw_only=True):
    condition: Condition | None
    """UNFIT, SILENT, RESTARTED, UNSEEN, UNLEARNED or HUNG; None when production may be believed."""
    reason: str = ""
    model: ProductionModel = ProductionModel()
    ttft: Latencies = NO_LATENCIES
    """First-token latencies, with waits above the SLO that ended without a token."""
    unanswered: float = 0.0
    """Requests that ended without a first token before their SLO: no evidence."""
    itl: Latencies = NO_LATENCIES
    itl_late: Latencies = NO_LATENCIES
    """Inter-token latencies above the SLO, each of another request or step."""
    own_models: bool = False
    """Whether each engine is judged by its own pulses' model, because the engines differ."""
    decoding: int = 0
    decoded: float = 1.0
    """Upper bound of the requests that decoded since the last beat, at least 1."""
    kv_usage_ratio: float = 0.0
    idle_at_s: float | None = None
    """Time of production's last idle moment."""
    busy_s: float | None = None
    """Time spent on steps since the last beat; None where any engine cannot be believed."""


class PulseMemory(msgspec.Struct, kw_only=True):
    steps_total: int
    requests_total: int
    samples_total: int
    itl_samples_total: int
    busy_s_total: float
    unseen_steps_total: int = 0
    unanswered_total: int = 0
    itl_late_total: int = 0
    decoding: int = 0


_counters = attrgetter(*{*PulseMemory.__struct_fields__} - {"unseen_steps_total", "decoding"})


class WatchState(msgspec.Struct, kw_only=True):
    pulses: dict[str, PulseMemory] = {}
    progress_at_s: dict[str, float] = {}
    """Per engine: time of its last step or last idle moment."""
    unseen: dict[str, UnseenSteps] = {}
    """Steps without known requests, per engine."""
    restarted_at_s: float | None = None
    observed_at_s: float | None = None
    idle_ratio: float | None = None
    idle_at_s: float | None = None


class ProductionWatch:
    def __init__(self, settings: SlotSettings, state: WatchState | None = None) -> None:
        self._settings = settings
        self.state = state or WatchState()

    def observe(self, readings: tuple[PulseReading, ...], *, now: float) -> ProductionView:
        silent = _silence(readings)
        pulses = {r.name: r.record for r in readings if r.record is not None}
        remembered = self.state.pulses
        known = {name: (remembered[name], pulses[name]) for name in pulses if name in remembered}
        went_on = {n: pair for n, pair in known.items() if all(map(le, *map(_counters, pair)))}
        restarted = self._restarted(known.keys() - went_on.keys(), now)
        waits = _latencies(went_on, "unanswered_s_recent", "unanswered_total")
        missed = waits.above(self._settings.ttft_slo_s)
        decoded = [
            max(pulse.decoding, before.decoding + pulse.samples_total - before.samples_total)
            for before, pulse in went_on.values()
        ]
        self._note_idleness(went_on.values(), now, seen=bool(pulses))
        model = self._model(pulses)
        engines = [
            self._judge(engine, own, model if len(own) == len(pulses) else self._model(own), now)
            for engine, own in _by_engine(pulses).items()
        ]
        unseen = next((unseen for _, unseen, _ in engines if unseen), "")
        hung = next((hung for _, _, hung in engines if hung), "")
        if not silent and not any(busy for busy, _, _ in engines):
            self.state.idle_at_s = now
        self._remember(pulses, now)
        believed = len(went_on) == len(pulses) and not (silent or restarted or unseen or hung)
        condition, reason = self._condition(silent, restarted, unseen, hung, pulses)
        return ProductionView(
            condition=condition,
            reason=reason,
            model=model,
            ttft=_latencies(went_on, "ttft_s_recent", "samples_total") + missed,
            unanswered=max(0.0, waits.total - missed.total),
            itl=_latencies(went_on, "itl_s_recent", "itl_samples_total"),
            itl_late=self._late_tokens(went_on),
            own_models=len(engines) > 1 and _learned(pulses) >= self._settings.model_samples_min,
            decoding=sum(p.decoding for p in pulses.values()),
            decoded=max(1.0, sum(decoded)),
            kv_usage_ratio=kv_usage_ratio(pulses),
            idle_at_s=self.state.idle_at_s,
            busy_s=_busy_s(went_on.values()) if believed else None,
        )

    def _late_tokens(self, went_on: Mapping[str, tuple[PulseMemory, Pulse]]) -> Latencies:
        """Late tokens as the pulses count them for this SLO, else from the pulses' samples."""
        slo_s = self._settings.itl_slo_s
        counted = {name: pair for name, pair in went_on.items() if pair[1].itl_slo_s == slo_s}
        sampled = {name: pair for name, pair in went_on.items() if name not in counted}
        late = _latencies(counted, "itl_late_s_recent", "itl_late_total")
        return late + _latencies(sampled, "itl_s_recent", "itl_samples_total").above(slo_s)

    def _condition(
        self, silent: str, restarted: str, unseen: str, hung: str, pulses: dict[str, Pulse]
    ) -> tuple[Condition | None, str]:
        unfit = [f"{name}: {pulse.unfit}" for name, pulse in pulses.items() if pulse.unfit]
        if unfit:
            return Condition.UNFIT, unfit[0]
        if silent:
            return Condition.SILENT, silent
        if restarted:
            return Condition.RESTARTED, restarted
        if unseen:
            return Condition.UNSEEN, unseen
        learned = _learned(pulses)
        if learned < self._settings.model_samples_min and not self._has_profile(pulses):
            reason = f"model rests on {learned} of {self._settings.model_samples_min} steps"
            if SCRAPED_PULSE in pulses:
                reason = "a scrape says nothing of arrivals, so the slot is only observed"
            elif self._settings.profile.given:
                reason = f"the profile is of another engine; {reason}"
            return Condition.UNLEARNED, reason
        return (Condition.HUNG, hung) if hung else (None, "")

    def _model(self, pulses: dict[str, Pulse]) -> ProductionModel:
        """The learned model, or the configured profile until enough steps are learned."""
        given = self._settings.profile
        if self._has_profile(pulses) and _learned(pulses) < self._settings.model_samples_min:
            return msgspec.convert(given, ProductionModel, from_attributes=True)
        models = [pulse.model for pulse in pulses.values()]
        return reduce(ProductionModel.upper, models or [ProductionModel()])

    def _has_profile(self, pulses: dict[str, Pulse]) -> bool:
        """Whether a profile applies: its shapes cover all known shapes of the pulses. No profile
        makes a scrape enough to lend on."""
        given = self._settings.profile
        if SCRAPED_PULSE in pulses or not given.given:
            return False
        shapes = {pulse.shape for pulse in pulses.values() if pulse.shape}
        return not given.shapes or shapes <= set(given.shapes)

    def _restarted(self, backwards: Set[str], now: float) -> str:
        state = self.state
        if backwards:
            name = min(backwards)
            state.restarted_at_s = now
            state.idle_ratio = None
            state.progress_at_s.pop(engine_of(name), None)
            return f"{name}: counters went backwards"
        since = state.restarted_at_s
        if since is not None and now - since < self._settings.cooldown_s:
            return "production restarted"
        return ""

    def _note_idleness(
        self, went_on: Collection[tuple[PulseMemory, Pulse]], now: float, *, seen: bool
    ) -> None:
        state = self.state
        elapsed_s = 0.0 if state.observed_at_s is None else now - state.observed_at_s
        if not seen:
            state.idle_ratio = None
        if elapsed_s <= 0 or not went_on:
            return
        idle = 1.0 - min(1.0, _busy_s(went_on) / elapsed_s)
        gain = min(1.0, elapsed_s / _IDLE_WINDOW_S)
        last = idle if state.idle_ratio is None else state.idle_ratio
        state.idle_ratio = last + gain * (idle - last)

    def _judge(
        self, engine: str, members: dict[str, Pulse], model: ProductionModel, now: float
    ) -> tuple[bool, str, str]:
        """Whether the engine is busy, and why it serves unseen requests or hangs; "" if not."""
        busy, pulses = self._busy(members), tuple(members.values())
        patience_s = self._patience_s(pulses, model)
        unseen = unseen_requests(self.state.unseen, engine, pulses, patience_s=patience_s, now=now)
        if not busy or any(map(self._stepped, members, pulses)):
            self.state.progress_at_s[engine] = now
        stuck_s = now - self.state.progress_at_s.setdefault(engine, now)
        stuck = f"{engine}: requests in flight, no step for {stuck_s:.1f} s"
        return busy, unseen, stuck if stuck_s > patience_s else ""

    def _busy(self, members: dict[str, Pulse]) -> bool:
        """Whether middleware, cores or steps show work; an open WebSocket alone is no work."""
        pulses = tuple(members.values())
        if any(pulse.in_flight > pulse.sockets for pulse in pulses):
            return True
        if any(core.running or core.waiting for core in latest_cores(pulses)):
            return True
        return any(self._served_unseen(name, pulse) for name, pulse in members.items())

    def _served_unseen(self, name: str, pulse: Pulse) -> bool:
        before = self.state.pulses.get(name)
        return before is not None and pulse.unseen_steps_total != before.unseen_steps_total

    def _stepped(self, name: str, pulse: Pulse) -> bool:
        before = self.state.pulses.get(name)
        return before is None or pulse.steps_total != before.steps_total

    def _patience_s(self, pulses: Collection[Pulse], model: ProductionModel) -> float:
        prompt_tokens = max([pulse.largest_waiting_prompt_tokens for pulse in pulses])
        decoding = sum([pulse.decoding for pulse in pulses])
        step_s = max(model.prefill_s(prompt_tokens), model.decode_s(decoding))
        return max(self._settings.hung_min_s, self._settings.hung_steps * step_s)

    def _remember(self, pulses: dict[str, Pulse], now: float) -> None:
        for name, pulse in pulses.items():
            self.state.pulses[name] = msgspec.convert(pulse, PulseMemory, from_attributes=True)
        self.state.observed_at_s = now


def _latencies(
    went_on: Mapping[str, tuple[PulseMemory, Pulse]], recent: str, total: str
) -> Latencies:
    """New samples of the field `recent`, of which `total` counts all."""
    found = NO_LATENCIES
    for before, pulse in went_on.values():
        if new := getattr(pulse, total) - getattr(before, total):
            found += Latencies(seen_s=getattr(pulse, recent)[-new:], total=new)
    return found


def _busy_s(went_on: Iterable[tuple[PulseMemory, Pulse]]) -> float:
    return sum(pulse.busy_s_total - before.busy_s_total for before, pulse in went_on)


def _by_engine(pulses: dict[str, Pulse]) -> dict[str, dict[str, Pulse]]:
    engines: dict[str, dict[str, Pulse]] = {}
    for name, pulse in pulses.items():
        engines.setdefault(engine_of(name), {})[name] = pulse
    return engines


def _silence(readings: tuple[PulseReading, ...]) -> str:
    if not readings:
        return "no pulse is expected or present"
    absent = [reading for reading in readings if reading.record is None]
    faults = ", ".join(f"{r.name} {r.fault or 'missing'}" for r in absent)
    fresh = {engine_of(reading.name) for reading in readings if reading.record is not None}
    expired = {engine_of(r.name) for r in absent if r.fault is PageFault.EXPIRED}
    if fresh and expired - fresh:
        # An engine that was renamed leaves its page.
        faults += ": remove the page of an engine that is gone"
    return faults


def kv_usage_ratio(pulses: Mapping[str, Pulse]) -> float:
    """KV use of the fullest engine core. With several API servers a pulse's value for a core may be
    old, so the newest value of each core counts."""
    newest: dict[tuple[str, int], EngineCore] = {}
    fullest = 0.0
    for name, pulse in sorted(pulses.items()):
        if not pulse.cores:
            fullest = max(fullest, pulse.kv_usage_ratio)
        for core in pulse.cores:
            place = engine_of(name), core.rank
            if place not in newest or newest[place].told_ns < core.told_ns:
                newest[place] = core
    return max(fullest, *(core.kv_usage_ratio for core in newest.values()), 0.0)


def _learned(pulses: dict[str, Pulse]) -> int:
    """Steps behind the model of the engine with the fewest."""
    engines: dict[str, int] = {}
    for name, pulse in pulses.items():
        engine = engine_of(name)
        engines[engine] = max(engines.get(engine, 0), pulse.model_samples)
    return min(engines.values(), default=0)
