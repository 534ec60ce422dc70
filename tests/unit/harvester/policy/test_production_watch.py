"""Several pulses of one slot: processes of one engine, and engines that are unlike."""

from typing import Any

import msgspec
import pytest

from harvester.contracts.page import EngineCore, PageFault, ProductionModel, Pulse
from harvester.policy.production import ProductionView, ProductionWatch, kv_usage_ratio
from harvester.policy.sample import PulseReading
from harvester.policy.settings import ProfileSettings, SlotSettings
from harvester.policy.states import Condition

FAST = ProductionModel(decode_base_s=0.004)
SLOW = ProductionModel(decode_base_s=0.040)


def pulse(**fields: Any) -> Pulse:
    return msgspec.structs.replace(Pulse(model=FAST, model_samples=1000), **fields)


def view(settings: SlotSettings | None = None, **pulses: Pulse) -> ProductionView:
    """Pulses by their names, with a dot for each two underscores."""
    readings = tuple(
        PulseReading(name=name.replace("__", "."), record=record)
        for name, record in sorted(pulses.items())
    )
    return ProductionWatch(settings or SlotSettings()).observe(readings, now=100.0)


def core(rank: int, told_ns: int, kv: float) -> EngineCore:
    return EngineCore(rank=rank, told_ns=told_ns, kv_usage_ratio=kv)


def test_the_newest_word_on_a_core_counts_whoever_says_it() -> None:
    full = pulse(kv_usage_ratio=0.95, cores=(core(0, 5, 0.95), core(1, 8, 0.1)))
    drained = pulse(kv_usage_ratio=0.3, cores=(core(0, 9, 0.0), core(1, 2, 0.3)))
    assert kv_usage_ratio({"pulse.a.0": full, "pulse.a.1": drained}) == 0.1
    other_engine = {"pulse.a.0": full, "pulse.b.0": drained}
    assert kv_usage_ratio(other_engine) == 0.95


def test_an_engine_that_names_no_cores_is_believed_as_it_is() -> None:
    assert kv_usage_ratio({"pulse.a.0": pulse(kv_usage_ratio=0.4)}) == 0.4
    assert kv_usage_ratio({"pulse.a.0": pulse(kv_usage_ratio=0.4, cores=(core(0, 1, 0.6),))}) == 0.6
    assert kv_usage_ratio({}) == 0.0


def test_an_engine_that_is_deployed_unfit_says_why() -> None:
    found = view(pulse__a__0=pulse(), pulse__b__0=pulse(unfit="a replica over 2 nodes"))
    assert found.condition is Condition.UNFIT
    assert found.reason == "pulse.b.0: a replica over 2 nodes"


@pytest.mark.parametrize(
    ("old", "fault", "remedy"),
    [
        ("pulse.a.0", PageFault.EXPIRED, True),
        ("pulse.a.0", PageFault.CONFLICT, False),
        ("pulse.b.1", PageFault.EXPIRED, False),
    ],
    ids=["renamed", "two of one name", "a server of the engine died"],
)
def test_the_page_of_an_engine_that_was_renamed_names_the_remedy(
    old: str, fault: PageFault, remedy: bool
) -> None:
    readings = (PulseReading(name=old, fault=fault), PulseReading(name="pulse.b.0", record=pulse()))
    found = ProductionWatch(SlotSettings()).observe(readings, now=100.0)
    assert found.condition is Condition.SILENT
    assert found.reason.startswith(f"{old} {fault}")
    assert found.reason.endswith("remove the page of an engine that is gone") == remedy


def test_several_engines_are_judged_by_models_of_their_own() -> None:
    found = view(pulse__a__0=pulse(), pulse__b__0=pulse(model=SLOW))
    assert found.own_models
    assert not view(pulse__a__0=pulse(), pulse__a__1=pulse(model=SLOW)).own_models


def test_until_all_of_them_have_learned_the_model_that_was_given_is_everybodys() -> None:
    settings = SlotSettings(profile=ProfileSettings(decode_base_s=0.02))
    found = view(settings, pulse__a__0=pulse(), pulse__b__0=pulse(model_samples=3))
    assert (found.own_models, found.model.decode_base_s) == (False, 0.02)


def test_an_engine_has_learned_as_soon_as_one_of_its_processes_has() -> None:
    found = view(pulse__a__0=pulse(), pulse__a__1=pulse(model_samples=0, model=ProductionModel()))
    assert found.condition is None
    assert found.model.decode_base_s == pytest.approx(FAST.decode_base_s)


def test_requests_without_a_first_token_are_never_fewer_than_none() -> None:
    """58 / 35 * 35 is more than 58."""
    watch = ProductionWatch(SlotSettings())
    found = None
    for one, other in ((0, 0), (55, 3)):
        pulses = (
            pulse(unanswered_total=one, unanswered_s_recent=(9.0,) * min(32, one)),
            pulse(unanswered_total=other, unanswered_s_recent=(9.0,) * other),
        )
        readings = tuple(
            PulseReading(name=f"pulse.a.{place}", record=record)
            for place, record in enumerate(pulses)
        )
        found = watch.observe(readings, now=100.0 + one)
    assert found is not None
    assert found.unanswered == 0.0
    assert found.ttft.total == pytest.approx(58)


def test_each_pulse_s_samples_stand_for_its_own_requests() -> None:
    """A page holds 32 latencies: those of a busy pulse stand for more than an idle one's."""
    watch = ProductionWatch(SlotSettings())
    late = []
    for totals, latencies in (
        ((0, 0), (0.1, 0.1)),
        ((500, 40), (0.9, 0.1)),
        ((1000, 80), (0.1, 0.9)),
    ):
        readings = tuple(
            PulseReading(
                name=f"pulse.a.{place}",
                record=pulse(samples_total=total, ttft_s_recent=(latency_s,) * 32),
            )
            for place, (total, latency_s) in enumerate(zip(totals, latencies, strict=True))
        )
        late.append(watch.observe(readings, now=100.0).ttft.above(0.25).total)
    assert late == pytest.approx([0.0, 500.0, 40.0])
