"""One attempt of a turn on one engine: its stream, and what its end means for turn and engine.

Every failure has an owner: a refusal the request, a broken stream the engine; an abort for lack of
slack or of a lease has none.
"""

import asyncio
import math
import re
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Stale
from harvester.contracts.ids import Epoch
from harvester.contracts.wire.rollouts import FinishReason
from scheduler.gateway.dispatch import Dispatcher, context_tokens
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.engine_probing import EngineProbing
from scheduler.gateway.engines.engine_faults import (
    EngineBusy,
    EngineChanged,
    EngineLost,
    EngineUnreachable,
    RequestFailed,
    RequestRefused,
    names_context,
)
from scheduler.gateway.engines.engine_output import accepted, check_finish
from scheduler.gateway.engines.identity import Change
from scheduler.gateway.fleet_member import FleetMember, unfit_for
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.policy.attempt import Attempt, reasoning_fields
from scheduler.gateway.policy.course import TurnCourse
from scheduler.gateway.policy.routing_events import DispatchTurn, TurnCleared, TurnLeft
from scheduler.gateway.policy.turn import FINISHED, Turn
from scheduler.gateway.request_blame import RequestBlame
from scheduler.gateway.running_attempt import CutReason, RunningAttempt
from scheduler.gateway.settings import Timeouts
from scheduler.model import EngineKind

_FAILED_PAUSE_S = 5.0
_REASONING_MINOR = 32
"""First 0.x release of vLLM whose generate route accepts a renderer's reasoning fields."""
_ABORTED_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class AttemptRunner:
    _fleet: EngineFleet
    _probing: EngineProbing
    _dispatcher: Dispatcher
    _blame: RequestBlame
    _metrics: GatewayMetrics
    _clock: Clock
    _timeouts: Timeouts
    _on_lease_refused: Callable[[FleetMember], None]
    _together_s: float

    async def run(
        self,
        turn: Turn,
        placed: DispatchTurn,
        course: TurnCourse,
        on_tokens: Callable[[], None] | None,
    ) -> None:
        """One attempt on one engine."""
        now, engine = self._clock.now(), placed.engine
        running = RunningAttempt(
            turn, began_s=now, chunk_at_s=now, course=course, trial=self._blame.suspected(turn, now)
        )
        course.interruption = ""
        there = self._fleet.members.get(engine)
        unlike = there is not None and turn.needed_numerics not in ("", there.numerics)
        paused = self._dispatcher.policy.is_paused(turn.job)
        unfit = unlike or paused or engine in unfit_for(turn, self._fleet.members)
        member = None if unfit else self._fleet.began(engine, running, placed.version)
        if member is None:
            # The engine left, joined or changed while the turn waited, or the job was paused.
            self._dispatcher.observe(TurnLeft(turn=turn.key))
            return
        self._blame.began(running, engine, now)
        self._cleared(turn, bool(course.suspect) and not self._blame.tried_apart(turn, now))
        try:
            _check_request(turn, member)
            attempt = turn.begin(
                engine=engine,
                version=placed.version,
                numerics=member.numerics,
                resumes=member.resumes,
            )
            running.task = asyncio.ensure_future(self._stream(attempt, running, member, on_tokens))
            await self._outcome(running, attempt, member)
        finally:
            if turn.finish_reason not in (None, FinishReason.ABORT):
                self._cleared(turn, self._blame.served(running, engine))
            self._blame.left(running, engine, self._clock.now())
            if not running.tokens and running.why_cut is None:
                # The turn never ran there: a refusal or a lost call is simply retried.
                course.interruption = ""
            paused = running.why_cut is CutReason.PAUSE
            course.attempted(tokens=running.tokens or paused, began_s=running.began_s)
            if running.why_cut is CutReason.STALL:
                gated = member.engine.kind is EngineKind.GUEST
                course.stalled(engine, gated=gated, now=self._clock.now())
            self._metrics.attempt_ended(turn, member.engine, running.tokens)
            self._dispatcher.observe(
                TurnLeft(
                    turn=turn.key,
                    tokens=running.tokens,
                    seconds=self._clock.now() - running.began_s - running.paused_s,
                    stalled=running.why_cut is CutReason.STALL,
                    refused_s=None if running.tokens else running.refused_s,
                )
            )
            self._fleet.ended(member, running)
            running.over.set()
            # The task's error refers back to here, by the frames that it passed.
            running.task = None

    async def _outcome(
        self, running: RunningAttempt, attempt: Attempt, member: FleetMember
    ) -> None:
        """Waits for the end of its stream, and takes it in. Raises RequestRefused where no other
        engine may take the request."""
        assert running.task is not None
        turn, course, engine = running.turn, running.course, member.engine.engine
        course.interruption, pause_s = CutReason.ENGINE, None
        try:
            await running.task
            why, pause_s, course.interruption = "aborted", _ABORTED_PAUSE_S, "abort"
            if turn.ended:
                member.streak.succeed()
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if running.why_cut is None or (this is not None and this.cancelling()):
                running.task.cancel()
                raise
            why = running.why_cut.value
            course.interruption = "" if running.why_cut is CutReason.PAUSE else why
            turn.lose(attempt)
            if running.why_cut is CutReason.END and not turn.ended:
                turn.end(FinishReason.ABORT)
        except Stale:
            why, course.interruption = "another lease epoch", CutReason.LEASE
            self._on_lease_refused(member)
        except EngineBusy as error:
            why, pause_s = str(error), error.retry_after_s
            running.refused_s = pause_s
        except RequestFailed as error:
            why, pause_s = str(error), await self._failed(running, member, error)
        except RequestRefused as error:
            why = str(error)
            if not self._is_short(running, member, error):
                raise
        except EngineLost as error:
            turn.lose(attempt)  # A turn that has ended is not to blame for the engine's loss.
            why, pause_s = str(error), await self._lost(running, member, error)
        turn.lose(attempt)
        course.why = f"{engine}: {why}"
        if pause_s is not None and (not running.tokens or running.refused_s is not None):
            course.avoid(engine, pause_s, course.why, now=self._clock.now())

    async def _failed(
        self, running: RunningAttempt, member: FleetMember, error: RequestFailed
    ) -> float | None:
        """Blames the request, unless its engine is another one or lost. Returns the time for which
        the turn avoids the engine, in s."""
        running.broke_s = self._clock.now()
        if await self._probing.attempt_broke(member, error, began_s=running.began_s):
            return None
        running.refused_s = _FAILED_PAUSE_S
        self._blame.failed(running, member.engine.engine, str(error), self._clock.now())
        return _FAILED_PAUSE_S

    def _is_short(
        self, running: RunningAttempt, member: FleetMember, error: RequestRefused
    ) -> bool:
        """Whether the engine refused the turn for its own context, which is noted, and another
        engine may take it."""
        turn, course, engine = running.turn, running.course, member.engine.engine
        if course.ended_short == (engine, turn.length):
            # The engine took the turn while the turn was shorter: `length` was the context's end
            # after all.
            self._fleet.context_ended(member, turn.length)
            return True
        course.too_short.add(engine)
        return _is_too_long(turn, error) and self._fits_elsewhere(turn, course)

    async def _lost(
        self, running: RunningAttempt, member: FleetMember, error: EngineLost
    ) -> float | None:
        """Returns the time for which the turn avoids the engine, in s: nothing else limits the
        retry rate of a request that breaks every stream."""
        # Another engine in its place has seen nothing of the request.
        running.reached = not isinstance(error, EngineUnreachable | EngineChanged)
        if not isinstance(error, EngineUnreachable):
            running.broke_s = self._clock.now()
        if isinstance(error, EngineChanged) and error.change is Change.WEIGHTS:
            running.course.interruption = CutReason.WEIGHTS
        change = await self._probing.attempt_broke(member, error, began_s=running.began_s)
        lives = change is Change.NONE and not isinstance(error, EngineUnreachable)
        return _ABORTED_PAUSE_S if lives and not running.tokens else None

    async def _stream(
        self,
        attempt: Attempt,
        running: RunningAttempt,
        member: FleetMember,
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
                check_finish(choice, tokens_before=running.tokens)
                if choice.token_ids:
                    # Chunks without a token, however many, are silence.
                    running.hear(now=self._clock.now(), pause_s=pause_s)
                    if not running.tokens and not guest and turn.scores is None:
                        self._blame.first_tokens.note(running.chunk_at_s - running.began_s)
                    running.tokens += accepted(turn, attempt, choice, bound)
                    member.held_tokens = max(member.held_tokens, turn.length)
                    if running.course.too_short:
                        self._prove_short(turn, running.course)
                    self._cleared(turn, self._blame.made_tokens(running, member.engine.engine))
                    if on_tokens is not None:
                        on_tokens()
                # Up to 0.30 vLLM ends the stream of an aborted request without a word where no
                # token is left to send with it.
                if choice.finish_reason == "length" and turn.remaining_tokens > 0:
                    # The engine's length, not the client's: its context is full.
                    if not member.may_end_at(turn.length):
                        # One such chunk must not shrink the context for all turns. The engine is
                        # tried again, and refuses the turn if its context has this length.
                        running.course.ended_short = (member.engine.engine, turn.length)
                        raise EngineLost(
                            f"protocol: length at {turn.length} tokens, in a context of "
                            f"{member.context_tokens}"
                        )
                    self._fleet.context_ended(member, turn.length)
                    return
                if choice.finish_reason in FINISHED:
                    turn.finish(
                        attempt, choice.finish_reason, choice.stop_reason, choice.routed_experts
                    )
                    # Later chunks, or their absence, change nothing about the turn.
                    await anext(choices, None)
                    return

    def _fits_elsewhere(self, turn: Turn, course: TurnCourse) -> bool:
        """Whether another engine's reported context holds the turn. A turn with tokens may wait
        for an engine that is down."""
        tokens, members = context_tokens(turn.request), self._fleet.members
        return any(
            (member.up or turn.token_ids) and tokens <= (member.context_tokens or tokens)
            for engine, member in members.items()
            if engine not in unfit_for(turn, members) | course.too_short
        )

    def _prove_short(self, turn: Turn, course: TurnCourse) -> None:
        """Bounds the contexts of engines that refused the turn as too long, since another engine
        serves it. A refusal alone proves nothing: its words may be the request's own. An engine
        that has held a turn of this length keeps its context."""
        tokens = context_tokens(turn.request)
        for engine in course.too_short & self._fleet.members.keys():
            if (member := self._fleet.members[engine]).held_tokens < tokens:
                self._fleet.context_ended(member, tokens - 1)
        course.too_short.clear()

    def _cleared(self, turn: Turn, is_cleared: bool) -> None:
        if is_cleared:
            self._dispatcher.observe(TurnCleared(turn=turn.key))


def _is_too_long(turn: Turn, refused: RequestRefused) -> bool:
    """Whether the refusal names a context, in words that are not the request's own."""
    fields = msgspec.json.encode(msgspec.structs.replace(turn.request, token_ids=())).decode()
    return names_context(str(refused)) and not names_context(fields)


def _check_request(turn: Turn, member: FleetMember) -> None:
    """Raises RequestRefused for fields that this engine would misread: token ids beyond its
    vocabulary (the turn may predate the engine), and, before vLLM 0.32, a grammar beside a
    reasoning parser."""
    sampling, release = turn.request.sampling_params, re.match(r"0\.(\d+)", member.vllm_version)
    fields = ", ".join(reasoning_fields(turn.request))
    if fields and sampling.structured_outputs and release and int(release[1]) < _REASONING_MINOR:
        version = member.vllm_version
        raise RequestRefused(f"{fields}: vLLM {version} takes no grammar beside a parser")
    bound = member.vocabulary_tokens
    if bound is None:
        return
    largest = max((turn.prompt.largest_id, *sampling.stop_token_ids))
    if largest >= bound:
        raise RequestRefused(f"token id {largest}: {member.engine.engine} knows {bound} token ids")
