"""The order of interleaved arms."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

A = TypeVar("A")


def rotated(arms: Sequence[A], rounds: int) -> Iterator[tuple[A, int]]:
    """Yields every arm once per round, with the number of the round.

    Rotated from round to round, so that the machine's drift falls on every arm alike.
    """
    for number in range(rounds):
        start = number % len(arms)
        yield from ((arm, number) for arm in (*arms[start:], *arms[:start]))
