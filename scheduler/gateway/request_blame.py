"""Blame of requests for deaths of engines: both policies of it, in terms of attempts."""

from collections.abc import Iterable, Sequence

from harvester.contracts.ids import EngineId
from scheduler.gateway.policy.blame import CLEARED_TOKENS, BlamePolicy, RequestOnEngine
from scheduler.gateway.policy.course import FirstTokens
from scheduler.gateway.policy.repeated_deaths import RepeatedDeaths
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.running_attempt import RunningAttempt, suspected_as


class RequestBlame:
    """`policy` convicts a request under which two engines failed, the second in its first step
    there; `deaths` convicts a prompt with which more engines died than chance explains."""

    def __init__(self) -> None:
        self.policy = BlamePolicy()
        self.deaths = RepeatedDeaths()
        self.first_tokens = FirstTokens()
        """First-token times of dedicated engines only: a guest's gate may be closed before one."""

    def suspected(self, turn: Turn, now: float) -> str:
        """The request's name while it is suspected; "" above suspicion."""
        if self.policy.idle:
            return ""
        name = suspected_as(turn)
        return name if self.policy.suspected(name, now=now) else ""

    def tried_apart(self, turn: Turn, now: float) -> str:
        """Name under which no two turns are tried at once, nor two names on one engine; "" for a
        turn that is placed like any other."""
        apart = self.deaths.apart(turn.prompt_mark)
        return turn.prompt_mark if apart else self.suspected(turn, now)

    def quarantined(self, turn: Turn, now: float) -> str:
        """The reason; "" while it may be tried."""
        failed = "" if self.policy.idle else self.policy.quarantined(suspected_as(turn), now=now)
        return failed or self.deaths.blamed(turn.prompt_mark, now=now)

    def verdict_in_s(self, turn: Turn, now: float) -> float:
        """Time for which the turn is not placed, in s: until its verdict, or its trial."""
        verdict_in_s = self.deaths.verdict_in_s(turn.prompt_mark, now=now)
        return max(verdict_in_s, self.policy.trial_in_s(self.suspected(turn, now), now=now))

    def began(self, running: RunningAttempt, engine: EngineId, now: float) -> None:
        self.policy.placed(running.trial, engine)
        self.deaths.began(running.turn.prompt_mark, engine, now=now)

    def made_tokens(self, running: RunningAttempt, engine: EngineId) -> bool:
        """Whether they end its trial."""
        return running.tokens >= CLEARED_TOKENS and self.served(running, engine)

    def served(self, running: RunningAttempt, engine: EngineId) -> bool:
        """Ends its trial in its favour. Returns whether it may be placed like any other turn."""
        if not running.trial:
            return False
        self.policy.served(running.trial, engine)
        running.trial = ""
        return not self.deaths.apart(running.turn.prompt_mark)

    def failed(self, running: RunningAttempt, engine: EngineId, reason: str, now: float) -> None:
        self.policy.failed(engine, [running.request], reason=reason, now=now)

    def left(self, running: RunningAttempt, engine: EngineId, now: float) -> None:
        self.policy.left(running.trial, engine)
        self.deaths.ended(running.turn.prompt_mark, engine, now=now)

    def died(
        self,
        engine: EngineId,
        lost: Sequence[RunningAttempt],
        reason: str,
        *,
        proven: bool,
        now: float,
    ) -> None:
        """`lost`: what the engine had. `proven`: it is known to have died, and is not just
        silent."""
        broke_s = min((one.broke_s for one in lost if one.broke_s is not None), default=now)
        for running in lost:
            running.course.deaths += 1
            if running.trial not in ("", running.request):
                # The suspect was the prompt; tokens from this engine clear it.
                self.policy.served(running.trial, engine)
        ran = [
            RequestOnEngine(
                one.request,
                broke_s - one.began_s,
                one.tokens,
                usual_first_token_s=self.first_tokens.usual_s,
            )
            for one in lost
        ]
        self.policy.died(engine, ran, reason=reason, now=now, proven=proven)
        if lost and proven:
            self.deaths.died((one.turn.prompt_mark for one in lost), now=now)

    def proved(
        self, engine: EngineId, lost: Iterable[RunningAttempt], *, dead: bool, now: float
    ) -> None:
        """Records whether the silent engine has died."""
        marks = {one.turn.prompt_mark for one in lost}
        self.policy.proved(engine, dead=dead, now=now)
        if dead and marks:
            self.deaths.died(marks, now=now)
        for running in lost:
            running.course.deaths -= not dead
