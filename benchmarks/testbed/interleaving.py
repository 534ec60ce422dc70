"""The order of interleaved arms: a Williams design, balanced for the machine and for carry-over."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

A = TypeVar("A")


def interleaved(arms: Sequence[A], rounds: int, *, first: int = 0) -> Iterator[tuple[A, int]]:
    """Yields every arm once per round, with the number of the round, from round `first` on.

    Within one cycle of orders every arm has every place equally often, and within the rounds every
    arm follows each other one equally often: a cycle is as many rounds as there are arms, twice as
    many for an odd number of arms (Williams 1949).
    """
    orders = _orders(len(arms))
    for number in range(first, rounds):
        yield from ((arms[place], number) for place in orders[number % len(orders)])


def cycle_rounds(arms: int) -> int:
    """Rounds after which the order of so many arms is balanced."""
    return len(_orders(arms))


def _orders(count: int) -> list[list[int]]:
    # 0, 1, n-1, 2, n-2, ...: the distances between neighbours are all different.
    row = [(step + 1) // 2 if step % 2 else (count - step // 2) % count for step in range(count)]
    orders = [[(place + shift) % count for place in row] for shift in range(count)]
    # An odd number of arms is balanced together with the reversed orders.
    return orders if count % 2 == 0 or count == 1 else orders + [each[::-1] for each in orders]
