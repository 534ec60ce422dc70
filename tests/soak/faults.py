"""The faults of a soak: a table of strikes, each with the terms on which it is drawn.

A strike returns once the harness has lifted it. It raises `FaultSkipped` where it cannot strike
here, and `DemandUnmet` where the product did not do at once what the fault demands of it.
"""

import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.soak.fault_stage import DemandUnmet, FaultSkipped, FaultStage
from tests.soak.parts import AGENT, DEDICATED, GATEWAY, GUEST, PRODUCTION
from tests.soak.records import Stopped
from tests.soak.schedule import FaultTerms
from tests.soak.witness import FILLER

Strike = Callable[[FaultStage], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SoakFault:
    strike: Strike
    terms: FaultTerms = FaultTerms()  # noqa: RUF009 - frozen
    recover_s: float = 120.0


def _up(stage: FaultStage, part: str) -> None:
    if not stage.parts.parts[part].is_up:
        raise FaultSkipped(f"{part} is not up")


def _killed(part: str) -> Strike:
    """SIGKILL of all processes of a part, or of any one of them."""

    async def strike(stage: FaultStage) -> None:
        _up(stage, part)
        pids = stage.parts.pids(part)
        only = stage.rng.choice(pids) if stage.rng.random() < 0.5 else None
        stage.parts.strike(part, signal.SIGKILL, only=only)

    return strike


def _frozen(part: str, low_s: float, high_s: float) -> Strike:
    """SIGSTOP of all processes of a part, then SIGCONT."""

    async def strike(stage: FaultStage) -> None:
        _up(stage, part)
        stage.parts.strike(part, signal.SIGSTOP)
        try:
            await stage.rest(low_s, high_s)
        finally:
            stage.parts.strike(part, signal.SIGCONT)

    return strike


def _kill_file(word: str) -> Strike:
    async def strike(stage: FaultStage) -> None:
        _up(stage, AGENT)
        await _in_force(stage, stage.node.page_root / "kill", word, "kill file")

    return strike


async def _stop_file(stage: FaultStage) -> None:
    _up(stage, AGENT)
    await _in_force(stage, stage.node.page_root / "stop", "drain", "stop file")


async def _in_force(stage: FaultStage, path: Path, word: str, source: str) -> None:
    path.write_text(f"{word} soak\n")
    since_s = stage.clock.now()
    try:
        await stage.rest(4.0, 10.0)
    finally:
        until_s = stage.clock.now()
        path.unlink()
        stage.sink(Stopped(order=word, source=source, since_s=since_s, until_s=until_s))


def _ordered(order: str, *, cluster: bool = False) -> Strike:
    """An operator's order by command, at the agent or for the cluster."""

    async def strike(stage: FaultStage) -> None:
        _up(stage, GATEWAY if cluster else AGENT)
        _up(stage, AGENT)
        where = (
            ("--cluster", "--gateway", stage.node.url(GATEWAY))
            if cluster
            else ("--agent", stage.node.url(AGENT))
        )
        await stage.rosemux(order, "--reason", "soak", *where)
        since_s = stage.clock.now()
        try:
            await stage.rest(4.0, 10.0)
        finally:
            until_s = stage.clock.now()
            stage.sink(
                Stopped(
                    order=order,
                    source="cluster" if cluster else "operator",
                    since_s=since_s,
                    until_s=until_s,
                    grants_close=order == "drain",
                )
            )
            await stage.rosemux("resume", *where)

    return strike


async def _reloaded(stage: FaultStage) -> None:
    """A good file with another number of turns, which the agent must report."""
    _up(stage, AGENT)
    stage.reloads += 1
    wanted = 12 + stage.reloads % 4
    text = stage.node.agent_yaml.replace("concurrency: 16", f"concurrency: {wanted}")
    stage.node.write_agent_file(text)
    stage.parts.strike(AGENT, signal.SIGHUP, only=stage.parts.pids(AGENT)[0])

    async def applied() -> bool:
        return (await stage.slot()).get("concurrency") == wanted

    await stage.until(applied, f"concurrency {wanted} was not applied")


async def _misconfigured(stage: FaultStage) -> None:
    """A broken file, which must change nothing; then the one before it."""
    _up(stage, AGENT)
    before, file = await stage.slot(), stage.node.agent_file
    text = file.read_text()
    broken = text.replace("epsilon: 0.05", "epsilon: .nan")
    stage.node.write_agent_file(stage.rng.choice((broken, text[: len(text) // 2] + "\n  - [", "")))
    try:
        stage.parts.strike(AGENT, signal.SIGHUP, only=stage.parts.pids(AGENT)[0])
        await stage.rest(2.0, 5.0)
        after = await stage.slot()
        if after.get("concurrency") != before.get("concurrency"):
            raise DemandUnmet(f"a broken file changed {before} to {after}")
    finally:
        stage.node.write_agent_file(text)
        stage.parts.strike(AGENT, signal.SIGHUP, only=stage.parts.pids(AGENT)[0])


async def _disk_full(stage: FaultStage) -> None:
    if not stage.small_disk:
        raise FaultSkipped("no file system of its own for the agent's state: it needs root")
    filler = stage.node.agent_state / FILLER
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        await stage.rest(10.0, 20.0)
    finally:
        filler.unlink(missing_ok=True)


def _page_removed(page: str) -> Strike:
    """Its writer makes it again."""

    async def strike(stage: FaultStage) -> None:
        _up(stage, {"grant": AGENT, "guest": GUEST}.get(page, PRODUCTION))
        path = stage.node.pages / page
        path.unlink(missing_ok=True)

        async def is_back() -> bool:
            return path.exists()

        await stage.until(is_back, f"page {page} was not made again")

    return strike


async def _trainer_killed(stage: FaultStage) -> None:
    await stage.trainer.kill_in_publish(stage.rng)


async def _production_restarted(stage: FaultStage) -> None:
    """As an operator restarts it, or as the kernel ends it."""
    _up(stage, PRODUCTION)
    number = stage.rng.choice((signal.SIGTERM, signal.SIGKILL))
    stage.parts.strike(PRODUCTION, number, only=stage.parts.pids(PRODUCTION)[0])


_ENDS = FaultTerms(ends_process=True)
FAULTS: Mapping[str, SoakFault] = {
    "agent killed": SoakFault(_killed(AGENT), _ENDS),
    "agent frozen": SoakFault(_frozen(AGENT, 0.5, 8.0)),
    "guest killed": SoakFault(
        _killed(GUEST), FaultTerms(ends_process=True, every_decks=2), recover_s=240.0
    ),
    "guest frozen": SoakFault(_frozen(GUEST, 1.0, 12.0)),
    "gateway killed": SoakFault(_killed(GATEWAY), _ENDS),
    "gateway frozen": SoakFault(_frozen(GATEWAY, 1.0, 8.0)),
    "dedicated engine killed": SoakFault(_killed(DEDICATED), _ENDS),
    "dedicated engine frozen": SoakFault(_frozen(DEDICATED, 1.0, 12.0)),
    "kill file: hold": SoakFault(_kill_file("hold")),
    "kill file: drain": SoakFault(_kill_file("drain")),
    "stop file: drain": SoakFault(_stop_file),
    "hold": SoakFault(_ordered("hold")),
    "drain": SoakFault(_ordered("drain")),
    "cluster drained": SoakFault(_ordered("drain", cluster=True)),
    "agent reloaded": SoakFault(_reloaded),
    "agent reloaded, broken file": SoakFault(_misconfigured),
    "disk full": SoakFault(_disk_full),
    "grant page removed": SoakFault(_page_removed("grant")),
    "guest page removed": SoakFault(_page_removed("guest")),
    "pulse page removed": SoakFault(_page_removed(f"pulse.{PRODUCTION}.0")),
    "trainer killed in a publish": SoakFault(_trainer_killed),
    "production restarted": SoakFault(
        _production_restarted, FaultTerms(ends_process=True, every_decks=3), recover_s=240.0
    ),
}
