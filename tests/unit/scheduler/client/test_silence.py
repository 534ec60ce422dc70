"""A gateway is silent after its limit without an answer, and no longer than until the next one."""

from scheduler.client.gateway_watch import GatewaySilence


def silence() -> GatewaySilence:
    return GatewaySilence(2.0, now=100.0)


def test_a_gateway_is_silent_once_the_limit_has_passed_without_an_answer() -> None:
    one = silence()
    one.miss(began_s=100.0, now=101.9)
    assert not one.silent
    one.miss(began_s=101.9, now=102.0)
    assert one.silent


def test_any_answer_ends_the_silence_and_begins_the_limit_anew() -> None:
    one = silence()
    one.miss(began_s=100.0, now=103.0)
    one.hear(now=103.5)
    assert not one.silent
    one.miss(began_s=103.5, now=105.4)
    assert not one.silent


def test_a_probe_that_outlived_its_own_timeout_says_that_this_process_stood_still() -> None:
    one = silence()
    one.miss(began_s=100.0, now=104.5)
    assert not one.silent
    one.miss(began_s=104.5, now=106.5)
    assert one.silent


def test_a_rest_without_probes_is_no_silence_and_does_not_end_one() -> None:
    one = silence()
    one.begin(now=200.0)
    one.miss(began_s=200.0, now=201.0)
    assert not one.silent
    one.miss(began_s=201.0, now=202.0)
    one.begin(now=300.0)
    assert one.silent
