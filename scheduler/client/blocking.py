"""The client for code without an event loop: the asynchronous one, on a loop in its own thread."""

from collections.abc import Iterator, Sequence
from typing import Any, Self, Unpack
from weakref import finalize

from harvester.contracts.wire.rollouts import Choice, VersionSwitched
from harvester.platform.loop_thread import LoopThread
from scheduler.client.rollout_client import AsyncRolloutClient
from scheduler.client.turn_request import Sampling, TurnOptions


class RolloutClient:
    """Turns of one job, from any number of threads; options and errors are AsyncRolloutClient's.

    Use as `with RolloutClient(url, job) as client`, or call `close` at the end; a client that is
    dropped closes by itself.
    """

    def __init__(self, gateway: str, job: str, **options: Any) -> None:
        self._client = AsyncRolloutClient(gateway, job, **options)
        self._loop = LoopThread("rollout-client")
        self._dropped = finalize(self, self._loop.close_after, self._client.close)
        self._dropped.atexit = False  # The process's end closes its connections.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._dropped.detach()
        self._loop.run(self._client.close())
        self._loop.close()

    def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Choice:
        return self._loop.run(self._client.generate(token_ids, sampling, **options))

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Iterator[Choice]:
        choices = self._client.stream(token_ids, sampling, **options)
        try:
            while (choice := self._loop.run(anext(choices, None))) is not None:
                yield choice
        finally:
            self._loop.run(choices.aclose())

    def abort(self, request_id: str | None = None) -> None:
        self._loop.call(self._client.abort, request_id)

    def announce(
        self, version: int, store: str, *, state_hash: str = "", cut_open_turns: bool = False
    ) -> VersionSwitched:
        return self._loop.run(
            self._client.announce(
                version, store, state_hash=state_hash, cut_open_turns=cut_open_turns
            )
        )

    def activate(self) -> VersionSwitched:
        return self._loop.run(self._client.activate())

    def end_trajectory(self, trajectory: str) -> int:
        return self._loop.run(self._client.end_trajectory(trajectory))
