"""The order of interleaved arms."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

A = TypeVar("A")


def rotated(arms: Sequence[A], rounds: int) -> Iterator[tuple[A, int]]:
    """Yields each arm once a round, with the round's number.

    Rotated from round to round, so that the machine's drift falls on every arm alike.
    """
    for turn in range(rounds):
        yield from ((arms[(place + turn) % len(arms)], turn) for place in range(len(arms)))
