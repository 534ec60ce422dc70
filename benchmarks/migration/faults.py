"""Trajectories under faults: strikes the parts while an independent client rolls out.

The client's orders are its plan and `hold`; everything it received, and everything that engines
sent, is judged afterwards (judge.py) from what they wrote down.
"""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.migration import records, reference
from benchmarks.migration.deployment import (
    CONTEXTS,
    GUEST,
    NUMERICS,
    STORE,
    Deployment,
    EngineProcess,
)
from benchmarks.migration.evidence import MoveEvidence
from benchmarks.migration.judge import judged
from benchmarks.migration.records import AttemptRecord, HeldRecord, RequestRecord
from benchmarks.migration.rollout_plan import (
    FaultKind,
    PlannedFault,
    PlannedTrajectory,
    fault_script,
    rollout_plan,
)
from benchmarks.migration.rollout_process import RolloutProcess, rolling_out
from benchmarks.migration.rollout_routes import choice_name
from benchmarks.migration.tap_spans import with_tap_spans
from benchmarks.migration.verdict import CONVICTING
from weightsync.publisher import Publisher

_STALL_S = (0.5, 6.0)
"""From below the gateway's bound to far above it."""
_GUEST_STALL_S = (0.5, 3.0)
_AGENT_AWAY_S = (0.1, 2.0)
"""Its grants end half a second after it."""
_REVOKED_S = 0.5
_EVICTING_S = 0.5
"""Enough for the guest's budget to be halved three times, to its floor."""
_SWITCH_NOISE = 0.05
_RESTARTS = frozenset((FaultKind.KILL, FaultKind.IDLE_RESTART))
_UNDER_WAY_S = 1.0
"""Turns run again for this long before the next engine is killed."""


GUEST_ENDED = "guest_ended"
"""Counts guests that ended though the script had not killed them: only their agent may."""


class FaultRun:
    def __init__(self, deployment: Deployment, publisher: Publisher, random: Random) -> None:
        self._deployment = deployment
        self._publisher = publisher
        self._random = random
        self._away = asyncio.Lock()
        """The script restarts one engine at a time; the client waits for it with new turns."""
        self._publishing = asyncio.Lock()
        self._guest = asyncio.Lock()
        """The guest and its agent are struck one at a time."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.done: Counter[str] = Counter()
        for engine in deployment.engines.values():
            engine.tap.on_poison = partial(self._poison, engine)

    async def run(self, plan: Sequence[PlannedTrajectory], script: Sequence[PlannedFault]) -> None:
        due = list(script)
        async with rolling_out(self._deployment, plan) as client:
            self._spawn(self._watch(client))
            async for word, rest in client.lines():
                while word == "ended" and due and due[0].at_ended <= int(rest):
                    self._spawn(self._strike(due.pop(0), client))
                for task in [task for task in self._tasks if task.done()]:
                    self._tasks.discard(task)
                    task.result()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self._deployment.engines.values():
            engine.signal(signal.SIGCONT)

    async def _watch(self, client: RolloutProcess) -> None:
        """Ends the run where an engine dies of something that no one did to it: its turns would
        wait forever. A guest may have been ended by its agent, and comes back."""
        while True:
            await asyncio.sleep(1.0)
            for engine in self._deployment.engines.values():
                if not engine.ended or engine.changing:
                    continue
                if engine.name == GUEST:
                    self.done[GUEST_ENDED] += 1
                    await engine.kill()
                    self._spawn(engine.start())
                else:
                    assert engine.child is not None
                    print(f"{engine.name} ended: {engine.child.last_words()}", file=sys.stderr)
                    client.end()
                    return

    def _poison(self, engine: EngineProcess) -> None:
        # At once, as a request that crashes the engine's first step does.
        engine.signal(signal.SIGKILL)
        self._spawn(self._poisoned(engine))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def _strike(self, fault: PlannedFault, client: RolloutProcess) -> None:
        engine = self._deployment.engines.get(fault.engine)
        if fault.kind in _RESTARTS:
            assert engine is not None
            await client.hold()
            async with self._away:
                await self._restart(fault, engine, client)
            return
        if fault.kind is FaultKind.STALL:
            assert engine is not None
            await self._stall(engine, _STALL_S)
        elif fault.kind is FaultKind.STALL_GUEST:
            assert engine is not None
            async with self._guest:
                await engine.tap.used.wait()
                await self._stall(engine, _GUEST_STALL_S)
        elif fault.kind is FaultKind.KILL_AGENT:
            assert engine is not None
            async with self._guest:
                await engine.tap.used.wait()
                await asyncio.to_thread(self._deployment.agent.kill)
                await asyncio.sleep(self._random.uniform(*_AGENT_AWAY_S))
                self._deployment.agent.start()
        elif fault.kind is FaultKind.SWITCH:
            async with self._publishing:
                await self._switch()
        elif fault.kind is FaultKind.REVOKE:
            self._deployment.kill_switch.write_text("drain\n")
            await asyncio.sleep(_REVOKED_S)
            self._deployment.kill_switch.unlink(missing_ok=True)
        elif fault.kind is FaultKind.EVICTED_KV:
            production = self._deployment.production
            production.kv_usage_ratio = 1.0
            await asyncio.sleep(_EVICTING_S)
            production.kv_usage_ratio = 0.0
        else:
            assert engine is not None
            engine.tap.armed[fault.kind] += 1
            return
        self._note(fault)

    def _note(self, fault: PlannedFault) -> None:
        self.done[fault.kind] += 1
        print(f"{fault.at_ended}: {fault.kind} {fault.engine}", file=sys.stderr, flush=True)

    async def _stall(self, engine: EngineProcess, bounds_s: tuple[float, float]) -> None:
        engine.signal(signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(*bounds_s))
        engine.signal(signal.SIGCONT)

    async def _restart(
        self, fault: PlannedFault, engine: EngineProcess, client: RolloutProcess
    ) -> None:
        """The client is held on entry, and goes on while the engine starts."""
        if fault.kind is FaultKind.IDLE_RESTART:
            await client.idle.wait()
            await engine.kill()
            await client.release()
        else:
            await client.release()
            await asyncio.sleep(_UNDER_WAY_S)
            await engine.kill()
        self._note(fault)
        await engine.start()

    async def _poisoned(self, engine: EngineProcess) -> None:
        self.done["poison_kill"] += 1
        await engine.kill()
        await engine.start()

    async def _switch(self) -> None:
        """A version with other weights, so that each token tells which made it."""
        states = self._deployment.states
        # Not in the taps' event loop.
        state = await asyncio.to_thread(_with_noise, states[max(states)], seed=len(states))
        await self._deployment.publish(self._publisher, state)


def _with_noise(state: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
    import torch

    draws = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + _SWITCH_NOISE * torch.randn(tensor.shape, generator=draws))
        for name, tensor in state.items()
    }


async def measured_faults(
    deployment: Deployment,
    publisher: Publisher,
    model: Path,
    *,
    trajectories: int,
    seed: int,
) -> dict[str, Any]:
    dedicated = [name for name in CONTEXTS if name != GUEST]
    contexts = min(CONTEXTS.values()), max(CONTEXTS.values())
    text = reference.ModelText(model)
    plan = rollout_plan(seed, trajectories, contexts=contexts, chat=text.chat, blanks=text.blanks)
    script = fault_script(seed, len(plan), dedicated=dedicated, guest=GUEST)
    run = FaultRun(deployment, publisher, Random(f"stalls {seed}"))
    began_s = deployment.clock.now()
    await run.run(plan, script)
    took_s = deployment.clock.now() - began_s
    struck: Counter[str] = Counter(run.done)
    for engine in deployment.engines.values():
        struck.update(engine.tap.struck)
    poison = frozenset(each.name for each in plan if each.poison)
    evidence = evidence_of(deployment, model, {each.name for each in plan}, poison=poison)
    verdict = verdict_on(evidence, deployment, model)
    asked = {(request.trajectory, request.turn) for request in evidence.requests}
    planned = Counter[str](fault.kind for fault in script)
    return {
        "verdict": verdict,
        "planned": dict(planned),
        "struck": dict(struck),
        "unstruck": _too_few(planned, struck),
        "unasked": _too_few(kinds_of(plan), kinds_of(plan, asked)),
        "guests_ended": [struck[GUEST_ENDED], deployment.agent.guests_ended()],
        "versions": len(deployment.states),
        "took_s": took_s,
        "gateway": (await deployment.status())["jobs"]["job"]["turns"],
        "seed": seed,
    }


def kinds_of(
    plan: Sequence[PlannedTrajectory], asked: Set[tuple[str, int]] | None = None
) -> Counter[str]:
    """Kinds of the planned turns, or of those among them that were `asked` for."""
    return Counter(
        kind
        for planned in plan
        for number, turn in enumerate(planned.turns)
        if not planned.poison and (asked is None or (planned.name, number) in asked)
        for kind in turn.kinds
    )


def _too_few(planned: Counter[str], found: Counter[str]) -> dict[str, list[int]]:
    return {
        kind: [found[kind], count]
        for kind, count in sorted(planned.items())
        if found[kind] < _STRUCK_RATIO * count
    }


def evidence_of(
    deployment: Deployment, model: Path, trajectories: set[str], *, poison: frozenset[str]
) -> MoveEvidence:
    """All that was written down of these trajectories."""
    every = records.read(deployment.record, RequestRecord)
    requests = [each for each in every if each.trajectory in trajectories]
    names = {each.choice_name(index) for each in requests for index in range(each.samples)}
    attempts = [
        each
        for each in records.read(deployment.attempts, AttemptRecord)
        if choice_name(each.request_id) in names
    ]
    held = list(records.read(deployment.held, HeldRecord))
    requests = with_tap_spans(requests, attempts, held)
    text = reference.ModelText(model)
    return MoveEvidence(
        requests=requests,
        attempts=attempts,
        held=held,
        hashes=deployment.state_hashes(),
        announced=deployment.announced,
        truths=reference.truths(model, deployment.states, requests),
        poison=poison,
        forced_end=text.forced_end,
        text=text,
        numerics=NUMERICS,
    )


def verdict_on(evidence: MoveEvidence, deployment: Deployment, model: Path) -> dict[str, Any]:
    """`exchanged_weights`: spans convicted, of all, where the judge is given the next version's
    weights for each version: with several versions it must convict nearly every span.
    """
    states = deployment.states
    verdict = judged(evidence)
    versions = sorted(states)
    found: dict[str, Any] = asdict(verdict)
    if len(versions) > 1:
        following = dict(zip(versions, [*versions[1:], versions[0]], strict=True))
        exchanged = {version: states[after] for version, after in following.items()}
        truths = reference.truths(model, exchanged, evidence.requests)
        control = judged(replace(evidence, truths=truths))
        found["exchanged_weights"] = [control.wrong_span, verdict.spans]
    return found


_STRUCK_RATIO = 0.8
"""Least share of the planned faults of each kind that must have struck, and of the planned turns of
each kind that must have been asked for."""
_UNKNOWN_RATIO = 0.05
"""Share of spans whose engine may have been gone before its workers reported their weights."""
_CONTROL_RATIO = 0.8
"""Share of spans that the judge must convict when it is given other weights. Spans of few tokens
that all versions rate alike are not."""


def convicted(found: Mapping[str, Any]) -> dict[str, Any]:
    """Reasons for which a run misses its goals: counters above 0, faults that struck too seldom,
    kinds of turns that were asked for too seldom, a guest that its agent did not end, a judge that
    knew too few engines' weights, or that convicts too little of other weights."""
    counters = {name: found["verdict"][name] for name in CONVICTING if found["verdict"][name]}
    control, spans = found["verdict"].get("exchanged_weights", (1, 1))
    if control < _CONTROL_RATIO * spans:
        counters["exchanged_weights"] = [control, spans]
    unknown, spans = found["verdict"]["unknown_weights_spans"], found["verdict"]["spans"]
    if unknown > _UNKNOWN_RATIO * spans:
        counters["unknown_weights_spans"] = [unknown, spans]
    ended, by_agent = found["guests_ended"]
    if ended > by_agent:
        counters["guests_ended"] = [ended, by_agent]
    return counters | {name: found[name] for name in ("unstruck", "unasked") if found[name]}


def first_state(model: Path) -> Mapping[str, Any]:
    from safetensors.torch import load_file

    state: Mapping[str, Any] = load_file(model / "model.safetensors")
    return state


@asynccontextmanager
async def publishing(deployment: Deployment, model: Path) -> AsyncIterator[Publisher]:
    """The store with its first version, and the guest leased for the first time."""
    with Publisher(deployment.root / STORE) as publisher:
        await deployment.publish(publisher, first_state(model))
        yield publisher
