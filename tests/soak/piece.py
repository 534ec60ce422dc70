"""One piece of a soak: starts the node, lets clients and faults run, ends all and looks at what is
left.
"""

import asyncio
import os
import platform
import random
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from harvester.contracts.audit import AuditEvent, audit_files, read_audit
from harvester.contracts.clock import Clock, MonotonicClock, wall_time_utc
from harvester.contracts.errors import RoseMuxError
from tests.soak.fault_stage import DemandUnmet, FaultSkipped, FaultStage, released
from tests.soak.faults import FAULTS
from tests.soak.leavings import SHARED, agent_disk, leavings
from tests.soak.node import SoakNode
from tests.soak.parts import AGENT, DEDICATED, GATEWAY, GUEST, PRODUCTION
from tests.soak.processes import PartSupervisor
from tests.soak.production_load import serve_production
from tests.soak.records import (
    Audited,
    FaultStruck,
    Note,
    PieceBegun,
    PieceEnded,
    RecordFile,
    Sink,
    VersionServed,
)
from tests.soak.rollouts import RolloutJob
from tests.soak.schedule import FaultSchedule
from tests.soak.trainer import Trainer
from tests.soak.witness import GrantWitness, Sampler, grant_page

_QUIET_S = 150.0
"""Without a token of the guest for so long no further fault strikes, until it steps again or its
recovery is overdue."""
_OVERDUE_S = 600.0
_WARM_UP_S = 60.0
_SETTLE_S = 240.0
"""The end of a piece: turns are answered, and engines reach the newest version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecePlan:
    out: Path
    number: int
    seed: int
    seconds: float
    every_s: float
    publish_s: float
    soaked_s: float
    """Time of the pieces before it."""
    lift_starts: bool
    """Guests start outside of their idle group."""
    own_mounts: bool
    """/dev/shm and mounts are this process's own."""


class SoakPiece:
    def __init__(self, plan: PiecePlan, *, stopped: asyncio.Event) -> None:
        self._plan, self._stopped = plan, stopped
        self._clock: Clock = MonotonicClock()
        self._mark = f"{os.getpid()}.{plan.number}"
        self.records = plan.out / f"piece-{plan.number:03}.jsonl"
        self.reason = "time"

    async def run(self) -> None:
        root = Path(tempfile.mkdtemp(prefix="rosemux-soak-", dir=SHARED))
        sink = RecordFile(self.records)
        try:
            await self._run_in(root, sink)
        finally:
            shutil.rmtree(root, ignore_errors=True)
            sink.close()

    async def _run_in(self, root: Path, sink: Sink) -> None:
        plan = self._plan
        with agent_disk(root / "state", own_mounts=plan.own_mounts):
            kept = plan.out / "agent"
            if kept.exists():
                shutil.copytree(kept, root / "state", dirs_exist_ok=True)
            node = SoakNode(plan.out, root)
            lines = len(_audit(node.agent_state))
            left: list[str] = []
            parts = PartSupervisor(
                node.commands(),
                logs=plan.out / "logs",
                mark=self._mark,
                clock=self._clock,
                sink=sink,
                lift_starts=plan.lift_starts,
            )
            witness = GrantWitness(grant_page(node), sink)
            try:
                await self._live(node, parts, sink)
            finally:
                await parts.close()
                witness.stop()
                for event in _audit(node.agent_state)[lines:]:
                    sink(Audited(event=event))
                shutil.copytree(node.agent_state, kept, dirs_exist_ok=True)
                left = await asyncio.to_thread(
                    leavings, node, mark=self._mark, own_mounts=plan.own_mounts
                )
                sink(PieceEnded(at_s=self._clock.now(), asked_by=self.reason, left=tuple(left)))

    async def _live(self, node: SoakNode, parts: PartSupervisor, sink: Sink) -> None:
        plan = self._plan
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await self._start(node, parts, session, sink)
            job = RolloutJob(
                session=session,
                url=node.url(GATEWAY),
                seed=f"{plan.seed}-{plan.number}",
                clock=self._clock,
                sink=sink,
            )
            trainer = Trainer(
                node=node,
                mark=self._mark,
                every_s=plan.publish_s,
                clock=self._clock,
                sink=sink,
                on_served=lambda version: setattr(job, "newest_served", version),
                first_step=plan.number * 100_000,
            )
            sampler = Sampler(node, parts, self._clock, sink)
            stage = FaultStage(
                node=node,
                parts=parts,
                trainer=trainer,
                rng=random.Random(f"{plan.seed} {plan.number}"),
                clock=self._clock,
                sink=sink,
                session=session,
                mark=self._mark,
                small_disk=plan.own_mounts,
            )
            await trainer.publish()
            async with _beside(
                sampler.lending(),
                sampler.sizes(),
                serve_production(
                    node.url(PRODUCTION),
                    seed=plan.seed,
                    piece=plan.number,
                    clock=self._clock,
                    sink=sink,
                ),
                self._operate(stage, sink),
            ):
                await self._roll_out(job, stage, sampler, sink)
            await trainer.close()

    async def _start(
        self, node: SoakNode, parts: PartSupervisor, session: aiohttp.ClientSession, sink: Sink
    ) -> None:
        for name in (PRODUCTION, DEDICATED, AGENT, GATEWAY, GUEST):
            parts.start(name)
        # In its idle group the guest starts with what the others leave: after them.
        for name in (AGENT, GATEWAY, DEDICATED, PRODUCTION):
            await parts.ready(name)
        sink(
            PieceBegun(
                at_s=self._clock.now(),
                seed=self._plan.seed,
                every_s=self._plan.every_s,
                wall=wall_time_utc(),
                machine=f"{os.cpu_count()} cores, {platform.machine()}",
                documented=await _documented(session, node.url(GATEWAY)),
            )
        )

    async def _roll_out(
        self, job: RolloutJob, stage: FaultStage, sampler: Sampler, sink: Sink
    ) -> None:
        """The job's turns beside the faults, to the last turn's end."""
        rollouts = asyncio.create_task(job.run())
        try:
            await self._strike(stage, sampler, sink)
            # A guest follows versions under a lease alone, which the job's turns ask for.
            await self._served(stage, sink)
            job.closing = True
            async with asyncio.timeout(_SETTLE_S):
                await rollouts
        except TimeoutError:
            sink(Note(at_s=self._clock.now(), text="turns were still open at the end"))
        finally:
            rollouts.cancel()
            await asyncio.gather(rollouts, return_exceptions=True)

    async def _strike(self, stage: FaultStage, sampler: Sampler, sink: Sink) -> None:
        """Faults and publishes until the piece's time is over or it is told to stop."""
        plan = self._plan
        terms = {name: fault.terms for name, fault in FAULTS.items()}
        schedule = FaultSchedule(terms, seed=plan.seed, piece=plan.number)
        begun_s = self._clock.now()
        end_s, tick_s = begun_s + plan.seconds, begun_s + _WARM_UP_S
        last_fault_s = begun_s
        publishing = asyncio.create_task(stage.trainer.run())
        try:
            while not await self._waited(min(tick_s, end_s)):
                now = self._clock.now()
                if now >= end_s:
                    return
                tick_s = max(tick_s + plan.every_s, now)
                quiet_s = now - max(sampler.grown_s, begun_s)
                if quiet_s > _QUIET_S and now - last_fault_s < _OVERDUE_S:
                    continue
                if publishing.done():
                    publishing.result()
                name = schedule.draw(soaked_s=plan.soaked_s + now - begun_s)
                await self._strike_one(stage, name, sink)
                last_fault_s = self._clock.now()
        finally:
            async with stage.trainer.busy:  # A version that is under way is known in the end.
                publishing.cancel()
                await asyncio.gather(publishing, return_exceptions=True)

    async def _waited(self, until_s: float) -> bool:
        """Whether the piece is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - self._clock.now())):
                await self._stopped.wait()
        if self._stopped.is_set():
            self.reason = "signal"
            return True
        return False

    async def _strike_one(self, stage: FaultStage, name: str, sink: Sink) -> None:
        fault, skipped, failed = FAULTS[name], "", ""
        since_s = self._clock.now()
        try:
            await fault.strike(stage)
        except FaultSkipped as error:
            skipped = str(error)
        except (DemandUnmet, aiohttp.ClientError, TimeoutError, EOFError) as error:
            failed = f"{type(error).__name__}: {error}"
        sink(
            FaultStruck(
                name=name,
                since_s=since_s,
                until_s=self._clock.now(),
                recover_s=fault.recover_s,
                skipped=skipped,
                failed=failed,
            )
        )

    async def _operate(self, stage: FaultStage, sink: Sink) -> None:
        while True:
            await asyncio.sleep(5.0)
            if await released(stage):
                sink(Note(at_s=self._clock.now(), text="a quarantine was released"))

    async def _served(self, stage: FaultStage, sink: Sink) -> None:
        """Everything that was published, as the engines' workers hold it; late engines are waited
        for."""
        wanted = (stage.trainer.known, stage.trainer.state_hash)
        for engine in (DEDICATED, GUEST):
            if engine == GUEST and not stage.parts.parts[GUEST].is_up:
                sink(Note(at_s=self._clock.now(), text="no guest was up at the end"))
                continue
            until_s, held = self._clock.now() + _SETTLE_S, (-1, "")
            while held != wanted and self._clock.now() < until_s:
                await asyncio.sleep(1.0)
                held = await _held(stage.session, stage.node.url(engine))
            at_s = self._clock.now()
            sink(VersionServed(engine=engine, version=held[0], state_hash=held[1], at_s=at_s))


@asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs these beside the block; raises the error of one that ends by itself."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _audit(state: Path) -> list[AuditEvent]:
    lines = (line for file in audit_files(state / "audit.jsonl") for line in read_audit(file))
    return [line for line in lines if isinstance(line, AuditEvent)]


async def _documented(session: aiohttp.ClientSession, url: str) -> tuple[int, ...]:
    async with session.get(f"{url}/openapi.json") as reply:
        document = await reply.json()
    statuses = document["paths"]["/inference/v1/generate"]["post"]["responses"]
    return tuple(sorted(int(status) for status in statuses if status.isdigit()))


async def _held(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    """Version and hash that an engine's worker holds; -1 where it cannot be asked."""
    timeout = aiohttp.ClientTimeout(total=10.0)
    with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, RoseMuxError):
        asked = {"method": "rosemux_weights"}
        async with session.post(f"{url}/collective_rpc", json=asked, timeout=timeout) as reply:
            (held,) = (await reply.json())["results"]
            return int(held["version"]), str(held["state_hash"])
    return -1, ""


def ends_by(event: asyncio.Event) -> None:
    """Ctrl-C and SIGTERM end the piece, whose evidence counts."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, event.set)
