"""The watchdog's bound: declared, then corrected by completed phases and by its own endings."""

import msgspec
import pytest

from scheduler.rollmux.permits.events import EndPermit, PermitEndReason, RevokePermit, WarnHolder
from scheduler.rollmux.permits.longest_run import CUT_RATIO_MAX, MARGIN_RATIO, LongestRun
from scheduler.rollmux.permits.permits import PermitPolicy
from tests.unit.scheduler.rollmux.permits.permit_scenario import CONFIG, TRAINING, Group, of, terms


def _contended(max_s: float) -> Group:
    """`a` declares `max_s` for its rollout; `b` wants the same node whenever `a` runs."""
    return Group(terms("a", max_s=max_s), terms("b"))


def _rollout(group: Group, *, lasts_s: float) -> PermitEndReason:
    """Runs one rollout of `a` to its end while `b` waits; then `b` has its turn."""
    group.ask("a")
    while group.on("r0") != "a":
        group.end("b")
        group.ask("a")
    group.ask("b")
    ended = None
    begun_s = group.now
    while ended is None and group.now - begun_s < lasts_s:
        group.beat("a")
        group.ask("b")
        endings = of(EndPermit, group.pass_time(1.0))
        ended = next((one.ended for one in endings if one.job == "a"), None)
    group.stopped("a")
    if ended is None:
        group.end("a")
        group.ask("a", TRAINING)
        group.end("a")
        ended = PermitEndReason.DONE
    return ended


def test_a_phase_that_has_drifted_beyond_its_declaration_is_ended_once_and_then_completes() -> None:
    group = _contended(max_s=50.0)
    ends = [_rollout(group, lasts_s=80.0) for _ in range(6)]
    assert ends == [PermitEndReason.OVERRAN] + [PermitEndReason.DONE] * 5


def test_a_drift_that_goes_on_costs_no_permit_once_its_phases_complete() -> None:
    group = _contended(max_s=50.0)
    ends = [_rollout(group, lasts_s=50.0 * 1.2**step) for step in range(12)]
    assert ends.count(PermitEndReason.OVERRAN) == 0
    assert 50.0 * 1.2**11 > 300.0


def test_a_phase_that_always_hangs_is_always_ended_and_within_a_bounded_time() -> None:
    group = _contended(max_s=10.0)
    begun_s = group.now
    ends = [_rollout(group, lasts_s=1e4) for _ in range(12)]
    assert ends == [PermitEndReason.OVERRAN] * 12
    longest_s = CUT_RATIO_MAX * 10.0 + CONFIG.warn_s + CONFIG.grace_s + 2.0
    assert group.now - begun_s < 12 * longest_s


def test_a_revoked_phase_that_fails_counts_as_ended_for_its_length() -> None:
    group = _contended(max_s=10.0)
    group.ask("a")
    group.ask("b")
    told = []
    while not told:
        group.beat("a")
        group.ask("b")
        told = of(RevokePermit, group.pass_time(1.0))
    (ended,) = of(EndPermit, group.end("a", failed="was told to end"))
    assert ended.ended is PermitEndReason.OVERRAN
    assert _rollout(group, lasts_s=20.0) is PermitEndReason.DONE


def test_a_silent_holder_teaches_nothing() -> None:
    group = _contended(max_s=5.0)
    group.ask("a")
    assert of(EndPermit, group.pass_time(1000.0))[0].ended is PermitEndReason.SILENT
    permit = group.policy.permit(group.policy.jobs[0])
    assert permit is not None
    assert permit.longest_runs == {}


def test_the_bound_outlives_a_restart_of_the_control() -> None:
    group = _contended(max_s=50.0)
    assert _rollout(group, lasts_s=80.0) is PermitEndReason.OVERRAN
    again = PermitPolicy(CONFIG)
    again.restore(msgspec.json.decode(msgspec.json.encode(group.policy.snapshot())))
    group.policy = again
    assert _rollout(group, lasts_s=80.0) is PermitEndReason.DONE


def test_the_warning_names_the_bound() -> None:
    group = _contended(max_s=8.0)
    group.ask("a")
    (warned,) = group.pass_time(8.0)
    assert isinstance(warned, WarnHolder)
    assert "8.0 s" in warned.reason


@pytest.mark.parametrize("declared_s", [1.0, 100.0])
def test_one_long_run_is_forgotten(declared_s: float) -> None:
    longest = LongestRun().completed(100.0 * declared_s)
    assert longest.bound_s(declared_s) == MARGIN_RATIO * 100.0 * declared_s
    for _ in range(200):
        longest = longest.completed(0.5 * declared_s)
    assert longest.bound_s(declared_s) == declared_s
