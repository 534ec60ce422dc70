"""Samples the slot's pages while the demo runs: the grant, and the guest's use of it."""

import asyncio
from collections.abc import Callable

from examples.demo.records import DemoArm, GrantSample
from harvester.contracts.clock import Clock
from harvester.contracts.page import Guest, PageDirectory, Pulse, pulse_page

SAMPLE_S = 0.2


class SlotWatch:
    """`arm` and `block` label the samples; the runner sets them."""

    def __init__(
        self,
        pages: PageDirectory,
        engine: str,
        *,
        clock: Clock,
        record: Callable[[GrantSample], None],
    ) -> None:
        self.arm = DemoArm.SERVING_ONLY
        self.block = -1
        self.first_guest_token_s: float | None = None
        self._grant = pages.grant_reader()
        self._guest = pages.guest_reader()
        self._pulse = pages.pulse_reader(pulse_page(engine, 0))
        self._clock = clock
        self._record = record

    def pulse(self) -> Pulse:
        """Production's pulse; zeros without one."""
        return self._pulse.read().record or Pulse()

    def guest(self) -> Guest:
        return self._guest.read().record or Guest()

    def sample(self) -> GrantSample:
        now = self._clock.now()
        grant, guest = self._grant.read(), self.guest()
        if guest.tokens_total and self.first_guest_token_s is None:
            self.first_guest_token_s = now
        return GrantSample(
            t_s=now,
            arm=self.arm,
            block=self.block,
            mode=grant.record.mode if grant.record else "none",
            reason=grant.record.reason if grant.record else str(grant.fault),
            step_tokens_cap=grant.record.step_tokens_cap if grant.record else 0,
            gate_open=guest.gate == "open",
            gate_reason=guest.reason,
            guest_tokens_total=guest.tokens_total,
            guest_running=guest.running,
            production_in_flight=self.pulse().in_flight,
        )

    async def run(self) -> None:
        while True:
            self._record(self.sample())
            await asyncio.sleep(SAMPLE_S)
