"""One turn as the gateway serves it: requested once, joined again after a broken connection.

The client's tokens are the turn. Where the gateway's own turn does not begin with them (it was
restarted, or a dedicated engine has made some meanwhile), the rest is requested as a new turn whose
prompt ends with them. Holds no socket.
"""

from collections.abc import Callable, Sequence

import msgspec
import xxhash

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.wire.rollouts import FinishReason, GenerateRequest, Span
from harvester.platform.backoff import Interrupted
from scheduler.gateway.engines.engine_output import check_tokens
from scheduler.gateway.engines.stream import EngineChoice, EngineChunk
from scheduler.gateway.policy.attempt import Attempt
from scheduler.gateway.policy.turn import SHUTTING_DOWN, Turn
from scheduler.gateway.requests import MAX_ID_CHARS

_ANOTHER = -1


class GatewayTurn:
    def __init__(self, turn: Turn, body: bytes) -> None:
        """`body`: of the turn's request, as it is sent."""
        self._turn, self._request, self.body = turn, turn.request, body
        self._base = 0
        """Tokens of the turn that are prompt in the request."""
        self._known = 0
        """Tokens of the turn that the gateway has made or been given; `_ANOTHER`: its turn is
        another one."""
        self._parts = self._seen = 0
        """`_seen`: tokens of this reply."""
        self._open: tuple[Span, Attempt] | None = None

    @property
    def request_id(self) -> str:
        """The latest request's."""
        return self._request.request_id

    @property
    def whole(self) -> bool:
        """Whether the gateway's turn holds every token that this client has."""
        return self._known == len(self._turn.token_ids)

    @property
    def movable(self) -> bool:
        """Whether the gateway can go on from the tokens: it takes foreign tokens as prompt."""
        return self.whole or not self._turn.counts_output

    def request(self) -> GenerateRequest:
        """The request to send: the same again while the gateway may have the turn."""
        turn, self._seen, self._open = self._turn, 0, None
        if not self.whole:
            self._base = self._known = len(turn.token_ids)
            self._parts += 1
            self._request = msgspec.structs.replace(
                self._request,
                request_id=_rest_id(turn.request.request_id, self._parts),
                token_ids=turn.request.token_ids + tuple(turn.token_ids),
                sampling_params=turn.sampling_left(),
                # The numerics of the tokens that are here, not of the rest's own first token.
                equal_numerics=turn.needed_numerics or turn.request.equal_numerics,
            )
            self.body = msgspec.json.encode(self._request)
        return self._request

    def fold(self, chunk: EngineChunk, on_tokens: Callable[[], None]) -> None:
        """Adds a part of the reply. Raises Interrupted where the gateway's turn is another one, or
        ends with the gateway; PeerProtocolError."""
        if fault := chunk.fault:
            raise Interrupted(f"the gateway: {fault}")
        try:
            for choice in chunk.choices:
                self._accept(choice)
                if choice.token_ids:
                    on_tokens()
                if choice.finish_reason is not None:
                    self._end(choice, FinishReason(choice.finish_reason))
        except ValueError as error:
            raise PeerProtocolError(f"the gateway's reply: {error}") from error

    def _accept(self, choice: EngineChoice) -> None:
        turn, tokens = self._turn, choice.token_ids or []
        logprobs = (choice.logprobs and choice.logprobs.content) or []
        masked, at = choice.sampling_mask or [], self._base + self._seen
        again = min(len(tokens), len(turn.token_ids) - at)
        if turn.token_ids[at : at + again] != tokens[:again] or self._begun_anew(choice.spans):
            self._differ()
        check_tokens(tokens, logprobs)
        for span in choice.spans:
            # The last part has all spans of the turn: earlier ones end before its tokens.
            end = max(0, span.end - self._seen)
            new = slice(max(span.start - self._seen, again), end)
            if tokens[new]:
                if at + new.start != len(turn.token_ids):
                    raise ValueError("its spans overlap or leave out tokens")
                turn.accept(self._attempt(span), tokens[new], logprobs[new], masked[new])
        self._seen += len(tokens)
        if self._base + self._seen > len(turn.token_ids):
            raise ValueError("no span covers its last tokens")
        self._known, turn.immovable = len(turn.token_ids), choice.immovable

    def _begun_anew(self, spans: Sequence[Span]) -> bool:
        """Whether other engines or versions made tokens that the client has, as greedy ones may be
        alike on all."""
        known = [] if self._open else self._turn.spans_now()
        return any(
            mine.start < self._base + span.end
            and self._base + span.start < mine.end
            and _origin(mine) != _origin(span)
            for mine in known
            for span in spans
        )

    def _attempt(self, span: Span) -> Attempt:
        """An attempt for each engine and version in the reply, which becomes a span again."""
        origin = _origin(span)
        if self._open is None or self._open[0] != origin:
            attempt = self._turn.begin(
                engine=span.engine, version=span.version, numerics=span.numerics
            )
            self._open = origin, attempt
        return self._open[1]

    def _end(self, choice: EngineChoice, reason: FinishReason) -> None:
        turn = self._turn
        if self._base + self._seen < len(turn.token_ids):
            self._differ()
        if reason is FinishReason.ABORT and choice.fault == SHUTTING_DOWN:
            raise Interrupted(choice.fault)
        turn.fault, turn.stop_reason = choice.fault, choice.stop_reason
        turn.routed_experts = None if self._base else choice.routed_experts
        turn.end(reason)

    def _differ(self) -> None:
        """The gateway sampled again: the client's tokens are the turn, and the gateway's may
        end."""
        self._known = _ANOTHER
        raise Interrupted("the gateway's turn does not begin with the client's tokens")


def _origin(span: Span) -> Span:
    return msgspec.structs.replace(span, start=0, end=0)


def _rest_id(request_id: str, part: int) -> str:
    """Id of the request for the rest of a turn; of a long one's, a digest stands for it."""
    found = f"{request_id}.rest{part}"
    if len(found) <= MAX_ID_CHARS:
        return found
    return f"{xxhash.xxh3_128_hexdigest(request_id.encode())}.rest{part}"
