"""Which pulses must be there when no configuration lists them."""

from harvester.contracts.page import PageFault, Pulse
from harvester.policy.sample import FOREIGN_PULSE, PulseReading, expected


def fresh(name: str, *, processes: int) -> PulseReading:
    return PulseReading(name=name, record=Pulse(processes=processes))


def silent(name: str, fault: PageFault = PageFault.EXPIRED) -> PulseReading:
    return PulseReading(name=name, fault=fault)


def test_an_api_server_that_never_showed_itself_is_missing() -> None:
    present = (fresh("pulse.a.1", processes=3),)
    assert [(r.name, r.fault) for r in expected(present)] == [
        ("pulse.a.0", PageFault.MISSING),
        ("pulse.a.1", None),
        ("pulse.a.2", PageFault.MISSING),
    ]


def test_a_page_of_an_api_server_that_the_engine_has_no_more_is_left_over() -> None:
    present = (
        fresh("pulse.a.0", processes=1),
        silent("pulse.a.1"),
        fresh("pulse.b.0", processes=1),
    )
    assert [r.name for r in expected(present)] == ["pulse.a.0", "pulse.b.0"]


def test_a_page_beyond_the_engines_number_that_lives_or_is_not_believed_stays() -> None:
    present = (
        fresh("pulse.a.0", processes=1),
        fresh("pulse.a.1", processes=1),
        silent("pulse.a.2", PageFault.FOREIGN),
    )
    assert expected(present) == present


def test_a_conflict_beyond_the_engines_number_stays_while_it_is_written() -> None:
    present = (
        fresh("pulse.a.0", processes=1),
        silent("pulse.a.1", PageFault.CONFLICT),
        silent("pulse.a.2", PageFault.TORN),
    )
    assert expected(present) == present


def test_an_engine_that_does_not_say_is_taken_as_it_is() -> None:
    present = (fresh("pulse.a.0", processes=0), silent("pulse.a.1"))
    assert expected(present) == present
    assert expected((silent("pulse.a.0"),)) == (silent("pulse.a.0"),)
    assert expected(()) == ()


def test_more_than_can_be_is_not_believed() -> None:
    (only,) = expected((fresh("pulse.a.0", processes=10**9),))
    assert (only.name, only.fault) == (FOREIGN_PULSE, PageFault.FOREIGN)


def test_a_configured_list_hides_no_api_server_and_no_engine_that_lives_beside_it() -> None:
    configured = frozenset({"pulse.a.0"})
    present = (fresh("pulse.a.0", processes=2), fresh("pulse.b.0", processes=1))
    found = expected(present, configured)
    assert [(r.name, r.fault) for r in found] == [
        ("pulse.a.0", None),
        ("pulse.a.1", PageFault.MISSING),
        ("pulse.b.0", None),
    ]


def test_a_silent_engine_stays_beside_the_configured_until_it_is_known_to_have_ended() -> None:
    configured = frozenset({"pulse.a.0"})
    present = (
        fresh("pulse.a.0", processes=0),
        silent("pulse.a.1"),
        silent("pulse.old.0"),
        silent("pulse.x.0", PageFault.FOREIGN),
    )
    assert expected(present, configured) == present
    found = expected(present, configured, frozenset({"pulse.old.0"}))
    assert [r.name for r in found] == ["pulse.a.0", "pulse.a.1", "pulse.x.0"]


def test_a_configured_pulse_stays_silent_when_its_engine_has_ended() -> None:
    present = (silent("pulse.a.0"), silent("pulse.gone.0", PageFault.MISSING))
    found = expected(present, frozenset({"pulse.a.0"}), frozenset({"pulse.a.0"}))
    assert [r.name for r in found] == ["pulse.a.0"]
