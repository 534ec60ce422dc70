"""Passes of a start wait for slack, one after the other, and none after the start."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from coserve.law.work_gate import WorkGate
from coserve.vllm import guest_start


class Gate:
    def __init__(self, said: list[str]) -> None:
        self.said = said
        self.expected: dict[str, float] = {}

    def expect(self, kind: str, piece_s: float) -> None:
        self.expected[kind] = piece_s

    @contextmanager
    def piece(self, kind: str = "weights") -> Iterator[None]:
        self.said.append(f"{kind} waits")
        yield
        self.said.append("over")


class Runner:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def _dummy_run(self, tokens: int, *, capture: bool = False) -> int:
        self.said.append(f"{tokens} {capture}")
        return 2 * tokens


@pytest.fixture
def first() -> Iterator[list[str]]:
    """Before the first pass."""
    made: list[str] = []
    guest_start.pace(Runner, cast(WorkGate, Gate(made)), lambda: made.append("done"))
    yield made
    guest_start.end()


@pytest.fixture
def said(first: list[str]) -> list[str]:
    """After it."""
    Runner(first)._dummy_run(1)
    first.clear()
    return first


def test_the_first_pass_waits_and_what_it_compiles_counts_for_no_other(first: list[str]) -> None:
    assert Runner(first)._dummy_run(8) == 16
    assert first == ["start waits", "over", "8 False"]


def test_each_pass_waits_and_lasts_until_the_gpu_is_done(said: list[str]) -> None:
    assert Runner(said)._dummy_run(8, capture=True) == 16
    assert said == ["start waits", "8 True", "done", "over"]


def test_a_pass_that_fails_is_over_and_its_error_is_vllm_s(said: list[str]) -> None:
    with pytest.raises(TypeError):
        cast(Any, Runner(said))._dummy_run()


def test_after_the_start_nothing_waits(said: list[str]) -> None:
    guest_start.end()
    guest_start.end()
    assert Runner(said)._dummy_run(3) == 6
    assert said == ["3 False"]


def test_a_second_engine_in_the_process_is_paced_once(said: list[str]) -> None:
    guest_start.pace(Runner, cast(WorkGate, Gate(said)), lambda: None)
    Runner(said)._dummy_run(1)
    assert said.count("start waits") == 1
