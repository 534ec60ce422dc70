"""The faults of a soak: seeded, all of them, and none that ends a process late in the hour."""

from itertools import islice

from tests.soak.schedule import ENDING_S, ROUND_S, FaultSchedule, FaultTerms, faults

TERMS = {
    "killed": FaultTerms(ends_process=True),
    "frozen": FaultTerms(),
    "held": FaultTerms(),
    "restarted": FaultTerms(ends_process=True, every_decks=3),
}


def test_each_deck_has_each_fault_once_and_rare_ones_are_rare() -> None:
    drawn = list(islice(faults(TERMS, seed=1, piece=0), 20))
    assert sorted(drawn[:4]) == sorted(TERMS)
    assert sorted(drawn[4:7]) == sorted(drawn[7:10]) == ["frozen", "held", "killed"]
    assert sorted(drawn[10:14]) == sorted(TERMS)


def test_the_order_follows_from_seed_and_piece() -> None:
    def drawn(seed: int, piece: int) -> list[str]:
        return list(islice(faults(TERMS, seed=seed, piece=piece), 40))

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(1, 1) != drawn(2, 1)


def test_no_process_is_ended_late_in_the_hour() -> None:
    schedule = FaultSchedule(TERMS, seed=1, piece=0)
    late = {schedule.draw(soaked_s=ENDING_S + n) for n in range(50)}
    assert late == {"frozen", "held"}
    assert "killed" in {schedule.draw(soaked_s=ROUND_S + n) for n in range(50)}
