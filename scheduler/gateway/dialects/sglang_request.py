"""A request of SGLang's `/generate`, as requests of turns, and their choices in SGLang's form."""

import secrets
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.wire.rollouts import Choice, FinishReason, GenerateRequest, TokenLogprob
from scheduler.gateway.dialects.session_names import session_of
from scheduler.gateway.dialects.text_dialect import Body
from scheduler.gateway.dialects.text_fields import (
    NO_MEDIA,
    PIN_FIELDS,
    SESSION_FIELDS,
    given,
    number_of,
)
from scheduler.gateway.dialects.text_logprobs import (
    MOST_LIKELIEST,
    likeliest,
    prompt_logprobs,
)
from scheduler.gateway.loop_share import LoopShare
from scheduler.gateway.requests import MAX_LOGPROBS

MAX_PROMPTS = 4096
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""SGLang's names of parameters that vLLM calls otherwise."""
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
    *("spaces_between_special_tokens", "logit_bias", "n"),
)
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
"""SGLang's names of grammars, and vLLM's within `structured_outputs`."""
_FIELDS = frozenset(
    (
        *("text", "input_ids", "sampling_params", "rid", "return_logprob", "top_logprobs_num"),
        *("logprob_start_len", "stream", *SESSION_FIELDS),
        *("model", "lora_path", "extra_key", "priority", "on_interrupt", *PIN_FIELDS),
    )
)
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, -1, 0, "")
_MEDIA = ("image_data", "audio_data", "video_data")
_TOP_P_IDS = {"return_top_p_token_ids": True}
"""slime's `custom_params` where `top_p` is below 1."""
_DEFAULT_MAX_TOKENS = 128
"""SGLang's."""


class SglangRequest:
    """A request of SGLang's, checked. Raises PeerProtocolError, naming the field."""

    def __init__(self, body: Body) -> None:
        for name, value in body.items():
            if name not in _FIELDS and value not in _NEUTRAL:
                known = name in (*_NAMES, *_SAME, *_GRAMMARS)
                what = "send it in sampling_params" if known else "not offered; leave it out"
                what = NO_MEDIA if name in _MEDIA else what
                raise PeerProtocolError(f"{name}: {what}")
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise PeerProtocolError("send either text or input_ids")
        self.many = _many(ids) if text is None else isinstance(text, list)
        self.texts: list[str] = [] if text is None else text if self.many else [text]
        self.input_ids: list[list[int]] = [] if ids is None else ids if self.many else [ids]
        count = len(self.texts) + len(self.input_ids)
        proper = all(isinstance(each, str) for each in self.texts)
        proper = proper and all(isinstance(each, list) for each in self.input_ids)
        if not 0 < count <= MAX_PROMPTS or not proper:
            raise PeerProtocolError(f"text, input_ids: send 1 to {MAX_PROMPTS} prompts")
        sampling = body.get("sampling_params")
        if sampling is None:
            sampling = {}
        if not isinstance(sampling, dict):
            raise PeerProtocolError("sampling_params: send one object for all prompts")
        self._top_p_ids = sampling.get("custom_params") == _TOP_P_IDS
        self._sampling = _translated(sampling)
        start = body.get("logprob_start_len") if body.get("return_logprob") else None
        self._scores_from = start = None if start == -1 else start
        """First prompt token whose log-probability is requested; None: no scores."""
        if start is not None and (type(start) is not int or start < 0 or body.get("stream")):
            raise PeerProtocolError("logprob_start_len: send one number, and no stream")
        self._scores_only = self._sampling["max_tokens"] == 0
        if self._scores_only and self._scores_from is None:
            raise PeerProtocolError("max_new_tokens: 0 scores prompts; send logprob_start_len too")
        rid, most = body.get("rid"), MAX_LOGPROBS if self._scores_only else MOST_LIKELIEST
        if rid is not None and not isinstance(rid, str):
            raise PeerProtocolError("rid: send one string for the request")
        self.name: str = secrets.token_hex(16) if rid is None else rid
        self.session = session_of(body)
        self.stream = bool(body.get("stream"))
        self._logprobs = bool(body.get("return_logprob"))
        self._candidates = number_of(body, "top_logprobs_num", most=most)
        self._more = given(body, (*PIN_FIELDS, "priority", "model", "on_interrupt"))
        # vLLM names an adapter as a model, and a namespace of cached prefixes a salt.
        for name, same in (("lora_path", "model"), ("extra_key", "cache_salt")):
            self._more |= {same: body[name]} if body.get(name) else {}

    def generate(self, token_ids: list[int], index: int) -> bytes:
        """The body of a generate request for a prompt."""
        name = f"{self.name}-{index}" if self.many else self.name
        # The sampled token takes a place among vLLM's candidates.
        sampling = self._sampling | {"logprobs": 1 if self._scores_only else self._candidates + 1}
        if self._scores_from is not None:
            if self._scores_from >= len(token_ids):
                raise PeerProtocolError("logprob_start_len: beyond the prompt")
            sampling["prompt_logprobs"] = self._candidates
            # vLLM scores a prompt where it makes a token, which `shown` takes away again.
            sampling["max_tokens"] = sampling["max_tokens"] or 1
        return msgspec.json.encode(
            {"request_id": name, "token_ids": token_ids, "sampling_params": sampling} | self._more
        )

    def shown(self, choice: Choice) -> Choice:
        """The part of a choice that the client asked for."""
        if not self._scores_only or choice.finish_reason is FinishReason.ABORT:
            return choice
        return Choice(
            index=choice.index,
            finish_reason=FinishReason.LENGTH,
            # The version that scored it.
            spans=tuple(msgspec.structs.replace(each, end=0) for each in choice.spans[:1]),
        )

    async def input_logprobs(self, token_ids: Sequence[int], scores: Body) -> Body:
        """Log-probabilities of the prompt from the first token that is asked for, which itself has
        none, as SGLang's."""
        start, scored = self._scores_from or 0, await prompt_logprobs(scores, token_ids)
        own: list[Any] = [[None, token_ids[start], None]]
        top: list[Any] = [None]
        share = LoopShare()
        for each in scored[start + 1 :]:
            await share.rest()
            own.append(_entry(each))
            top.append([*map(_entry, likeliest(each, self._candidates))])
        logprobs: Body = {"input_token_logprobs": own}
        return logprobs | ({"input_top_logprobs": top} if self._candidates else {})

    def reply(self, choice: Choice, turn: GenerateRequest, text: str) -> Body:
        """The choice in SGLang's form."""
        reason: Body | None = None
        if choice.finish_reason is not None:
            reason = {"type": str(choice.finish_reason)}
            if choice.finish_reason == "length":
                reason["length"] = len(choice.token_ids)
            elif choice.finish_reason == "abort":
                reason["message"] = choice.fault or "aborted"
            elif choice.stop_reason is not None or choice.token_ids:
                stop = choice.stop_reason
                reason["matched"] = choice.token_ids[-1] if stop is None else stop
        meta: Body = {
            "id": turn.request_id,
            "finish_reason": reason,
            "prompt_tokens": len(turn.token_ids),
            "completion_tokens": len(choice.token_ids),
            "spans": msgspec.to_builtins(choice.spans),
        }
        if choice.immovable:
            meta["immovable"] = choice.immovable
        if choice.spans:
            start, end = choice.spans[0].version, choice.spans[-1].version
            # The oldest version: a filter for stale samples must not underestimate their age.
            meta["weight_version"] = str(start)
            meta |= {"weight_version_start": start, "weight_version_end": end}
        if self._top_p_ids and choice.sampling_mask is not None:
            masks = choice.sampling_mask
            meta["top_p_token_ids"] = [token_id for mask in masks for token_id in mask]
            meta["top_p_token_offsets"] = [0, *accumulate(map(len, masks))]
        if choice.weight_versions is not None:
            meta["weight_versions"] = msgspec.to_builtins(choice.weight_versions)
        if self._logprobs:
            content = choice.logprobs.content
            meta["output_token_logprobs"] = [*map(_entry, content)]
            if self._candidates:
                best = (likeliest(each, self._candidates) for each in content)
                meta["output_top_logprobs"] = [[*map(_entry, each)] for each in best]
        return {"text": text, "output_ids": choice.token_ids, "meta_info": meta}


def _entry(token: TokenLogprob) -> list[Any]:
    """SGLang's: log-probability, token id and no text."""
    return [token.logprob, token.token_id, None]


def _many(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)


def _translated(sampling: Body) -> Body:
    settings: Body = {"max_tokens": _DEFAULT_MAX_TOKENS}
    for name, value in sampling.items():
        if value is None:
            continue
        if name in _NAMES:
            settings[_NAMES[name]] = value
        elif name in _SAME:
            settings[name] = value
        elif name in _GRAMMARS:
            if "structured_outputs" in settings:
                grammars = ", ".join(each for each in sampling if each in _GRAMMARS)
                raise PeerProtocolError(f"sampling_params.{name}: send one of {grammars}")
            settings["structured_outputs"] = {_GRAMMARS[name]: value}
        elif name == "no_stop_trim":
            settings["include_stop_str_in_output"] = value
        elif value not in _NEUTRAL and (name, value) != ("custom_params", _TOP_P_IDS):
            named = next((ours for ours, its in _NAMES.items() if its == name), None)
            what = f"SGLang's name is {named}" if named else "not offered; leave it out"
            raise PeerProtocolError(f"sampling_params.{name}: {what}")
    return settings
