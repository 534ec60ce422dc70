"""A fault: it strikes a world and returns the removal of its cause."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.weightsync.faults.world import FaultWorld
from weightsync.encoding.codec import Encoding

Mend = Callable[[], None]


@dataclass(frozen=True, slots=True)
class FaultClass:
    """One class of faults. `strike` chooses a holder, does the damage and returns the mending."""

    name: str
    strike: Callable[[FaultWorld], Mend]
    encoding: Encoding | None = None
    """Encoding of the store; None: any."""
    in_store: bool = False
    """Whether only files of the store are damaged: a holder goes on if they leave it a way."""
    newest: int | None = None
    """Newest version at the start; None: 6, reached by deltas, or 7, with an anchor beside it."""


def nothing() -> None:
    """The cause is gone already: the process that died is started again."""


def damaging(
    name: str,
    damage: Callable[[FaultWorld], None],
    *,
    encoding: Encoding | None = None,
    newest: int | None = None,
) -> FaultClass:
    """Damage to a store with any holder, mended by whole files or by the next version."""

    def strike(world: FaultWorld) -> Mend:
        world.hold_any()
        damage(world)
        return world.mend()

    return FaultClass(name, strike, encoding=encoding, in_store=True, newest=newest)
