"""Blocking ratio and preemption time are found again in logs that were made with known ones."""

from random import Random
from typing import Any

import msgspec
import pytest

from benchmarks.gpu_slot.engines.step_log import Step
from benchmarks.gpu_slot.sharing.blocking import blocking_figures, overlaps, times_alone

_GUEST_NS = 20_000_000
_ALONE_NS = 4_000_000
_APART_NS = 100_000_000


def _logs(
    *, ratio: float, preemption_ns: int, count: int = 400, noise_ns: int = 50_000
) -> tuple[list[Step], list[Step]]:
    """Production steps that begin at any moment of a guest step, as a device with these would."""
    rng = Random(3)
    production, guest = list[Step](), list[Step]()
    for number in range(count):
        start_ns = number * _APART_NS
        arrival_ns = start_ns + rng.randrange(_GUEST_NS)
        rest_ns = start_ns + _GUEST_NS - arrival_ns
        late_ns = preemption_ns + int(ratio * rest_ns) + rng.randrange(-noise_ns, noise_ns)
        guest.append(
            Step(kind="decode", size=16, start_ns=start_ns, end_ns=start_ns + _GUEST_NS + 1_000_000)
        )
        production.append(
            Step(
                kind="prefill",
                size=128,
                start_ns=arrival_ns,
                end_ns=arrival_ns + _ALONE_NS + late_ns,
            )
        )
    return production, guest


def _figures(production: list[Step], guest: list[Step]) -> dict[str, Any]:
    found = overlaps(
        production,
        guest,
        production_alone_s={("prefill", 128): _ALONE_NS * 1e-9},
        guest_alone_s={("decode", 16): _GUEST_NS * 1e-9},
    )
    return blocking_figures(found)


@pytest.mark.parametrize(("ratio", "preemption_ns"), [(1.0, 0), (0.4, 300_000), (0.0, 600_000)])
def test_the_ratio_and_the_preemption_of_a_device_are_found(
    ratio: float, preemption_ns: int
) -> None:
    figures = _figures(*_logs(ratio=ratio, preemption_ns=preemption_ns))
    assert figures["overlaps"] == 400
    line = figures["by_rest"]
    assert line["blocking_ratio"] == pytest.approx(ratio, abs=0.01)
    assert line["preemption_ms"] == pytest.approx(preemption_ns * 1e-6, abs=0.02)
    assert line["upper_preemption_ms"] > line["preemption_ms"]
    assert line["rms_ms"] < 0.05


def test_a_device_that_takes_turns_shorter_than_a_step_is_told_apart() -> None:
    """Each gets half of it while both have work: the delay is the lesser of rest and own time."""
    production, guest = _logs(ratio=0.0, preemption_ns=0)
    late = []
    for one, other in zip(production, guest, strict=True):
        rest_ns = other.start_ns + _GUEST_NS - one.start_ns
        late.append(msgspec.structs.replace(one, end_ns=one.end_ns + min(rest_ns, _ALONE_NS)))
    figures = _figures(late, guest)
    assert figures["by_lesser"]["blocking_ratio"] == pytest.approx(1.0, abs=0.02)
    assert figures["by_lesser"]["rms_ms"] < 0.1 * figures["by_rest"]["rms_ms"]
    assert figures["by_rest"]["blocking_ratio"] < 0.3, "as if production were preempting"


def test_few_overlaps_give_a_count_and_no_figure() -> None:
    assert _figures(*_logs(ratio=1.0, preemption_ns=0, count=29)) == {"overlaps": 29}


def test_a_step_that_meets_two_guest_steps_is_left_out() -> None:
    production, guest = _logs(ratio=0.0, preemption_ns=0, count=40)
    second = Step(
        kind="decode",
        size=16,
        start_ns=production[0].start_ns + 1_000,
        end_ns=production[0].end_ns,
    )
    found = _figures(production, sorted([*guest, second], key=lambda one: one.start_ns))
    assert found == _figures(production[1:], guest[1:])


def test_a_step_after_the_guest_s_meets_none() -> None:
    production, guest = _logs(ratio=0.0, preemption_ns=0, count=40)
    late = [
        Step(kind=one.kind, size=one.size, start_ns=one.start_ns + _GUEST_NS + 2_000_000, end_ns=0)
        for one in production
    ]
    assert _figures(late, guest) == {"overlaps": 0}


def test_a_form_s_time_alone_is_its_median() -> None:
    steps = [Step(kind="decode", size=1, start_ns=0, end_ns=n * 1_000_000) for n in (1, 2, 90)]
    assert times_alone(steps) == {("decode", 1): pytest.approx(0.002)}
