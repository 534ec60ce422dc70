"""The open turns of one job."""

from harvester.contracts.ids import JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import FinishReason, GenerateRequest
from scheduler.gateway.policy.end_tokens import EndTokens
from scheduler.gateway.policy.prompts import Prompts
from scheduler.gateway.policy.turn import Turn, TurnCounters
from scheduler.model import BASE_VERSION


class TurnLedger:
    """The open turns of one job by request id, and the totals of all."""

    def __init__(self, job: JobId) -> None:
        self.job = job
        self.counters = TurnCounters()
        self._open: dict[str, Turn] = {}
        self._end_tokens = EndTokens()
        self._prompts = Prompts()

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
        turn = Turn(
            request=request,
            job=self.job,
            trajectory=trajectory,
            counters=self.counters,
            pin=request.weight_version.resolved(newest),
            end_tokens=self._end_tokens,
            prompt=self._prompts.of(self.job, request.token_ids),
        )
        self._open[request.request_id] = turn
        self.counters.started += 1
        return turn

    def close(self, turn: Turn) -> None:
        """Forget a turn; a turn that has not ended ends as aborted."""
        if not turn.ended:
            turn.end(FinishReason.ABORT)
        self._open.pop(turn.request.request_id, None)
