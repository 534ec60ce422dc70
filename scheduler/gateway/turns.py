"""Carries one turn to its end: from engine to engine until it has ended, cancelled or lost.

Every failure has an owner: a refusal the request, a broken stream the engine; an abort for lack of
slack or of a lease has none.
"""

import asyncio
import math
import re
from collections.abc import Callable, Iterable
from contextlib import aclosing

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Stale
from harvester.contracts.ids import EngineId, Epoch, JobId
from harvester.contracts.wire.rollouts import FinishReason, TokenLogprob
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_client import (
    EngineBusy,
    EngineChanged,
    EngineLost,
    EngineUnreachable,
    RequestFailed,
    RequestRefused,
)
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.fleet_member import Member
from scheduler.gateway.identity import Change
from scheduler.gateway.policy.blame import CLEARED_TOKENS, BlamePolicy, Ran
from scheduler.gateway.policy.course import FirstTokens, TurnCourse
from scheduler.gateway.policy.repeated_deaths import RepeatedDeaths
from scheduler.gateway.policy.routing_events import (
    DispatchTurn,
    JobPaused,
    Refusal,
    RefuseTurn,
    TurnCleared,
    TurnLeft,
)
from scheduler.gateway.policy.trajectories import Attempt, Turn, output_fields, reasoning_fields
from scheduler.gateway.policy.versions_events import TimePassed
from scheduler.gateway.running_attempt import Cut, RunningAttempt, suspected_as
from scheduler.gateway.settings import Timeouts
from scheduler.gateway.stream import EngineChoice
from scheduler.model import EngineKind

_WATCH_S = 0.25
_FAILED_PAUSE_S = 5.0
_REASONING_MINOR = 32
"""The first 0.x of vLLM whose generate route takes what a renderer resolved of reasoning."""
_ABORTED_PAUSE_S = 0.25
_UNFIT_S = 5.0
"""A turn that counts output looks this often for engines that may serve it."""


class TurnRunner:
    def __init__(
        self,
        fleet: EngineFleet,
        dispatcher: Dispatcher,
        clock: Clock,
        *,
        timeouts: Timeouts,
        max_attempts: int,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._clock = clock
        self._timeouts = timeouts
        self._max_attempts = max_attempts
        self._closing = False
        silences_s = (
            *(timeouts.stall_s, timeouts.guest_stall_s),
            *(timeouts.guest_tail_stall_s, timeouts.silence_s),
        )
        self._together_s = min(silences_s) / 10
        self._first_tokens = FirstTokens()
        """First-token times of dedicated engines only: a guest's gate may be closed before one."""
        self.blame = BlamePolicy()
        self.deaths = RepeatedDeaths()
        self.on_left: Callable[[Turn, Member, int], None] = lambda _turn, _member, _tokens: None
        """Called with an attempt's tokens when it has ended."""
        self.returns_partial: Callable[[Turn], bool] = lambda _turn: False
        """Whether a turn that is interrupted after its first token ends there."""
        self.on_interrupted: Callable[[Turn, str], None] = lambda _turn, _cause: None
        """Called with the cause for each turn that has tokens and loses its engine."""
        self.on_lease_refused: Callable[[Member], None] = lambda _member: None
        self._resumed = asyncio.Event()
        fleet.on_lost = self._engine_lost
        fleet.on_proved = self._engine_proved

    async def run(self, turn: Turn, on_tokens: Callable[[], None] | None) -> RefuseTurn | None:
        """Serve the turn to its end. Returns a refusal only before the first token.

        Raises RequestRefused if an engine rejects the request before any token.
        """
        wait_s = turn.request.weight_version.wait_s
        patience_s = self._timeouts.pin_s if wait_s is None else wait_s
        course = TurnCourse(pin_until_s=self._clock.now() + patience_s)
        while not turn.ended:
            if self._closing:
                turn.end(FinishReason.ABORT)
                return None
            now = self._clock.now()
            if (refused := self._given_up(turn, course, now)) is not None:
                return None if turn.token_ids else refused
            placed = await self._place(turn, course, now)
            if placed is None:
                continue
            if isinstance(placed, RefuseTurn):
                turn.fault = placed.reason
                turn.refuse()
                return None if turn.token_ids else placed
            try:
                await self._attempt(turn, placed, course, on_tokens)
            except RequestRefused as error:
                turn.fail(str(error))
                if not turn.token_ids:
                    raise
            if course.interruption and turn.token_ids and not turn.ended:
                self.on_interrupted(turn, course.interruption)
                if self.returns_partial(turn):
                    turn.fault = f"interrupted ({course.interruption}): {course.why}"
                    turn.end(FinishReason.ABORT)
        return None

    def _given_up(self, turn: Turn, course: TurnCourse, now: float) -> RefuseTurn | None:
        """Ends a turn that is not to be tried again."""
        if reason := self._quarantined(turn, now):
            turn.fail(reason)
            return RefuseTurn(turn=turn.key, refusal=Refusal.REQUEST, reason=reason)
        if turn.token_ids and turn.counts_output and self._nowhere(turn):
            turn.immovable = output_fields(turn.request.sampling_params)
            turn.fault = (
                f"its sampling counts output ({', '.join(turn.immovable)}), and no engine that is "
                "left goes on from it"
            )
            turn.end(FinishReason.ABORT)
            return RefuseTurn(turn=turn.key, refusal=Refusal.UNSERVED, reason=turn.fault)
        stuck_s = self._timeouts.stuck_s
        reason = course.given_up(max_deaths=self._max_attempts, stuck_s=stuck_s, now=now)
        if not reason:
            return None
        turn.fault = reason
        if turn.token_ids:
            turn.end(FinishReason.ABORT, lost=True)
        else:
            turn.refuse()
        return RefuseTurn(turn=turn.key, refusal=Refusal.UNSERVED, reason=reason)

    async def _place(
        self, turn: Turn, course: TurnCourse, now: float
    ) -> DispatchTurn | RefuseTurn | None:
        """The turn's placement, or None to review the turn again. `now`: the time of its review; a
        verdict that falls due after it delays the turn until the next review."""
        suspect = turn.prompt_mark if self.deaths.apart(turn.prompt_mark) else ""
        course.suspect = suspect = suspect or self._suspected(turn)
        if wait_s := self._verdict_in_s(turn, now):
            await asyncio.sleep(min(wait_s, _WATCH_S))
            return None
        avoid = self._shunned(suspect, now) | course.avoids(now=now)
        # Looked at again soon: an engine may be described by then, or another one be there.
        unfit = self._unfit(turn)
        avoid |= dict.fromkeys(unfit, now + _UNFIT_S)
        placed = await self._dispatcher.place(
            turn,
            resumed=course.resumed,
            wait=course.wait,
            suspect=suspect,
            avoid=tuple(sorted(avoid)),
            unfit=unfit,
            until_s=min(avoid.values(), default=math.inf),
            pin_until_s=course.pin_until_s,
        )
        # A request of the same content may have failed engines while this one waited.
        now = self._clock.now()
        unforeseen = self._suspected(turn) and not suspect
        held = self._quarantined(turn, now) or unforeseen or self._verdict_in_s(turn, now)
        if isinstance(placed, DispatchTurn) and held:
            self._dispatcher.observe(TurnLeft(turn=turn.key))
            return None
        return placed

    def _verdict_in_s(self, turn: Turn, now: float) -> float:
        """Time for which the turn is not placed, in s: until its verdict, or its trial."""
        verdict_in_s = self.deaths.verdict_in_s(turn.prompt_mark, now=now)
        return max(verdict_in_s, self.blame.trial_in_s(self._suspected(turn), now=now))

    def _shunned(self, suspect: str, now: float) -> dict[EngineId, float]:
        """Only while another engine is there."""
        shunned = self.blame.shunned(suspect, now=now)
        up = {engine for engine, member in self._fleet.members.items() if member.up}
        return shunned if up - shunned.keys() else {}

    def _nowhere(self, turn: Turn) -> bool:
        """Whether every engine is known and none goes on from output. Guests may come back."""
        members = self._fleet.members.values()
        known = all(member.description is not None for member in members)
        return bool(members) and known and len(self._unfit(turn)) == len(members)

    def _unfit(self, turn: Turn) -> set[EngineId]:
        """Engines that a turn whose sampling counts output must not be on.

        It is begun where it can be moved from, and without such an engine on dedicated ones, which
        are not taken back; from its first token on it goes on only where output stays output.
        """
        if not turn.counts_output:
            return set()
        members = self._fleet.members
        resuming = {engine for engine, member in members.items() if member.resumes}
        if turn.token_ids or any(members[engine].up for engine in resuming):
            return members.keys() - resuming
        return {e for e, member in members.items() if member.engine.kind is EngineKind.GUEST}

    def _suspected(self, turn: Turn) -> str:
        if self.blame.idle:
            return ""
        name = suspected_as(turn)
        return name if self.blame.suspected(name) else ""

    def _quarantined(self, turn: Turn, now: float) -> str:
        failed = "" if self.blame.idle else self.blame.quarantined(suspected_as(turn), now=now)
        return failed or self.deaths.blamed(turn.prompt_mark, now=now)

    def _engine_lost(self, member: Member, fault: str) -> None:
        engine, now, proven = member.engine.engine, self._clock.now(), member.doubted is None
        lost = member.lost()
        broke_s = min((one.broke_s for one in lost if one.broke_s is not None), default=now)
        for running in lost:
            running.course.deaths += 1
            if running.trial not in ("", running.request):
                # The suspect was the prompt; tokens from this engine clear it.
                self.blame.served(running.trial, engine)
        usual_s = self._first_tokens.usual_s
        ran = [
            Ran(one.request, broke_s - one.began_s, one.tokens, usual_first_token_s=usual_s)
            for one in lost
        ]
        self.blame.died(engine, ran, reason=fault, now=now, proven=proven)
        if lost and proven:
            self.deaths.died((one.turn.prompt_mark for one in lost), now=now)

    def _engine_proved(self, member: Member, lost: Iterable[RunningAttempt], dead: bool) -> None:
        now, marks = self._clock.now(), {one.turn.prompt_mark for one in lost}
        self.blame.proved(member.engine.engine, dead=dead, now=now)
        if dead and marks:
            self.deaths.died(marks, now=now)
        for running in lost:
            running.course.deaths -= not dead

    def close(self) -> None:
        """End every turn with its tokens so far."""
        self._closing = True
        self._dispatcher.close()
        for member in self._fleet.members.values():
            for running in tuple(member.running):
                running.cut(Cut.END)

    async def hold(self, job: JobId, *, cut: bool) -> None:
        """Waits until no turn of a paused job is on an engine, or the pause has ended. `cut`: those
        that can go on from their output leave it at once; the others are not waited for."""
        while self._dispatcher.policy.is_paused(job):
            on_engines = [
                running
                for member in self._fleet.members.values()
                for running in member.running
                if running.turn.job == job and not (cut and running.turn.immovable)
            ]
            if cut:
                for running in on_engines:
                    running.cut(Cut.PAUSE)
            if not on_engines:
                return
            over = asyncio.ensure_future(_all_over(on_engines))
            resumed = asyncio.ensure_future(self._resumed.wait())
            try:
                await asyncio.wait((over, resumed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                over.cancel()
                resumed.cancel()

    def resume(self, job: JobId) -> None:
        """Ends the job's pause. Each `hold` looks once whether it was its own."""
        self._dispatcher.observe(JobPaused(job=job, paused=False))
        # Not cleared but replaced: a `hold` that is about to wait for it must not miss it.
        self._resumed.set()
        self._resumed = asyncio.Event()

    async def watch_stalls(self) -> None:
        """Move turns off silent engines; a turn stays if no other engine has room."""
        period_s = min(_WATCH_S, self._timeouts.guest_tail_stall_s / 4)
        while True:
            due_s = self._clock.now() + period_s
            await asyncio.sleep(period_s)
            # An event loop that is late has read no engine meanwhile: that silence is its own.
            # Counted as the engines', an overload would move every turn, and so never end.
            late_s = max(0.0, self._clock.now() - due_s)
            self._dispatcher.observe(TimePassed())
            moving = 0
            for member in tuple(self._fleet.members.values()):
                for running in tuple(member.running):
                    running.excuse(late_s, now=self._clock.now())
                    moving += self._check_stall(member, running, moving)

    def _check_stall(self, member: Member, running: RunningAttempt, moving: int) -> bool:
        """Cut a stalled turn; `moving` other turns leave already and have not taken their places
        yet."""
        now, kind = self._clock.now(), member.engine.kind
        silent_s = now - running.heard_s
        tail = not self._dispatcher.policy.queued_turns
        usual_s = self._first_tokens.usual_s if kind is EngineKind.DEDICATED else 0.0
        stall_s = self._timeouts.moved_after_s(kind, tail=tail)
        stalls = silent_s > self._timeouts.silence_s
        if not stalls and silent_s > running.course.stall_after_s(
            stall_s, usual_first_token_s=usual_s
        ):
            unfit = self._unfit(running.turn)
            avoid = tuple(sorted(running.course.avoids(now=now).keys() | unfit))
            stalls = self._dispatcher.other_places(running.turn, avoid=avoid) > moving
        if stalls:
            running.cut(Cut.STALL)
        return stalls

    async def _attempt(
        self,
        turn: Turn,
        placed: DispatchTurn,
        course: TurnCourse,
        on_tokens: Callable[[], None] | None,
    ) -> None:
        """One attempt on one engine."""
        now, engine = self._clock.now(), placed.engine
        running = RunningAttempt(
            turn, began_s=now, heard_s=now, course=course, trial=self._suspected(turn)
        )
        course.interruption = ""
        there = self._fleet.members.get(engine)
        unlike = there is not None and turn.needed_numerics not in ("", there.numerics)
        paused = self._dispatcher.policy.is_paused(turn.job)
        if unlike or paused or engine in self._unfit(turn):
            # It has joined or changed since the turn began to wait, or the job was paused.
            self._dispatcher.observe(TurnLeft(turn=turn.key))
            return
        member = self._fleet.began(engine, running, placed.version)
        if member is None:
            self._dispatcher.observe(TurnLeft(turn=turn.key))
            return
        self.blame.placed(running.trial, engine)
        if course.suspect and not running.trial and not self.deaths.apart(turn.prompt_mark):
            self._dispatcher.observe(TurnCleared(turn=turn.key))
        self.deaths.began(turn.prompt_mark, engine, now=now)
        try:
            _check_request(turn, member)
            attempt = turn.begin(
                engine=engine,
                version=placed.version,
                numerics=member.numerics,
                resumes=member.resumes,
            )
            running.task = asyncio.ensure_future(self._stream(attempt, running, member, on_tokens))
            await self._outcome(turn, attempt, running, member, course)
        finally:
            if running.trial and turn.finish_reason not in (None, FinishReason.ABORT):
                self._clear(running, engine)
            self.blame.left(running.trial, engine)
            self.deaths.ended(turn.prompt_mark, engine, now=self._clock.now())
            if not running.tokens and running.why_cut is None:
                # It never ran there: a refusal or a lost call is only tried again.
                course.interruption = ""
            paused = running.why_cut is Cut.PAUSE
            course.attempted(tokens=running.tokens or paused, began_s=running.began_s)
            if running.why_cut is Cut.STALL:
                gated = member.engine.kind is EngineKind.GUEST
                course.stalled(engine, gated=gated, now=self._clock.now())
            self.on_left(turn, member, running.tokens)
            self._dispatcher.observe(
                TurnLeft(
                    turn=turn.key,
                    tokens=running.tokens,
                    seconds=self._clock.now() - running.began_s - running.paused_s,
                    stalled=running.why_cut is Cut.STALL,
                    refused_s=None if running.tokens else running.refused_s,
                )
            )
            self._fleet.ended(member, running)
            running.over.set()

    async def _outcome(
        self,
        turn: Turn,
        attempt: Attempt,
        running: RunningAttempt,
        member: Member,
        course: TurnCourse,
    ) -> None:
        assert running.task is not None
        engine, why = member.engine.engine, "aborted"
        course.interruption = Cut.ENGINE
        try:
            await running.task
            pause_s, course.interruption = _ABORTED_PAUSE_S, "abort"
            course.why = f"{engine}: aborted"
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if running.why_cut is None or (this is not None and this.cancelling()):
                running.task.cancel()
                raise
            turn.lose(attempt)
            if running.why_cut is Cut.END and not turn.ended:
                turn.end(FinishReason.ABORT)
            course.why = f"{engine}: {running.why_cut}"
            course.interruption = "" if running.why_cut is Cut.PAUSE else running.why_cut
            return
        except Stale:
            turn.lose(attempt)
            course.why = f"{engine}: another lease epoch"
            course.interruption = Cut.LEASE
            self.on_lease_refused(member)
            return
        except EngineBusy as error:
            why, pause_s = str(error), error.retry_after_s
            running.refused_s = pause_s
        except RequestFailed as error:
            why, pause_s = str(error), _FAILED_PAUSE_S
            running.broke_s = self._clock.now()
            if await self._fleet.attempt_broke(member, error, began_s=running.began_s):
                turn.lose(attempt)
                course.why = f"{engine}: {why}"
                return
            running.refused_s = pause_s
            self.blame.failed(engine, [running.request], reason=why, now=self._clock.now())
        except RequestRefused as error:
            if course.ended_short != (engine, turn.length):
                raise
            # It took the turn while that was shorter: its `length` was its context's after all.
            self._fleet.context_ended(member, turn.length)
            turn.lose(attempt)
            course.why = f"{engine}: {error}"
            return
        except EngineUnreachable as error:
            running.reached = False
            turn.lose(attempt)
            course.why = f"{engine}: {error}"
            await self._fleet.attempt_broke(member, error, began_s=running.began_s)
            return
        except EngineLost as error:
            running.broke_s = self._clock.now()
            # Another engine in its place has seen nothing of the request.
            running.reached = not isinstance(error, EngineChanged)
            if isinstance(error, EngineChanged) and error.change is Change.WEIGHTS:
                course.interruption = Cut.WEIGHTS
            turn.lose(attempt)
            course.why = f"{engine}: {error}"
            change = await self._fleet.attempt_broke(member, error, began_s=running.began_s)
            if change is Change.NONE and not running.tokens:
                # Nothing else limits the retry rate of a request that breaks every stream.
                course.avoid(engine, _ABORTED_PAUSE_S, course.why, now=self._clock.now())
            return
        if turn.ended:
            member.streak.succeed()
        turn.lose(attempt)
        if not running.tokens or running.refused_s is not None:
            course.avoid(engine, pause_s, f"{engine}: {why}", now=self._clock.now())

    async def _stream(
        self,
        attempt: Attempt,
        running: RunningAttempt,
        member: Member,
        on_tokens: Callable[[], None] | None,
    ) -> None:
        """Ends the turn with the engine's finish; without one the engine aborted it."""
        turn = running.turn
        epoch: Epoch | None = member.lease.epoch if member.lease else None
        ended = tuple(member.ended_trajectories)
        member.ended_trajectories.clear()
        if not turn.is_scored:
            turn.scores = await member.client.score(
                attempt,
                request_id=turn.request.request_id,
                epoch=epoch,
                priority=turn.request.priority,
            )
            running.hear(now=self._clock.now(), pause_s=math.inf)
        choices = member.client.generate(
            attempt,
            request_id=turn.request.request_id,
            epoch=epoch,
            priority=turn.request.priority,
            ended=ended,
            wait_s=lambda: min(running.together_s, self._together_s),
        )
        guest = member.engine.kind is EngineKind.GUEST
        pause_s = self._timeouts.guest_stall_s / 4 if guest else math.inf
        bound = member.vocabulary_tokens or math.inf
        async with aclosing(choices):
            async for choice in choices:
                running.hear(now=self._clock.now(), pause_s=pause_s)
                if choice.token_ids:
                    if not running.tokens and not guest and turn.scores is None:
                        self._first_tokens.note(running.heard_s - running.began_s)
                    running.tokens += accepted(turn, attempt, choice, bound)
                    if running.trial and running.tokens >= CLEARED_TOKENS:
                        self._clear(running, member.engine.engine)
                    if on_tokens is not None:
                        on_tokens()
                # Up to 0.30 vLLM ends the stream of an aborted request without a word where no
                # token is left to send with it.
                if choice.finish_reason == "length" and turn.remaining_tokens > 0:
                    # The engine's length, not the client's: its context is full.
                    if not member.may_end_at(turn.length):
                        # One such chunk must not shrink the context for all turns. The engine is
                        # tried again, and refuses the turn if its context is what this says.
                        running.course.ended_short = (member.engine.engine, turn.length)
                        raise EngineLost(
                            f"protocol: length at {turn.length} tokens, in a context of "
                            f"{member.context_tokens}"
                        )
                    self._fleet.context_ended(member, turn.length)
                    return
                if choice.finish_reason not in (None, "abort", "error"):
                    turn.finish(
                        attempt, choice.finish_reason, choice.stop_reason, choice.routed_experts
                    )
                    # Nothing that still comes, or does not, changes the turn.
                    await anext(choices, None)
                    return

    def _clear(self, running: RunningAttempt, engine: EngineId) -> None:
        self.blame.served(running.trial, engine)
        if not self.deaths.apart(running.turn.prompt_mark):
            self._dispatcher.observe(TurnCleared(turn=running.turn.key))
        running.trial = ""


async def _all_over(attempts: Iterable[RunningAttempt]) -> None:
    for running in attempts:
        await running.over.wait()


def accepted(
    turn: Turn, attempt: Attempt, choice: EngineChoice, vocabulary_tokens: float = math.inf
) -> int:
    """Adds a chunk's tokens; how many. Raises EngineLost where the chunk contradicts itself or the
    vocabulary: a wrong log-probability must not reach training."""
    token_ids = choice.token_ids or []
    logprobs = choice.logprobs.content if choice.logprobs else None
    if logprobs and (named := [each.token_id for each in logprobs]) != token_ids:
        raise EngineLost(f"protocol: log-probabilities of {named[:8]}, tokens {token_ids[:8]}")
    if token_ids and (max(token_ids) >= vocabulary_tokens or min(token_ids) < 0):
        raise EngineLost(f"protocol: tokens {token_ids[:8]}, a vocabulary of {vocabulary_tokens}")
    if logprobs and not turn.request.sampling_params.lists_candidates:
        # vLLM lists the sampled token among its own candidates.
        logprobs = [TokenLogprob(each.token_id, each.logprob) for each in logprobs]
    try:
        taken = turn.accept(attempt, token_ids, logprobs or (), choice.sampling_mask)
        return len(token_ids) if taken else 0
    except ValueError as error:
        raise EngineLost(f"protocol: {error}") from error


def _check_request(turn: Turn, member: Member) -> None:
    """Raises RequestRefused for fields that this engine would misread: token ids beyond its
    vocabulary (the turn may predate the engine), and, before vLLM 0.32, a grammar beside a
    reasoning parser."""
    sampling, release = turn.request.sampling_params, re.match(r"0\.(\d+)", member.release)
    fields = ", ".join(reasoning_fields(turn.request))
    if fields and sampling.structured_outputs and release and int(release[1]) < _REASONING_MINOR:
        raise RequestRefused(f"{fields}: vLLM {member.release} takes no grammar beside a parser")
    bound = member.vocabulary_tokens
    if bound is None:
        return
    largest = max(max(ids, default=0) for ids in (turn.request.token_ids, sampling.stop_token_ids))
    if largest >= bound:
        raise RequestRefused(f"token id {largest}: {member.engine.engine} knows {bound} token ids")
