"""Gateways of a node in virtual time: lease holders, whose calls and turns cross a network."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from benchmarks.agent.evidence import Evidence, LeaseCall, TurnServed
from benchmarks.agent.virtual_slot import VirtualHolder, VirtualSlot
from benchmarks.agent.virtual_time import VirtualTime
from harvester.agent.node import NodeAgent
from harvester.contracts.ids import JobId, SlotId, TenantId
from harvester.contracts.wire.leases import (
    EPOCH_HEADER,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
)

LEASE_S = 10.0
_REPEATED_S = 8.0
_TURNS = "/v1/completions"


class VirtualGateways:
    def __init__(
        self,
        agent: Callable[[], NodeAgent | None],
        evidence: Evidence,
        *,
        rng: random.Random,
        time: VirtualTime,
    ) -> None:
        """`agent` returns the one that runs now, if any."""
        self._agent = agent
        self._evidence = evidence
        self._rng = rng
        self._time = time
        self._requests = count()

    def beat(self, slot: VirtualSlot, runner: asyncio.Runner) -> None:
        """Every holder may call the agent, and one of them may send a turn."""
        for holder in slot.holders:
            self._hold_lease(slot, holder)
        if slot.epochs and self._rng.random() < 0.2:
            self._send_turn(slot, runner)

    def _hold_lease(self, slot: VirtualSlot, holder: VirtualHolder) -> None:
        """Takes, renews and gives back; a lost request never arrives, a lost reply is asked for
        again."""
        draw, called_s, held = self._rng.random(), self._time.now_s, holder.lease
        if held is not None and called_s >= holder.until_s:
            held = holder.lease = None
            holder.request = ""
        if draw > 0.3:
            return
        request_id = holder.request = holder.request or f"r{next(self._requests)}"
        if held is None:
            request = LeaseRequest(
                request_id=request_id,
                slot=SlotId(slot.name),
                tenant=TenantId("t"),
                job=JobId("j"),
                duration_s=LEASE_S,
            )

            def taken(answer: LeaseGranted | LeaseRefused) -> None:
                if isinstance(answer, LeaseRefused):
                    if "answered before" in answer.reason and holder.request == request_id:
                        holder.request = ""
                elif holder.lease is None and holder.request == request_id:
                    holder.lease, holder.until_s = answer, called_s + answer.duration_s
                    slot.epochs.append(answer.epoch)

            self._send(slot, request_id, lambda agent: agent.take(request), taken)
            return
        lease, renewal = held.lease, LeaseRenewal(epoch=held.epoch, duration_s=LEASE_S)

        def ended(answer: LeaseGranted | LeaseEnded) -> None:
            if holder.lease is None or holder.lease.lease != lease:
                return
            if isinstance(answer, LeaseGranted):
                holder.until_s = max(holder.until_s, called_s + answer.duration_s)
            else:
                holder.lease, holder.request = None, ""

        if draw < 0.01:
            self._send(slot, request_id, lambda agent: agent.release(lease), ended, held.epoch)
        else:
            self._send(slot, request_id, lambda agent: agent.renew(lease, renewal), ended)

    def _send(
        self,
        slot: VirtualSlot,
        request_id: str,
        ask: Callable[[NodeAgent], Any],
        heard: Callable[[Any], None],
        releases: int | None = None,
    ) -> None:
        """A call to the agent through the network as it is. `releases`: epoch of the lease that the
        call gives back."""
        if slot.lose == "request":
            return

        def note(epoch: int, at_s: float, until_s: float, *, released: bool = False) -> None:
            call = LeaseCall(
                slot=slot.name,
                request_id=request_id,
                epoch=epoch,
                at_s=at_s,
                until_s=until_s,
                released=released,
            )
            self._evidence.calls.append(call)

        def arrive(*, repeated: bool) -> None:
            agent = self._agent()
            if agent is None:
                return
            now_s, answer = self._time.now_s, ask(agent)
            if isinstance(answer, LeaseGranted):
                note(answer.epoch, now_s, now_s + answer.duration_s)
            elif releases is not None:
                note(releases, now_s, now_s, released=True)
            if slot.lose != "reply" and not repeated:
                self._deliver(slot.late_s, lambda: heard(answer))

        self._deliver(slot.late_s, lambda: arrive(repeated=False))
        if slot.twice:
            self._deliver(_REPEATED_S, lambda: arrive(repeated=True))

    def _send_turn(self, slot: VirtualSlot, runner: asyncio.Runner) -> None:
        """A turn of a gateway, which may be late itself, through the guest's own middleware."""
        epoch = self._rng.choice(slot.epochs[-3:])
        header = (EPOCH_HEADER.lower().encode(), str(epoch).encode())
        scope = {"type": "http", "method": "POST", "path": _TURNS, "headers": [header]}

        def arrive() -> None:
            async def exchange() -> int:
                sent: list[Any] = []
                await slot.middleware(scope, _nothing, _keeps(sent))
                return int(sent[0]["status"])

            if runner.run(exchange()) == 200:
                turn = TurnServed(slot=slot.name, epoch=epoch, at_s=self._time.now_s)
                self._evidence.turns.append(turn)

        self._deliver(slot.turn_late_s, arrive)

    def _deliver(self, late_s: float, action: Callable[[], None]) -> None:
        if late_s:
            self._time.later(self._rng.uniform(0.0, late_s), action)
        else:
            action()


async def _nothing() -> dict[str, Any]:
    return {"type": "http.request", "body": b""}


def _keeps(sent: list[Any]) -> Callable[[Any], Awaitable[None]]:
    async def send(message: Any) -> None:
        sent.append(message)

    return send
