"""The line to one trainer process: commands go in, events come out, as JSON lines."""

import asyncio

import msgspec

from benchmarks.testbed.processes import Child
from examples.grpo.events import Event, Failed, Ready, StepCommand, StepDone
from harvester.contracts.errors import ConfigError, PeerProtocolError

_LINE_BYTES = 1 << 20


class TrainerLink:
    """One command at a time. Raises ConfigError, with the trainer's last words, when it ends."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._reader: asyncio.StreamReader | None = None
        self._decoder = msgspec.json.Decoder(Event)

    async def ready(self) -> Ready:
        """Its first version is published and serves."""
        event = await self._event()
        if not isinstance(event, Ready):
            raise PeerProtocolError(f"{self._child.name}: expected 'ready', got {event}")
        return event

    async def step(self, prompts: int | None = None) -> StepDone:
        """Do one training step of so many prompts; None: of the job's own number."""
        self._child.input.write(msgspec.json.encode(StepCommand(prompts)) + b"\n")
        self._child.input.flush()
        event = await self._event()
        if not isinstance(event, StepDone):
            raise PeerProtocolError(f"{self._child.name}: expected a step, got {event}")
        return event

    async def _event(self) -> Event:
        if self._reader is None:
            self._reader = asyncio.StreamReader(limit=_LINE_BYTES)
            protocol = asyncio.StreamReaderProtocol(self._reader)
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: protocol, self._child.output)
        line = await self._reader.readline()
        if not line:
            raise ConfigError(f"{self._child.name} ended; its log:\n{self._child.last_words()}")
        event: Event = self._decoder.decode(line)
        if isinstance(event, Failed):
            raise ConfigError(f"{self._child.name} failed: {event.reason}")
        return event
