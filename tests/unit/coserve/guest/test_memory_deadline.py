"""The deadline after which a guest that keeps memory ends itself."""

from coserve.guest.memory_deadline import MARGIN_S, MemoryDeadline

DEADLINE_S = 2.0


class Guest:
    def __init__(self) -> None:
        self._deadline = MemoryDeadline()

    def missed(self, usable: int, budget: int | None, *, at: float) -> bool:
        return self._deadline.missed(
            usable_tokens=usable, budget_tokens=budget, deadline_s=DEADLINE_S, now=at
        )


def test_a_guest_within_its_budget_or_without_one_may_keep_what_it_has() -> None:
    guest = Guest()
    for at in (0.0, 100.0, 200.0):
        assert not guest.missed(500, None, at=at)
        assert not guest.missed(500, 500, at=at + 50.0)


def test_a_guest_that_keeps_more_is_over_a_margin_after_the_deadline() -> None:
    guest = Guest()
    assert not guest.missed(500, 400, at=10.0)
    assert not guest.missed(500, 400, at=10.0 + DEADLINE_S), "that is the agent's"
    assert guest.missed(500, 400, at=10.0 + DEADLINE_S + MARGIN_S)


def test_a_budget_that_falls_further_gives_no_more_time() -> None:
    guest = Guest()
    assert not guest.missed(500, 400, at=0.0)
    assert not guest.missed(500, 300, at=2.0)
    assert guest.missed(450, 200, at=3.0)


def test_memory_given_back_in_time_is_forgotten() -> None:
    guest = Guest()
    guest.missed(500, 400, at=0.0)
    assert not guest.missed(400, 400, at=2.9)
    assert not guest.missed(500, 400, at=3.1)
    assert not guest.missed(500, 400, at=6.0)
    assert guest.missed(500, 400, at=6.2)
