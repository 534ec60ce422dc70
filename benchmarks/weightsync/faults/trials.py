"""The list of faults, and their trials in a row: struck, judged, mended, recovered or not."""

import resource
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.weightsync.faults.fault import FaultClass
from benchmarks.weightsync.faults.headers import HEADERS
from benchmarks.weightsync.faults.kills import KILLS
from benchmarks.weightsync.faults.machine import DISKS, MACHINE, may_mount
from benchmarks.weightsync.faults.manifests import MANIFESTS
from benchmarks.weightsync.faults.payloads import PAYLOADS
from benchmarks.weightsync.faults.template import NEWEST, Division, Template
from benchmarks.weightsync.faults.transfers import TRANSFERS
from benchmarks.weightsync.faults.world import FaultWorld
from benchmarks.weightsync.faults.zygote import Zygote
from weightsync.encoding.codec import Encoding

_ENCODINGS = (Encoding.ROSEMUX, Encoding.ROSEMUX, Encoding.XOR, Encoding.OVERWRITE)
_STORIES = 20
"""Most failures reported in words."""
_GREW_BYTES_MAX = 256 << 20
"""Bound of a fault's memory on a store of two megabytes: beyond it, a bomb went off."""


@dataclass(slots=True)
class Tally:
    """Counts for one class of faults, or for all."""

    tried: int = 0
    recovered: int = 0
    wrong_state: int = 0
    refused: int = 0
    """Faults at which the holder refused something before they were removed."""
    passable: int = 0
    """Faults in the store that left the holder an intact way to the newest version."""
    passed: int = 0
    """Faults among `passable` at which it got there before the mend."""
    unseen: int = 0
    """Forged deltas of cut tensors that a rank took: no check of its box can tell. Not among
    `passable`; it recovers by a restart."""


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """Result of one fault. A crash is no recovery; `failure` describes it."""

    recovered: bool
    refused: bool = False
    passable: bool = False
    passed: bool = False
    failure: str = ""


@dataclass(slots=True)
class Trials:
    """One run of the harness."""

    seed: int
    total: Tally = field(default_factory=Tally)
    classes: dict[str, Tally] = field(default_factory=dict)
    worlds: dict[str, Tally] = field(default_factory=dict)
    """Counts for each thing that was struck: files of the store, way of reading, holder."""
    failures: list[str] = field(default_factory=list)

    def run(
        self, template: Template, zygotes: tuple[Zygote, ...], fault: FaultClass, number: int
    ) -> None:
        """One fault in a world of its own."""
        rng = Random(f"{self.seed} {number} {fault.name}")
        world = FaultWorld(
            root=template.root / f"world-{number}",
            template=template,
            rng=rng,
            zygote=zygotes[0],
            servers=zygotes[1:],
            encoding=fault.encoding or rng.choice(_ENCODINGS),
            newest=fault.newest or rng.choice([NEWEST - 1, NEWEST]),
            division=rng.choice([*Division]),
            is_object_store=rng.random() < 0.3,
        )
        try:
            outcome = struck(world, fault)
        finally:
            world.end()
        of_class = self.classes.setdefault(fault.name, Tally())
        of_world = [self.worlds.setdefault(word, Tally()) for word in world.words()]
        for tally in (self.total, of_class, *of_world):
            tally.tried += 1
            tally.recovered += outcome.recovered
            tally.wrong_state += bool(world.wrong)
            tally.refused += outcome.refused
            tally.passable += outcome.passable
            tally.passed += outcome.passed
            tally.unseen += world.has_unseen
        for line in (outcome.failure, *world.wrong):
            if line and len(self.failures) < _STORIES:
                self.failures.append(f"{number}, {fault.name}: {line}")


def struck(world: FaultWorld, fault: FaultClass) -> FaultOutcome:
    """Strikes, lets the holder try, removes the cause, and sees whether it recovers.

    A holder that an intact way is left to has to get there before the cause is removed.
    """
    before_bytes = _peak_bytes()
    try:
        mend = fault.strike(world)
        passable = fault.in_store and world.has_a_way()
        refusal = world.attempt()
        passed = passable and world.recovered()
        passable = passable and not world.has_unseen
        grew_bytes = _peak_bytes() - before_bytes
        mend()
        if world.has_unseen:
            world.restart_part()
        recovered = world.recovered()
    except Exception:
        return FaultOutcome(recovered=False, failure=traceback.format_exc(limit=-6))
    if passable and not passed:
        return FaultOutcome(
            recovered=False,
            refused=True,
            passable=True,
            failure=f"stopped at {refusal}, and another way was intact",
        )
    if not recovered:
        return FaultOutcome(
            recovered=False,
            refused=refusal is not None,
            failure=f"not at version {world.newest}; before: {refusal}, "
            f"after: {world.last_refusal}",
        )
    if grew_bytes > _GREW_BYTES_MAX:
        return FaultOutcome(recovered=False, failure=f"it took {grew_bytes >> 20} MiB of memory")
    return FaultOutcome(
        recovered=True, refused=refusal is not None, passable=passable, passed=passed
    )


def classes(directory: Path) -> tuple[FaultClass, ...]:
    """Every class of faults that this machine can do."""
    every = (*KILLS, *TRANSFERS, *PAYLOADS, *HEADERS, *MANIFESTS, *MACHINE)
    return (*every, *DISKS) if may_mount(directory) else every


def measure(
    seed: int = 1, count: int = 500, *, on_progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """`count` faults, every class as often as every other, in an order that the seed gives."""
    trials = Trials(seed)
    root = Path(tempfile.mkdtemp(prefix="weight-faults-"))
    try:
        with Zygote() as victims, Zygote() as server, Zygote() as relay:
            template = Template(root, seed)
            for number, fault in enumerate(_order(seed, count, classes(root))):
                trials.run(template, (victims, server, relay), fault, number)
                if (number + 1) % 50 == 0:
                    on_progress(
                        f"{number + 1} of {count} faults, {trials.total.recovered} recovered"
                    )
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {
        **asdict(trials.total),
        "seed": seed,
        "classes": {name: asdict(tally) for name, tally in sorted(trials.classes.items())},
        "worlds": {name: asdict(tally) for name, tally in sorted(trials.worlds.items())},
        "failures": trials.failures,
    }


def _order(seed: int, count: int, every: tuple[FaultClass, ...]) -> Iterator[FaultClass]:
    rng = Random(seed)
    left: list[FaultClass] = []
    for _ in range(count):
        if not left:
            left = rng.sample(every, len(every))
        yield left.pop()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
