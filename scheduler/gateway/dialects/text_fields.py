"""Fields of OpenAI's chat and completion requests, as vLLM 0.24 to 0.33 define them.

vLLM takes any other field too and ignores it: `guided_json` has constrained nothing since it was
renamed. The gateway refuses such a field by name.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from harvester.contracts.errors import PeerProtocolError
from scheduler.gateway.requests import no_such_field

SESSION_FIELDS = ("session_id", "routing_key", "program_id", "session_params.session_id")
"""Names of a trajectory in bodies: vLLM and SkyRL; SGLang; ThunderAgent; vllm-router."""
PIN_FIELDS = ("weight_version", "equal_numerics")
"""Fields of the generate request in every dialect."""
OWN_FIELDS = frozenset(
    (
        *(field.partition(".")[0] for field in SESSION_FIELDS),
        *(*PIN_FIELDS, "return_weight_versions", "model", "stream", "stream_options", "cache_salt"),
        *("request_id", "on_interrupt"),
    )
)
"""Fields that the gateway answers itself; the renderer is given all others."""
UNUSED_FIELDS = frozenset(
    (
        *("length_penalty", "media_io_kwargs", "metadata", "mm_processor_kwargs", "user"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        "store",
    )
)
"""Fields that OpenAI's clients send and that change no token: they are of storage and billing, of
media or of beam search."""
_NOT_RENDERED_FIELDS = OWN_FIELDS | UNUSED_FIELDS
MEDIA_SETTINGS = frozenset(("media_io_kwargs", "mm_processor_kwargs"))
"""The unused fields with which an engine opens and decodes media: no renderer is given them."""
NO_MEDIA = "media is not routed; send text"
_MEDIA, _ROUTED, _NOT_OFFERED = "send text or token ids", "the gateway routes", "not offered"
REFUSED_FIELDS: Mapping[str, str] = {
    "ec_transfer_params": _ROUTED,
    "kv_transfer_params": _ROUTED,
    "mm_payload": _MEDIA,
    "prompt_embeds": _MEDIA,
    "return_assistant_tokens_mask": _NOT_OFFERED,
    "return_mm_kwargs": _NOT_OFFERED,
    "return_prompt_text": _NOT_OFFERED,
    "return_token_offsets": _NOT_OFFERED,
    "suffix": _NOT_OFFERED,
    "use_beam_search": _NOT_OFFERED,
    "watermarking": _NOT_OFFERED,
}
"""Fields that vLLM has and the gateway does not carry, and the reason."""
_MEDIA_FIELDS = ("mm_payload", "prompt_embeds", "return_mm_kwargs")
_TEXT_PARTS = frozenset(
    ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
)
_MEDIA_KEYS = frozenset(
    (
        *(f"{k}_{form}" for k in ("image", "audio", "video") for form in ("url", "pil", "embeds")),
        *("input_audio", "input_image", "prompt_embeds"),
    )
)
"""Keys that vLLM reads as media in a part without a type or with a `uuid`; refused in any part."""
_MAX_PARTS = 1 << 14
"""Messages of a request and their parts: a body may have millions, and all turns wait meanwhile."""
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "")
_SHARED_FIELDS = frozenset(
    (
        *("add_special_tokens", "allowed_token_ids", "bad_words", "echo", "frequency_penalty"),
        *("ignore_eos", "include_stop_str_in_output", "logit_bias", "logprob_token_ids"),
        *("logprobs", "max_tokens", "min_p", "min_tokens", "n", "presence_penalty", "priority"),
        *("prompt_logprobs", "repetition_detection", "repetition_penalty", "response_format"),
        *("return_token_ids", "return_tokens_as_token_ids", "routed_experts_prompt_start", "seed"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids"),
        *("stream_interval", "structured_outputs", "temperature", "thinking_token_budget"),
        *("top_k", "top_p", "truncate_prompt_tokens", "truncation_side", "vllm_xargs", "best_of"),
    )
)
CHAT_FIELDS = _SHARED_FIELDS | {
    *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message"),
    *("documents", "include_reasoning", "max_completion_tokens", "messages", "parallel_tool_calls"),
    *("reasoning_effort", "tool_choice", "tools", "top_logprobs"),
}
COMPLETION_FIELDS = _SHARED_FIELDS | {"prompt"}


def check_fields(body: Mapping[str, Any], rendered: Collection[str]) -> None:
    """`rendered`: what the dialect's renderer reads. Raises PeerProtocolError for a field that
    would silently be ignored; null is no value."""
    for name, value in body.items():
        if name in REFUSED_FIELDS:
            if value not in _NEUTRAL:
                raise PeerProtocolError(f"{name}: {REFUSED_FIELDS[name]}; leave it out")
        elif value is not None and name not in rendered and name not in _NOT_RENDERED_FIELDS:
            raise no_such_field(name, {*rendered, *_NOT_RENDERED_FIELDS})


def check_media(body: Mapping[str, Any]) -> None:
    """Raises PeerProtocolError, naming it, for what a renderer would fetch or decode: it opens the
    URL of a part of a message from inside the cluster."""
    for name in _MEDIA_FIELDS:
        if body.get(name) not in _NEUTRAL:
            raise PeerProtocolError(f"{name}: {REFUSED_FIELDS[name]}; leave it out")
    messages = body.get("messages")
    if not isinstance(messages, list | None):
        raise PeerProtocolError("messages: send a list")
    for part in _parts(messages or []):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if not (isinstance(kind, str) and kind in _TEXT_PARTS) or (
            isinstance(part, dict) and _MEDIA_KEYS & part.keys()
        ):
            raise PeerProtocolError(f"messages: {kind}: {NO_MEDIA}")


def _parts(messages: list[Any]) -> Iterator[Any]:
    found = len(messages)
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else []
        found += len(parts)
        if found > _MAX_PARTS:
            raise PeerProtocolError(f"messages: send at most {_MAX_PARTS} messages and parts")
        yield from parts


def given(body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields of these names that have a value."""
    return {name: body[name] for name in names if body.get(name) is not None}


def number_of(body: Mapping[str, Any], name: str, *, most: int) -> int:
    """The number in a field, 0 without one. Raises PeerProtocolError."""
    number = body.get(name) or 0
    if type(number) is not int or not 0 <= number <= most:
        raise PeerProtocolError(f"{name}: send one number, at most {most}")
    return number
