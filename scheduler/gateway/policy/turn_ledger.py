"""The open turns of one job."""

from weakref import WeakValueDictionary

from harvester.contracts.ids import JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import FinishReason, GenerateRequest
from scheduler.gateway.policy.end_tokens import EndTokens
from scheduler.gateway.policy.prompts import Prompt
from scheduler.gateway.policy.turn import Turn, TurnCounters
from scheduler.model import BASE_VERSION


class TurnLedger:
    """The open turns of one job by request id, and the totals of all."""

    def __init__(self, job: JobId) -> None:
        self.job = job
        self.counters = TurnCounters()
        self._open: dict[str, Turn] = {}
        self._end_tokens = EndTokens()
        self._prompts: WeakValueDictionary[int, Prompt] = WeakValueDictionary()
        """One for all turns that share a tuple of token ids, found by the tuple's `id()`: a
        comparison of two tuples would be a pass over both."""

    def __len__(self) -> int:
        return len(self._open)

    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._open.values())

    def open(
        self,
        request: GenerateRequest,
        *,
        trajectory: TrajectoryId,
        newest: WeightVersion = BASE_VERSION,
    ) -> Turn | None:
        """A new turn, or None while one with this request id is open.

        `newest`: the job's newest published version, against which the turn's pin is resolved.
        """
        if request.request_id in self._open:
            return None
        ids = request.token_ids
        if (prompt := self._prompts.get(id(ids))) is None:
            # The prompt holds its ids: no other tuple has their `id()` while it is found here.
            prompt = self._prompts[id(ids)] = Prompt(self.job, ids)
        turn = Turn(
            request=request,
            job=self.job,
            trajectory=trajectory,
            counters=self.counters,
            pin=request.weight_version.resolved(newest),
            end_tokens=self._end_tokens,
            prompt=prompt,
        )
        self._open[request.request_id] = turn
        self.counters.started += 1
        return turn

    def close(self, turn: Turn) -> None:
        """Forget a turn; a turn that has not ended ends as aborted."""
        if not turn.ended:
            turn.end(FinishReason.ABORT)
        self._open.pop(turn.request.request_id, None)
