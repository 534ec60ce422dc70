"""Exactly-once accounting of turns: which tokens of a turn are its output, and when it has ended.

A turn is served by one attempt after another. Each attempt goes on from the tokens accepted so far
and only the newest attempt may add to them, so that a late chunk of a lost engine changes nothing.
Holds no socket and reads no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import (
    Choice,
    FinishReason,
    GenerateRequest,
    Logprobs,
    PromptScores,
    SamplingParams,
    Span,
    TokenLogprob,
    VersionPin,
    VersionRange,
)
from scheduler.gateway.policy.attempt import (
    Attempt,
    continued_seed,
    output_fields,
    reasoning_fields,
)
from scheduler.gateway.policy.end_tokens import EndTokens
from scheduler.gateway.policy.prompts import Prompt

FINISHED = {
    each.value: each for each in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
}
"""Finish reasons by which an engine ends a turn."""
SHUTTING_DOWN = "the gateway is shutting down"
"""Fault of a turn that another gateway, or the next one, could go on with."""


@dataclass(slots=True)
class TurnCounters:
    """Totals of a ledger. `lost` and `duplicated` are zero unless something is wrong."""

    started: int = 0
    completed: int = 0
    """Ended with stop or length."""
    aborted: int = 0
    """Ended early with partial output: cancelled, cut for good, or shut down."""
    refused: int = 0
    """Found no engine that may serve them, before their first token."""
    lost: int = 0
    """Ended because no engine finished it within the bounded number of attempts, or in time."""
    failed: int = 0
    """Ended because of the request itself: an engine refused it, or two engines failed under it."""
    duplicated: int = 0
    """A second end for a turn that had ended: refused, and counted."""
    undelivered: int = 0
    """Turns whose reply could not be made from their tokens: no renderer was there in time."""
    repeated: int = 0
    """Answers given again to a client that sent its request again."""
    migrated: int = 0
    """Attempts that went on elsewhere with tokens already accepted."""
    retried: int = 0
    """Attempts after the first, migrated ones included."""
    late_chunks: int = 0
    """Chunks of attempts that were no longer the newest: dropped."""
    output_tokens: int = 0


def turn_key(job: JobId, request_id: str) -> str:
    return f"{job}/{request_id}"


@dataclass(slots=True, kw_only=True)
class Turn:
    """One generate call of a trajectory. `request` is as the job sent it."""

    request: GenerateRequest
    job: JobId
    trajectory: TrajectoryId
    counters: TurnCounters
    pin: VersionPin = field(default_factory=VersionPin)
    """The request's pin as resolved at the turn's arrival."""
    is_streamed: bool = False
    """Whether a client reads its tokens as they come."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: PromptScores | None = None
    """The prompt's, by the engine of the first token."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    fault: str = ""
    """Why it ended early, where its job did not request that."""
    routed_experts: str | None = None
    """The engine's array, where one attempt made the whole turn."""
    immovable: tuple[str, ...] = ()
    """Fields for which it cannot leave the engine of its newest attempt with its output."""
    attempts: int = 0
    end_tokens: EndTokens = field(default_factory=EndTokens)
    """EOS tokens of the job's model learned so far, shared by its turns."""
    prompt: Prompt
    _content: str = ""
    _sampling_mask: list[tuple[int, ...]] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    _open: Attempt | None = None
    _open_from: int = 0
    _numerics: str = ""
    _outcome: str = ""

    @property
    def key(self) -> str:
        """Unique over all jobs."""
        return turn_key(self.job, self.request.request_id)

    @property
    def prompt_mark(self) -> str:
        """Name of its prompt in its job, equal for the samples of a group: under it the deaths of
        engines are counted.

        All ids are hashed: 3 us for 512, 0.2 ms for 32,768. It and `content` include the job, so
        that a verdict on one tenant's prompt neither refuses nor reveals another's.
        """
        return self.prompt.name

    @property
    def content(self) -> str:
        """Digest of job, prompt and sampling without the seed: equal for samples of one group."""
        if not self._content:
            sampling = msgspec.structs.replace(self.request.sampling_params, seed=None)
            self._content = xxhash.xxh3_128_hexdigest(f"{self.prompt_mark} {sampling!r}".encode())
        return self._content

    @property
    def remaining_tokens(self) -> int:
        return self.request.sampling_params.max_tokens - len(self.token_ids)

    @property
    def length(self) -> int:
        """Length of prompt and output so far, in tokens."""
        return len(self.request.token_ids) + len(self.token_ids)

    @property
    def counts_output(self) -> bool:
        return bool(output_fields(self.request.sampling_params))

    @property
    def is_scored(self) -> bool:
        """Whether the prompt's scores are known or were not requested."""
        return self.scores is not None or not self.request.sampling_params.scores_prompt

    @property
    def needed_numerics(self) -> str:
        """Numerics label that the next token's engine must have; empty: any."""
        required = self.request.equal_numerics
        if isinstance(required, str):
            return required
        return self.spans_now()[0].numerics if required and self.token_ids else ""

    @property
    def outcome(self) -> str:
        """`finish_reason`, or the more specific `lost`, `failed` or `refused`."""
        return self._outcome or (self.finish_reason.value if self.finish_reason else "open")

    @property
    def masked_ids(self) -> int:
        """Token ids in the sampling masks of its tokens."""
        return sum(map(len, self._sampling_mask))

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def begin(
        self, *, engine: EngineId, version: WeightVersion, numerics: str, resumes: bool = False
    ) -> Attempt:
        """Open the next attempt; the one before, if any, is closed.

        `resumes`: the engine goes on from output as from its own; others get it as prompt.
        """
        if self.ended:
            raise ValueError(f"turn {self.request.request_id} has ended")
        self._close_span()
        offset = len(self.token_ids)
        if self.attempts:
            self.counters.retried += 1
            self.counters.migrated += offset > 0
        self.attempts += 1
        self.immovable = () if resumes else output_fields(self.request.sampling_params)
        output = tuple(self.token_ids)
        self._open = Attempt(
            number=self.attempts,
            job=self.job,
            trajectory=self.trajectory,
            engine=engine,
            version=version,
            token_ids=self.request.token_ids + (() if resumes else output),
            sampling_params=self.sampling_left(resumes=resumes),
            cache_salt=self.request.cache_salt,
            reasoning=reasoning_fields(self.request),
            emitted=output if resumes else (),
            prompt=self.prompt,
        )
        self._open_from = offset
        self._numerics = numerics
        if not offset:
            self.scores = None
        return self._open

    def sampling_left(self, *, resumes: bool = False) -> SamplingParams:
        """Sampling of the rest. The output so far stays output if the engine `resumes`."""
        given, offset = self.request.sampling_params, len(self.token_ids)
        sampling = msgspec.structs.replace(given, n=1, seed=continued_seed(given.seed, offset))
        if resumes:
            return sampling
        return msgspec.structs.replace(
            sampling,
            max_tokens=given.max_tokens - offset,
            min_tokens=max(0, given.min_tokens - offset),
        )

    def accept(
        self,
        attempt: Attempt,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        sampling_mask: Sequence[tuple[int, ...]] | None = None,
    ) -> bool:
        """Append a chunk. False, and nothing changes, if the attempt is not the newest."""
        if attempt is not self._open:
            self.counters.late_chunks += 1
            return False
        room = self.remaining_tokens
        if len(token_ids) != len(logprobs) or len(token_ids) > room:
            raise ValueError(f"{len(token_ids)} tokens, {len(logprobs)} log-probs, room for {room}")
        if sampling_mask and len(sampling_mask) != len(token_ids):
            raise ValueError(f"{len(sampling_mask)} sampling masks, {len(token_ids)} tokens")
        if sampling_mask and len(self._sampling_mask) == len(self.token_ids):
            self._sampling_mask += sampling_mask
        self.token_ids += token_ids
        self.logprobs += logprobs
        return True

    def finish(
        self,
        attempt: Attempt,
        reported: str,
        stop_reason: int | str | None = None,
        routed_experts: str | None = None,
    ) -> None:
        """Ends the attempt as the engine reports: final, whatever happens to its stream.

        `reported`: one of `FINISHED`.
        """
        if attempt is not self._open:
            return
        self.stop_reason = stop_reason
        self.routed_experts = None if self._open_from else routed_experts
        by_string = isinstance(stop_reason, str)
        if reported == "stop" and self.token_ids and not by_string and not self._at_stop_token():
            # Neither a string nor a stop token of the request: an EOS of the model.
            self.end_tokens.note(self.token_ids[-1], attempt.engine)
        self.end(FINISHED[reported])

    def lose(self, attempt: Attempt) -> None:
        """The attempt's engine is gone or has been asked to stop.

        A turn whose last token already ended it counts as ended, though no engine reported it.
        """
        if attempt is not self._open:
            return
        grew = self._open_from < len(self.token_ids)
        self._close_span()
        if grew and self._at_end():
            self.end(FinishReason.STOP)
        elif self.remaining_tokens <= 0:
            self.end(FinishReason.LENGTH)

    def _at_end(self) -> bool:
        given = self.request.sampling_params
        if len(self.token_ids) < given.min_tokens:
            return False
        eos = not given.ignore_eos and self.token_ids[-1] in self.end_tokens.known
        return eos or self._at_stop_token()

    def _at_stop_token(self) -> bool:
        return self.token_ids[-1] in self.request.sampling_params.stop_token_ids

    def end(self, reason: FinishReason, *, lost: bool = False) -> bool:
        """End the turn. False, counted as duplicated, if it had ended already."""
        if self.ended:
            self.counters.duplicated += 1
            return False
        self._end_as(reason, "lost" if lost else "")
        return True

    def fail(self, fault: str) -> None:
        """End a turn whose request is at fault, with the tokens that it has."""
        if not self.ended:
            self.fault = fault
            self._end_as(FinishReason.ABORT, "failed")

    def refuse(self) -> None:
        """End a turn that no engine may serve: aborted with its tokens, refused if it has none."""
        if self.token_ids or self.ended:
            self.end(FinishReason.ABORT)
        else:
            self._end_as(FinishReason.ABORT, "refused")

    def _end_as(self, reason: FinishReason, outcome: str) -> None:
        """`outcome`: where it is more specific than the reason."""
        self._close_span()
        self.finish_reason, self._outcome = reason, outcome
        counted = outcome or ("aborted" if reason is FinishReason.ABORT else "completed")
        setattr(self.counters, counted, getattr(self.counters, counted) + 1)
        self.counters.output_tokens += len(self.token_ids)

    def choice(self, *, start: int = 0) -> Choice:
        """Tokens from `start` on, with all closed spans that end after `start`."""
        spans, masked = self.spans_now(), self._sampling_mask
        all_masked = masked and len(masked) == len(self.token_ids)
        return Choice(
            token_ids=tuple(self.token_ids[start:]),
            logprobs=Logprobs(content=tuple(self.logprobs[start:])),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            spans=tuple(span for span in spans if span.end > start),
            fault=self.fault,
            weight_versions=_version_ranges(spans) if self.ended else None,
            immovable=self.immovable,
            routed_experts=self.routed_experts,
            sampling_mask=tuple(masked[start:]) if all_masked else None,
        )

    def spans_now(self) -> list[Span]:
        """Spans of all tokens so far, also of the open attempt."""
        opened = self._open_span()
        return [*self._spans, opened] if opened else self._spans

    def _open_span(self) -> Span | None:
        if self._open is None or self._open_from == len(self.token_ids):
            return None
        return Span(
            start=self._open_from,
            end=len(self.token_ids),
            version=self._open.version,
            engine=self._open.engine,
            numerics=self._numerics,
        )

    def _close_span(self) -> None:
        span = self._open_span()
        self._open = None
        if span is None:
            return
        if self._spans:
            longer = msgspec.structs.replace(self._spans[-1], end=span.end)
            if longer == msgspec.structs.replace(span, start=longer.start):
                self._spans[-1] = longer
                return
        self._spans.append(span)


def _version_ranges(spans: Sequence[Span]) -> tuple[VersionRange, ...]:
    """Joins adjacent spans of one version, whichever engines made them."""
    ranges: list[VersionRange] = []
    for span in spans:
        start, version = span.start, str(span.version)
        if ranges and ranges[-1].version == version:
            start = ranges.pop().start
        ranges.append(VersionRange(version=version, start=start, end=span.end))
    return tuple(ranges)
