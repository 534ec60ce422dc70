"""The agent killed and stopped, a given number of times: in one run, or in several that resume.

Each trial is a line in a file: if a run ends before all are done, for any reason, the next one
resumes it. Kills and stops alternate. Production stays idle, so that the guest always has a step to
yield; a trial that finds it standing is void and repeated.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.coserve.reclaim import after_loss
from benchmarks.coserve.rollouts import Rollouts
from benchmarks.testbed.held_lease import HeldLease
from benchmarks.testbed.slot import ServingSlot
from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Guest

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
_TRIES = 2
"""Most tries for each required trial."""
_REPORT_EVERY = 5
_STEPPING_S = 1.5
"""Seconds of rollouts before the agent is lost."""


class FailsafeTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    signal: str
    ms: float | None
    """Time from the agent's loss to the end of the guest's last step, in ms; None if the guest
    stood."""


@dataclass(slots=True)
class TrialLog:
    """`required` of each signal; those in `file` count. Without one, of this run alone."""

    required: int
    file: Path | None = None
    trials: list[FailsafeTrial] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises ConfigError where the file holds something else."""
        if self.file is None or not self.file.exists():
            return
        try:
            self.trials = msgspec.json.Decoder(FailsafeTrial).decode_lines(self.file.read_bytes())
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.file} holds no trials: {error}") from error

    def add(self, trial: FailsafeTrial) -> None:
        self.trials.append(trial)
        if self.file is not None:
            with self.file.open("ab") as lines:
                lines.write(msgspec.json.encode(trial) + b"\n")

    def next(self) -> signal.Signals | None:
        """The signal with the fewest trials; None if both have enough, or no trial is left."""
        open_ones = [
            (len(self.measured(number)), number)
            for number in SIGNALS
            if len(self.measured(number)) < self.required
            and sum(trial.signal == number.name for trial in self.trials) < _TRIES * self.required
        ]
        return min(open_ones, key=lambda one: one[0])[1] if open_ones else None

    def measured(self, number: signal.Signals) -> list[float]:
        return [
            trial.ms
            for trial in self.trials
            if trial.signal == number.name and trial.ms is not None
        ]

    def figures(self) -> dict[str, Any]:
        kills, stops = (self.measured(number) for number in SIGNALS)
        return {
            "kill_max": max(kills, default=None),
            "stop_max": max(stops, default=None),
            "n": {number.name: len(self.measured(number)) for number in SIGNALS},
        }


@dataclass(slots=True)
class FailSafe:
    slot: ServingSlot
    guest: Callable[[], Guest]
    lease: HeldLease
    rollouts: Rollouts
    clock: Clock
    new_agent: Callable[[], Awaitable[None]]
    """Called after a kill, once the guest was watched."""
    on_progress: Callable[[str], None]
    kept: Callable[[dict[str, Any]], None] = lambda _: None
    """Called with the figures so far, after each trial."""

    async def run(self, log: TrialLog, *, within_s: float) -> dict[str, Any]:
        """Runs trials until every signal has its trials or the time is over."""
        start_s, before = self.clock.now(), len(log.trials)
        while (number := log.next()) and self.clock.now() - start_s < within_s:
            log.add(FailsafeTrial(signal=number.name, ms=await self._trial(number)))
            self.kept(log.figures())
            made = len(log.trials) - before
            if made % _REPORT_EVERY == 0:
                each_s = (self.clock.now() - start_s) / made
                self.on_progress(f"{log.figures()}, {each_s:.1f} s each")
        return log.figures()

    async def _trial(self, number: signal.Signals) -> float | None:
        async with self.lease.holding(), self.rollouts.running():
            await asyncio.sleep(_STEPPING_S)
            taken_ms = await after_loss(self.slot, self.guest, number)
            if number is signal.SIGKILL:
                await self.new_agent()
        return taken_ms
