"""A request of one of OpenAI's dialects: the part for the renderer, and the gateway's own part."""

import secrets
from collections.abc import Sequence

import msgspec

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import JobId
from harvester.contracts.wire.rollouts import Choice, FinishReason, GenerateRequest, TokenLogprob
from scheduler.gateway.dialects.session_names import session_of
from scheduler.gateway.dialects.stopped_text import (
    StoppedText,
    StoppedTexts,
    text_tokens,
    without_stop,
)
from scheduler.gateway.dialects.text_dialect import Body, Dialect
from scheduler.gateway.dialects.text_fields import (
    MEDIA_SETTINGS,
    OWN_FIELDS,
    PIN_FIELDS,
    check_fields,
    check_media,
    given,
)
from scheduler.gateway.dialects.text_logprobs import name_by_id, renderer_logprob

_ENCODER = msgspec.json.Encoder()
_RENDERER_FIELDS = ("skip_clone", "output_kind", "output_text_buffer_length")
"""Sampling fields of a rendered request that mean something within vLLM only."""
_RENDERED_DEFAULTS = {"logprobs": None, "max_tokens": 16}
"""vLLM leaves out of a rendered request what equals its own default; these are not ours."""
_NAME_CHARS = 128
"""The part of a request's id that its turns' names have: proxies set long ones."""
_MAX_NAME_CHARS = 1 << 13
"""The length of the largest header: every chunk of the reply repeats the id."""
_OVER = Choice(finish_reason=FinishReason.LENGTH)


class TextRequest:
    """A request of one of OpenAI's dialects: the part for the renderer, and the gateway's own
    part."""

    def __init__(self, dialect: Dialect, job: JobId, body: Body, named: str | None = None) -> None:
        """`named`: the id that the client gives the request, unique or not; as vLLM's, it is part
        of the reply's id."""
        prefix = "cmpl" if dialect.many else "chatcmpl"
        unique, named = secrets.token_hex(16), named or body.get("request_id")
        self.dialect = dialect
        if len(str(named or "")) > _MAX_NAME_CHARS:
            raise PeerProtocolError(f"request_id: use at most {_MAX_NAME_CHARS} characters")
        # A reply cannot hold header bytes that are not UTF-8.
        self.name = f"{prefix}-{named or unique}".encode(errors="replace").decode()
        shown = "".join(filter(str.isprintable, self.name[:_NAME_CHARS]))
        self.turn_name = f"{shown}-{unique}" if named else self.name
        self.model = body.get("model") or job
        self.session = session_of(body)
        self.stream = bool(body.get("stream"))
        self.stream_options = body.get("stream_options")
        self.returns_ids = bool(body.get("return_token_ids"))
        self._own = given(body, PIN_FIELDS) | {"stream": False, "stream_options": None}
        self._own |= {name: body.get(name) for name in ("model", "cache_salt", "on_interrupt")}
        self._names_tool = isinstance(body.get("tool_choice"), dict)
        self.tokens_as_ids = bool(body.get("return_tokens_as_token_ids"))
        self.echoes = bool(body.get("echo"))
        self.generates = body.get("max_tokens") != 0
        """Whether an `echo` is followed by what was sampled; the prompt alone is scored without."""
        self._check(body)
        not_rendered = OWN_FIELDS | MEDIA_SETTINGS
        self.to_render = {name: value for name, value in body.items() if name not in not_rendered}

    def _check(self, body: Body) -> None:
        """Raises PeerProtocolError for what vLLM's renderer would ignore, or fetch for nothing."""
        check_fields(body, self.dialect.fields)
        check_media(body)
        if self.echoes and (self.stream or not self.dialect.many):
            raise PeerProtocolError("echo: only for completions without stream")
        if self.stream and body.get("prompt_logprobs") is not None:
            raise PeerProtocolError("prompt_logprobs: without stream, as in vLLM")
        if body.get("best_of") not in (None, body.get("n") or 1):
            raise PeerProtocolError("best_of: vLLM has none; send n, and choose among its choices")

    def generate(self, rendered: Body, index: int) -> bytes:
        """The body of a generate request for a rendered prompt."""
        given = rendered["sampling_params"].items()
        sampling = {name: value for name, value in given if name not in _RENDERER_FIELDS}
        own = self._own | {"request_id": f"{self.turn_name}-{index}"}
        own["sampling_params"] = _RENDERED_DEFAULTS | sampling
        return _ENCODER.encode(rendered | own)

    def engine_choice(self, choice: Choice, turn: GenerateRequest, index: int) -> Body:
        """The choice in the form of an engine's reply, for the renderer.

        Omits the stop token that ended it, which is not part of the text; the reply still has its
        log-probability, as in vLLM.
        """
        sampling = turn.sampling_params
        ids = choice.token_ids[: text_tokens(choice, turn)]
        content = [renderer_logprob(each) for each in self.candidates(choice, turn)]
        whole = choice.finish_reason is not None
        return {
            "index": index,
            # vLLM derenders no choice without tokens; `end_text` takes their text away again.
            "token_ids": ids or (choice.token_ids or turn.token_ids[-1:] if whole else ids),
            "logprobs": {"content": content} if sampling.lists_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def candidates(self, choice: Choice, turn: GenerateRequest) -> Sequence[TokenLogprob]:
        """Log-probabilities of the choice's tokens, with the candidates that were asked for."""
        content = choice.logprobs.content
        if turn.sampling_params.logprobs != 1:
            return content
        # The one candidate that was asked for is the sampled token itself.
        return [
            each if each.top_logprobs else msgspec.structs.replace(each, top_logprobs=(each,))
            for each in content
        ]

    def _holder(self, reply_choice: Body) -> Body:
        """The object that has a choice's texts."""
        return reply_choice if self.dialect.many else _message(reply_choice)

    def stopped_texts(self, turn: GenerateRequest) -> StoppedTexts:
        return {name: StoppedText(turn) for name in self.dialect.texts}

    def change_streamed(self, reply_choice: Body, held: StoppedTexts, choice: Choice) -> None:
        """Passes a chunk's texts through what is held back; vLLM's last chunk may have none."""
        holder, names = self._holder(reply_choice), self.dialect.texts
        newest = max((place for place, name in enumerate(names) if holder.get(name)), default=-1)
        for place, name in enumerate(names):
            text = holder.get(name)
            if isinstance(text, str) or held[name].holds:
                # Reasoning ends where content begins, however the content ends.
                end = _OVER if place < newest else choice
                holder[name] = held[name].feed(text or "", end)

    def end_text(
        self,
        reply_choice: Body,
        choice: Choice,
        turn: GenerateRequest,
        *,
        before: Body | None = None,
    ) -> None:
        """Cuts the whole text of a choice at its stop string, and empties the text of a choice
        without tokens. `before`: the choice of its `early_parts`, if any."""
        holder = self._holder(reply_choice)
        name = next((each for each in reversed(self.dialect.texts) if holder.get(each)), None)
        if name is None or not isinstance(text := holder[name], str):
            return
        early = self._holder(before).get(name) if before else None
        holder[name] = (
            without_stop(text, choice, turn.sampling_params, before_chars=len(early or ""))
            if text_tokens(choice, turn)
            else ""
        )

    def complete(self, reply_choice: Body, choice: Choice, turn: GenerateRequest) -> None:
        """Adds to a choice of the reply what the renderer does not know of."""
        spans = msgspec.to_builtins(choice.spans)
        reply_choice |= {"index": choice.index, "stop_reason": choice.stop_reason, "spans": spans}
        if choice.finish_reason not in (None, FinishReason.STOP):
            # vLLM's derenderer takes a call that was cut off for a whole one,
            reply_choice["finish_reason"] = choice.finish_reason
        elif (
            choice.finish_reason
            and not self._names_tool
            and _message(reply_choice).get("tool_calls")
        ):
            # and a whole reply's call for text.
            reply_choice["finish_reason"] = "tool_calls"
        if choice.weight_versions is not None:
            reply_choice["weight_versions"] = msgspec.to_builtins(choice.weight_versions)
        for name in ("fault", "immovable", "routed_experts", "sampling_mask"):
            if value := getattr(choice, name):
                reply_choice[name] = value
        if self.tokens_as_ids and reply_choice.get("logprobs"):
            name_by_id(reply_choice["logprobs"], self.candidates(choice, turn))
        if self.returns_ids:
            reply_choice["token_ids"] = choice.token_ids
            if self.dialect.many:
                reply_choice["prompt_token_ids"] = turn.token_ids


def _message(choice: Body) -> Body:
    """A chat choice's whole message, or a chunk's part of it."""
    message: Body = choice.get("message") or choice.get("delta") or {}
    return message
