"""Kills: a real process that publishes, copies or pulls gets SIGKILL."""

import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.weightsync.faults.fault import FaultClass, Mend, nothing
from benchmarks.weightsync.faults.tasks import ChildDeath, ChildTask
from benchmarks.weightsync.faults.template import NEWEST
from benchmarks.weightsync.faults.world import FaultWorld
from weightsync.encoding.codec import Encoding

_PUBLISHED_AT_ONCE = 3


def _publishing(
    how: str, *, keep_versions: int, outlived: bool = False
) -> Callable[[FaultWorld], Mend]:
    """A full version, two deltas, an anchor beside the last, pruning where few are kept.

    Where its copy outlives it, the next publisher goes on from what the copy is then.
    """

    def strike(world: FaultWorld) -> Mend:
        world.hold_any()

        def task(death: ChildDeath, store: Path = world.store) -> ChildTask:
            return ChildTask(
                role="publish",
                copy_dir=f"{store}-copy" if outlived else "",
                store=str(store),
                seed=world.template.seed,
                state_indices=world.expect_published(_PUBLISHED_AT_ONCE),
                encoding=world.encoding,
                shard_bytes=world.shard_bytes,
                anchor_every=2,
                keep_versions=keep_versions,
                death=death,
            )

        def mend() -> None:
            world.republish(copy_dir=Path(f"{world.store}-copy") if outlived else None)

        key = f"publish {keep_versions} {outlived} {world.encoding} {world.division}"
        whole = world.zygote.whole(key, lambda: task(ChildDeath(), world.root / "measured"))
        world.zygote.kill(task, how=how, whole=whole, rng=world.rng)
        return mend

    return strike


def _copying(how: str) -> Callable[[FaultWorld], Mend]:
    """The holder reads a mirror that lacks the newest version while it is copied."""

    def strike(world: FaultWorld) -> Mend:
        world.hold_any()

        def task(death: ChildDeath) -> ChildTask:
            return ChildTask(
                role="copy",
                store=str(world.original),
                target=str(world.store),
                seed=world.rng.randrange(1 << 30),
                death=death,
            )

        def mend() -> None:
            world.zygote.run(task(ChildDeath()))
            world.newest = NEWEST

        whole = world.zygote.whole(
            f"copy {world.encoding} {world.division}",
            lambda: ChildTask(
                role="copy",
                store=str(world.original),
                target=str(world.root / "measured"),
            ),
        )
        world.zygote.kill(task, how=how, whole=whole, rng=world.rng)
        return mend

    return strike


def _pull(world: FaultWorld, phase: str, how: str, *, fresh: bool) -> None:
    directory, before = world.root / "held", world.root / "held before"
    shutil.rmtree(before, ignore_errors=True)
    if directory.exists():
        shutil.copytree(directory, before)

    def task(death: ChildDeath, target: Path = directory) -> ChildTask:
        # A child that outlived its death has pulled: the next one would find nothing to do.
        shutil.rmtree(directory, ignore_errors=True)
        if before.exists():
            shutil.copytree(before, directory)
        return ChildTask(
            role="pull", store=str(world.source()), target=str(target), phase=phase, death=death
        )

    def measured() -> ChildTask:
        target = world.root / f"measured {phase}"
        if not fresh:
            world.copy_held(target)
        return task(ChildDeath(), target)

    key = f"pull {phase} {fresh} {world.source_kind} {world.newest}"
    world.zygote.kill(task, how=how, whole=world.zygote.whole(key, measured), rng=world.rng)


def _pulling(
    phase: str, how: str, *, fresh: bool = False, kills: int = 1, foreign: bool = False
) -> Callable[[FaultWorld], Mend]:
    """A pull dies, and again in each of its repairs; meanwhile the store may go on or be pruned."""

    def strike(world: FaultWorld) -> Mend:
        world.hold_directory(fresh=fresh)
        if foreign:
            world.make_foreign()
        for number in range(kills):
            try:
                if number == 0:
                    _pull(world, phase, how, fresh=fresh)
                else:
                    _pull(world, "run", "call", fresh=fresh)
            finally:
                world.look()
        return world.rng.choice([nothing, nothing, world.republish, world.republish_and_prune])

    return strike


KILLS = (
    FaultClass("kill publish at a byte", _publishing("byte", keep_versions=50)),
    FaultClass("kill publish at a call", _publishing("call", keep_versions=50)),
    FaultClass("kill publish at an instant", _publishing("instant", keep_versions=50)),
    FaultClass("kill publish and prune at a call", _publishing("call", keep_versions=1)),
    FaultClass(
        "kill publish with a copy that outlives it, at a byte",
        _publishing("byte", keep_versions=50, outlived=True),
    ),
    FaultClass(
        "kill publish with a copy that outlives it, at a call",
        _publishing("call", keep_versions=50, outlived=True),
    ),
    FaultClass(
        "kill publish with a copy that outlives it, at an instant",
        _publishing("instant", keep_versions=50, outlived=True),
    ),
    FaultClass("kill copy at a byte", _copying("byte"), newest=NEWEST - 1),
    FaultClass("kill copy at a call", _copying("call"), newest=NEWEST - 1),
    FaultClass("kill pull at a call", _pulling("run", "call")),
    FaultClass("kill pull at an instant", _pulling("run", "instant")),
    FaultClass("kill stage at an instant", _pulling("stage", "instant")),
    FaultClass("kill apply at an instant", _pulling("apply", "instant")),
    FaultClass("kill apply within a tensor", _pulling("apply", "tensor")),
    FaultClass("kill first pull at a call", _pulling("run", "call", fresh=True)),
    FaultClass("kill first pull at an instant", _pulling("run", "instant", fresh=True)),
    FaultClass("kill apply, then its repairs", _pulling("apply", "tensor", kills=3)),
    FaultClass(
        "slime: kill -9 within an apply of XOR",
        _pulling("apply", "tensor"),
        encoding=Encoding.XOR,
        newest=NEWEST - 1,
    ),
    FaultClass(
        "slime: kill -9 within an apply of its own layout",
        _pulling("apply", "tensor", foreign=True),
        encoding=Encoding.XOR,
        newest=NEWEST - 1,
    ),
)
