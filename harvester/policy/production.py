"""The pulses of one slot as one view, and whether production may be believed at all.

Missing data is a breach, never idleness: an absent pulse, counters that went backwards, requests
without steps, and steps without requests are separate conditions.
"""

from collections.abc import Collection, Iterable, Mapping, Set
from functools import reduce
from operator import attrgetter, le
from typing import Any

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
        """The seen samples, each with the number of new samples that it represents."""
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


_remembered = attrgetter(*PulseMemory.__struct_fields__)
_counters = attrgetter(*{*PulseMemory.__struct_fields__} - {"unseen_steps_total", "decoding"})


class WatchState(msgspec.Struct, kw_only=True):
    pulses: dict[str, PulseMemory] = {}
    progress_at_s: dict[str, float] = {}
    """Time of each engine's last step or last idle moment."""
    unseen: dict[str, UnseenSteps] = {}
    """Steps without known requests, per engine."""
    restarted_at_s: float | None = None
    observed_at_s: float | None = None
    idle_ratio: float | None = None
    idle_at_s: float | None = None


class PulseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one beat's readings, whatever came before them."""

    readings: tuple[PulseReading, ...]
    silent: str
    pulses: dict[str, Pulse]
    engines: list[tuple[str, dict[str, Pulse], bool, float]]
    """Names of engines, their pulses, whether these show work, and a time longer than any step."""
    model: ProductionModel
    unfit: str
    learned: int
    decoding: int
    kv_usage_ratio: float


class ProductionWatch:
    def __init__(self, settings: SlotSettings, state: WatchState | None = None) -> None:
        self._settings = settings
        self.state = state or WatchState()
        self._facts: PulseFacts | None = None

    def observe(self, readings: tuple[PulseReading, ...], *, now: float) -> ProductionView:
        facts = self._facts
        if facts is None or readings != facts.readings:
            facts = self._facts = self._facts_of(readings)
        silent, pulses, remembered = facts.silent, facts.pulses, self.state.pulses
        same: dict[str, Pulse] = {}
        news: dict[str, tuple[PulseMemory, Pulse]] = {}
        backwards: set[str] = set()
        for name, pulse in pulses.items():
            if (before := remembered.get(name)) is None:
                continue
            if _remembered(before) == _remembered(pulse):
                same[name] = pulse
            elif all(map(le, _counters(before), _counters(pulse))):
                news[name] = before, pulse
            else:
                backwards.add(name)
        restarted, went_on = self._restarted(backwards, now), len(same) + len(news)
        busy_s = sum(pulse.busy_s_total - before.busy_s_total for before, pulse in news.values())
        self._note_idleness(busy_s if went_on else None, now, seen=bool(pulses))
        engines = [self._judge(*engine, now=now) for engine in facts.engines]
        unseen = next((unseen for _, unseen, _ in engines if unseen), "")
        hung = next((hung for _, _, hung in engines if hung), "")
        if not silent and not any(busy for busy, _, _ in engines):
            self.state.idle_at_s = now
        for name in pulses if len(same) < len(pulses) else ():
            remembered[name] = msgspec.convert(pulses[name], PulseMemory, from_attributes=True)
        self.state.observed_at_s = now
        believed = went_on == len(pulses) and not (silent or restarted or unseen or hung)
        condition, reason = self._condition(silent, restarted, unseen, hung, facts)
        return ProductionView(
            condition=condition,
            reason=reason,
            model=facts.model,
            own_models=len(engines) > 1 and facts.learned >= self._settings.model_samples_min,
            decoding=facts.decoding,
            kv_usage_ratio=facts.kv_usage_ratio,
            idle_at_s=self.state.idle_at_s,
            busy_s=busy_s if believed else None,
            **self._new(same, news),
        )

    def _facts_of(self, readings: tuple[PulseReading, ...]) -> "PulseFacts":
        pulses = {r.name: r.record for r in readings if r.record is not None}
        model, engines = self._model(pulses), list[tuple[str, dict[str, Pulse], bool, float]]()
        for engine, own in _by_engine(pulses).items():
            patience_s = self._patience_s(
                own.values(), model if len(own) == len(pulses) else self._model(own)
            )
            engines.append((engine, own, _works(tuple(own.values())), patience_s))
        return PulseFacts(
            readings=readings,
            silent=silence(readings),
            pulses=pulses,
            engines=engines,
            model=model,
            unfit=next(
                (f"{name}: {pulse.unfit}" for name, pulse in pulses.items() if pulse.unfit), ""
            ),
            learned=_learned(pulses),
            decoding=sum(pulse.decoding for pulse in pulses.values()),
            kv_usage_ratio=kv_usage_ratio(pulses),
        )

    def _new(
        self, same: Mapping[str, Pulse], news: Mapping[str, tuple[PulseMemory, Pulse]]
    ) -> dict[str, Any]:
        """The fields of a view that say what came since the last beat."""
        decoded = sum(pulse.decoding for pulse in same.values())
        if not news:
            return {"decoded": max(1.0, decoded)}
        waits = _latencies(news, "unanswered_s_recent", "unanswered_total")
        missed = waits.above(self._settings.ttft_slo_s)
        for before, pulse in news.values():
            new = pulse.samples_total - before.samples_total
            decoded += max(pulse.decoding, before.decoding + new)
        return {
            "ttft": _latencies(news, "ttft_s_recent", "samples_total") + missed,
            "unanswered": max(0.0, waits.total - missed.total),
            "itl": _latencies(news, "itl_s_recent", "itl_samples_total"),
            "itl_late": self._late_tokens(news),
            "decoded": max(1.0, decoded),
        }

    def _late_tokens(self, news: Mapping[str, tuple[PulseMemory, Pulse]]) -> Latencies:
        """Late tokens as the pulses count them for this SLO, else from the pulses' samples."""
        slo_s = self._settings.itl_slo_s
        counted = {name: pair for name, pair in news.items() if pair[1].itl_slo_s == slo_s}
        sampled = {name: pair for name, pair in news.items() if name not in counted}
        late = _latencies(counted, "itl_late_s_recent", "itl_late_total")
        return late + _latencies(sampled, "itl_s_recent", "itl_samples_total").above(slo_s)

    def _condition(
        self, silent: str, restarted: str, unseen: str, hung: str, facts: "PulseFacts"
    ) -> tuple[Condition | None, str]:
        if facts.unfit:
            return Condition.UNFIT, facts.unfit
        if silent:
            return Condition.SILENT, silent
        if restarted:
            return Condition.RESTARTED, restarted
        if unseen:
            return Condition.UNSEEN, unseen
        learned, pulses = facts.learned, facts.pulses
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

    def _note_idleness(self, busy_s: float | None, now: float, *, seen: bool) -> None:
        state = self.state
        elapsed_s = 0.0 if state.observed_at_s is None else now - state.observed_at_s
        if not seen:
            state.idle_ratio = None
        if elapsed_s <= 0 or busy_s is None:
            return
        idle = 1.0 - min(1.0, busy_s / elapsed_s)
        gain = min(1.0, elapsed_s / _IDLE_WINDOW_S)
        last = idle if state.idle_ratio is None else state.idle_ratio
        state.idle_ratio = last + gain * (idle - last)

    def _judge(
        self, engine: str, members: dict[str, Pulse], works: bool, patience_s: float, *, now: float
    ) -> tuple[bool, str, str]:
        """Whether the engine is busy, and why it serves unseen requests or hangs; "" if not."""
        pulses = tuple(members.values())
        busy = works or any(map(self._served_unseen, members, pulses))
        unseen = unseen_requests(self.state.unseen, engine, pulses, patience_s=patience_s, now=now)
        if not busy or any(map(self._stepped, members, pulses)):
            self.state.progress_at_s[engine] = now
        stuck_s = now - self.state.progress_at_s.setdefault(engine, now)
        stuck = f"{engine}: requests in flight, no step for {stuck_s:.1f} s"
        return busy, unseen, stuck if stuck_s > patience_s else ""

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


def _works(pulses: tuple[Pulse, ...]) -> bool:
    """Whether middleware or cores show work; an open WebSocket alone is no work."""
    if any(pulse.in_flight > pulse.sockets for pulse in pulses):
        return True
    return any(core.running or core.waiting for core in latest_cores(pulses))


def _latencies(news: Mapping[str, tuple[PulseMemory, Pulse]], recent: str, total: str) -> Latencies:
    """New samples of the field `recent`, of which `total` counts all."""
    found = NO_LATENCIES
    for before, pulse in news.values():
        if new := getattr(pulse, total) - getattr(before, total):
            found += Latencies(seen_s=getattr(pulse, recent)[-new:], total=new)
    return found


def _by_engine(pulses: dict[str, Pulse]) -> dict[str, dict[str, Pulse]]:
    engines: dict[str, dict[str, Pulse]] = {}
    for name, pulse in pulses.items():
        engines.setdefault(engine_of(name), {})[name] = pulse
    return engines


def silence(readings: tuple[PulseReading, ...]) -> str:
    """Which expected pulses are not there, and why; "" if all are."""
    if not readings:
        return "no pulse is expected or present: production writes none in these pages"
    absent = [reading for reading in readings if reading.record is None]
    faults = ", ".join(f"{r.name} {r.fault or 'missing'}" for r in absent)
    fresh = {engine_of(reading.name) for reading in readings if reading.record is not None}
    expired = {engine_of(r.name) for r in absent if r.fault is PageFault.EXPIRED}
    if fresh and expired - fresh:
        # An engine that was renamed leaves its page.
        faults += ": remove the page of an engine that is gone"
    if SCRAPED_PULSE in [reading.name for reading in absent]:
        faults += ": `metrics_url` gives none, and the agent's log says why"
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
