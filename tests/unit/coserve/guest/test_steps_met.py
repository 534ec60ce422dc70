"""Production requests by the number of the guest's steps that they met."""

from hypothesis import given
from hypothesis import strategies as st

from coserve.guest.guest_steps import StepsMet


class Production:
    """Requests that get their first tokens in order of arrival, beside a guest that steps."""

    def __init__(self) -> None:
        self.met = StepsMet()
        self.requests = 0
        self.under_way = 0
        self.waiting: list[int] = []
        """Steps that each waiting request has met."""
        self.answered: list[int] = []

    def arrive(self) -> None:
        self.requests += 1
        self.waiting.append(self.under_way)

    def answer(self) -> None:
        if self.waiting:
            self.answered.append(self.waiting.pop(0))

    def begin(self) -> None:
        self._look(begins=True)
        self.under_way += 1
        self.waiting = [met + 1 for met in self.waiting]

    def end(self) -> None:
        if self.under_way:
            self._look(begins=False)
            self.under_way -= 1

    def _look(self, *, begins: bool) -> None:
        self.met.observe(self.requests, len(self.waiting), under_way=self.under_way, begins=begins)


def test_an_arrival_amid_a_step_meets_it_and_each_step_that_begins_while_it_waits() -> None:
    production = Production()
    production.begin()
    production.arrive()
    production.end()
    production.begin()
    production.end()
    production.answer()
    production.begin()
    assert production.met.counts == [0, 0, 1, 0, 0]


def test_requests_between_steps_meet_none() -> None:
    production = Production()
    production.begin()
    production.end()
    for _ in range(3):
        production.arrive()
        production.answer()
    production.begin()
    assert production.met.counts == [3, 0, 0, 0, 0]


def test_an_engine_that_begins_anew_is_not_taken_for_requests() -> None:
    met = StepsMet()
    met.observe(1_000, 2, under_way=0, begins=True)
    met.observe(3, 0, under_way=1, begins=False)
    met.observe(4, 0, under_way=0, begins=True)
    assert met.counts == [1, 0, 0, 0, 0]


def test_a_request_that_waits_while_production_is_unknown_counts_nowhere() -> None:
    production = Production()
    production.begin()
    production.arrive()
    production.end()
    production.met.forget()
    production.answer()
    production.begin()
    assert production.met.counts == [0, 0, 0, 0, 0]


@given(st.lists(st.sampled_from(["arrive", "answer", "begin", "end"]), max_size=200))
def test_counts_are_those_of_a_record_of_each_request(events: list[str]) -> None:
    production = Production()
    production.begin()
    for event in events:
        # A look falls between an arrival and its answer, or both fall between two looks of steps
        # that do not overlap: what a look cannot tell apart is not claimed.
        getattr(production, event)()
        if event != "end":
            production.met.observe(
                production.requests,
                len(production.waiting),
                under_way=production.under_way,
                begins=False,
            )
    assert sum(production.met.counts) == len(production.answered)
    for met, count in enumerate(production.met.counts[:-1]):
        assert count == production.answered.count(met)
