"""The constants of made-up devices are recovered from their logs."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from benchmarks.gpu_slot.engines.step_log import LoggedStep
from benchmarks.gpu_slot.sharing.blocking import blocking_figures, overlaps, times_alone

_GUEST_NS = 20_000_000
_SHORT_NS, _LONG_NS = 4_000_000, 60_000_000
_APART_NS = 200_000_000
_SHORT, _LONG = ("prefill", 128), ("prefill", 4096)

Manner = Callable[[int, int], tuple[int, int]]
"""(rest, own) of an overlap to (delay of production, delay of the guest), nanoseconds."""


def _whole(rest_ns: int, own_ns: int) -> tuple[int, int]:
    """A step ends before another begins."""
    return rest_ns, 0


def _turns(rest_ns: int, own_ns: int) -> tuple[int, int]:
    """Both get half of the device until one of them is done."""
    return min(rest_ns, own_ns), min(rest_ns, own_ns)


def _preempted(rest_ns: int, own_ns: int) -> tuple[int, int]:
    """Production runs at once, after 0.3 ms."""
    return 300_000, own_ns


def _apart(rest_ns: int, own_ns: int) -> tuple[int, int]:
    return 0, 0


def _figures(manner: Manner, *, count: int = 400) -> dict[str, Any]:
    rng = Random(3)
    production, guest = list[LoggedStep](), list[LoggedStep]()
    for number in range(count):
        form, own_ns = ((_SHORT, _SHORT_NS), (_LONG, _LONG_NS))[number % 2]
        start_ns = number * _APART_NS
        arrival_ns = start_ns + rng.randrange(_GUEST_NS)
        delay_ns, guest_delay_ns = manner(start_ns + _GUEST_NS - arrival_ns, own_ns)
        delay_ns += rng.randrange(-20_000, 20_000)
        guest.append(_step(("decode", 16), start_ns, _GUEST_NS + guest_delay_ns))
        production.append(_step(form, arrival_ns, own_ns + delay_ns))
        # The decode behind it meets the same guest step, or none.
        production.append(_step(("decode", 1), production[-1].end_ns + 1000, 1_000_000))
    found = overlaps(
        production,
        guest,
        production_alone_s={
            _SHORT: _SHORT_NS * 1e-9,
            _LONG: _LONG_NS * 1e-9,
            ("decode", 1): 0.001,
        },
        guest_alone_s={("decode", 16): _GUEST_NS * 1e-9},
    )
    assert len(found) == count, "one production step for each guest step"
    return blocking_figures(found)


def _step(form: tuple[str, int], start_ns: int, length_ns: int) -> LoggedStep:
    return LoggedStep(kind=form[0], size=form[1], start_ns=start_ns, end_ns=start_ns + length_ns)


@pytest.mark.parametrize(
    ("manner", "ratio", "preemption_ms", "over_overlap"),
    [(_whole, 1.0, 0.0, 1.0), (_turns, 1.0, 0.0, 0.5), (_apart, 0.0, 0.0, 0.0)],
)
def test_a_device_s_manner_is_found_again(
    manner: Manner, ratio: float, preemption_ms: float, over_overlap: float
) -> None:
    figures = _figures(manner)
    assert figures["law"]["blocking_ratio"] == pytest.approx(ratio, abs=0.02)
    assert figures["law"]["preemption_ms"] == pytest.approx(preemption_ms, abs=0.05)
    assert figures["law"]["largest_preemption_ms"] < preemption_ms + 0.1
    long = figures["forms"]["prefill_4096"]
    assert long["over_overlap"]["p50"] == pytest.approx(over_overlap, abs=0.05)


def test_preemption_costs_the_same_for_any_rest_of_the_step() -> None:
    law = _figures(_preempted)["law"]
    assert law["blocking_ratio"] == pytest.approx(0.0, abs=0.02)
    assert law["preemption_ms"] == pytest.approx(0.3, abs=0.02)


def test_short_steps_do_not_make_turns_look_like_preemption() -> None:
    """In turns a short step is late by its own time only; the law's ratio is of long ones."""
    figures = _figures(_turns)
    short = figures["forms"]["prefill_128"]
    assert short["delay_ms"]["max"] < 4.1
    assert short["over_own"]["p50"] == pytest.approx(1.0, abs=0.05)
    assert figures["law"]["blocking_ratio"] == pytest.approx(1.0, abs=0.02)
    assert figures["law"]["count"] < 300, "of the short ones those alone that met less"


def test_few_overlaps_give_a_count_and_no_constant() -> None:
    assert _figures(_whole, count=40)["law"] == {"count": pytest.approx(24, abs=5)}


def test_a_step_that_meets_two_guest_steps_is_left_out() -> None:
    production = [_step(_SHORT, 5_000_000, 30_000_000)]
    guest = [_step(("decode", 16), 0, 20_000_000), _step(("decode", 16), 21_000_000, 20_000_000)]
    found = overlaps(
        production,
        guest,
        production_alone_s={_SHORT: 0.004},
        guest_alone_s={("decode", 16): 0.02},
    )
    assert found == []


def test_a_step_after_the_guest_s_meets_none() -> None:
    production = [_step(_SHORT, 20_000_001, 4_000_000)]
    guest = [_step(("decode", 16), 0, 20_000_000)]
    alone = {_SHORT: 0.004, ("decode", 16): 0.02}
    assert overlaps(production, guest, production_alone_s=alone, guest_alone_s=alone) == []


def test_a_form_s_time_alone_is_its_median() -> None:
    steps = [
        LoggedStep(kind="decode", size=1, start_ns=0, end_ns=n * 1_000_000) for n in (1, 2, 90)
    ]
    assert times_alone(steps) == {("decode", 1): pytest.approx(0.002)}
