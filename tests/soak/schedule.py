"""The faults of a soak in their seeded order. Pure.

Faults come in decks, each with every fault once, so that a short run meets most of them. In the
last two thirds of each hour no process is ended: memory is judged by the age of a process, and one
that is killed every few minutes never gets old.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

ROUND_S = 3600.0
ENDING_S = 1200.0
"""Begin of each hour in which processes are ended too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTerms:
    """Terms on which a fault may be drawn."""

    ends_process: bool = False
    every_decks: int = 1
    """It is in each deck of this many."""


def faults(terms: Mapping[str, FaultTerms], *, seed: int, piece: int) -> Iterator[str]:
    """Names without end; each piece of a soak has its own order."""
    deck = 0
    while True:
        rng = random.Random(f"{seed} {piece} {deck}")
        names = [name for name in sorted(terms) if deck % terms[name].every_decks == 0]
        rng.shuffle(names)
        yield from names
        deck += 1


class FaultSchedule:
    """Faults that end a process wait for the part of the hour in which they may strike."""

    def __init__(self, terms: Mapping[str, FaultTerms], *, seed: int, piece: int) -> None:
        self._terms = terms
        self._names = faults(terms, seed=seed, piece=piece)

    def draw(self, *, soaked_s: float) -> str:
        """The next fault; `soaked_s`: time of all pieces so far."""
        endings = soaked_s % ROUND_S < ENDING_S
        while True:
            name = next(self._names)
            if endings or not self._terms[name].ends_process:
                return name
