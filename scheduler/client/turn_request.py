"""The arguments of a client's calls, checked before anything is sent. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from json import JSONEncoder
from typing import Any, TypedDict
from uuid import uuid4

import msgspec

from harvester.contracts.errors import UNDECODABLE, ConfigError, PeerProtocolError
from harvester.contracts.ids import TrajectoryId, checked_name
from harvester.contracts.wire.rollouts import (
    AnnouncedVersion,
    GenerateRequest,
    OnInterrupt,
    SamplingParams,
    VersionPin,
)
from scheduler.gateway.requests import checked_trajectory, decode_generate

Sampling = SamplingParams | Mapping[str, Any]
_SHOWN_CHARS = 80


class TurnOptions(TypedDict, total=False):
    trajectory: str
    """Turns of a trajectory prefer the engine that holds their prefix; default: the turn's id."""
    weight_version: int | VersionPin | None
    """Exactly this version, or a pin; None takes any that is served. A pin's `wait_s` bounds the
    call's wait for it: at the gateway, and where that has not answered for so long (but at least
    `silence_s`) and no dedicated engine takes the turn."""
    request_id: str
    """A new one by default."""
    priority: int
    cache_salt: str | None
    on_interrupt: OnInterrupt | str | None
    """`return_partial` ends the turn where it would go on elsewhere; None: the job's setting."""
    equal_numerics: bool | str
    """All tokens by engines of one numerics label: the first engine's, or this one."""


def request_of(
    token_ids: Sequence[int],
    sampling: Sampling,
    options: Mapping[str, Any],
    *,
    stream: bool = False,
) -> tuple[GenerateRequest, TrajectoryId, bytes]:
    """The request, its trajectory and its body. Raises ConfigError with the field and its value if
    the gateway would refuse it or read it differently: it would leave out an invalid number or
    pin."""
    if unknown := sorted(options.keys() - TurnOptions.__annotations__.keys()):
        # A misspelt pin would silently be left out.
        raise TypeError(f"no such option: {', '.join(unknown)}")
    if not isinstance(sampling, SamplingParams | Mapping):
        raise ConfigError(f"sampling: give SamplingParams or a mapping, not {_shown(sampling)}")
    given = {name: value for name, value in options.items() if value is not None}
    trajectory = given.pop("trajectory", None)
    pin = _plain(given.get("weight_version", {}))
    given |= {
        "request_id": uuid4().hex if given.get("request_id", "") == "" else given["request_id"],
        "weight_version": {"exact": pin} if isinstance(pin, int) else pin,
        "sampling_params": dict(sampling) if isinstance(sampling, Mapping) else sampling,
        "stream": stream,
    }
    body = msgspec.json.encode({"token_ids": _encoded_ids(token_ids), **_encoded(given)})
    try:
        # The gateway's own check.
        request = decode_generate(body)
    except PeerProtocolError as error:
        raise ConfigError(_with_value(str(error), body)) from error
    named = trajectory_of(request.request_id if trajectory in (None, "") else trajectory)
    if request.sampling_params.n != 1:
        raise ConfigError("sampling_params.n: one turn per call; call once per sample")
    if request.sampling_params.scores_prompt:
        raise ConfigError("prompt_logprobs: post to /inference/v1/generate for them")
    return request, named, body


def trajectory_of(given: object) -> TrajectoryId:
    """Raises ConfigError for an invalid name of a trajectory."""
    try:
        if given and isinstance(given, str):
            return checked_trajectory(given, request_id="")
        why = "give a string"
    except PeerProtocolError as error:
        why = str(error).removeprefix("X-Session-ID: ")
    raise ConfigError(f"trajectory: {why}; given: {_shown(given)}")


def announcement_of(**given: Any) -> AnnouncedVersion:
    """Raises ConfigError with the field and its value."""
    body = msgspec.json.encode(_encoded(given))
    try:
        announced = msgspec.json.decode(body, type=AnnouncedVersion)
    except UNDECODABLE as error:
        raise ConfigError(_with_value(str(error), body)) from error
    checked_name(announced.store, what="store", error=ConfigError)
    return announced


def _encoded(given: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
    encoded = {}
    for name, value in given.items():
        try:
            encoded[name] = msgspec.Raw(_ENCODER.encode(value).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: {error}; given: {_shown(value)}") from error
    return encoded


def _encoded_ids(given: object) -> msgspec.Raw:
    """Sequences of integers; arrays and integers of NumPy and PyTorch too."""
    ids = _plain(given)
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | Mapping | Set):
        raise ConfigError(f"token_ids: give a sequence of token ids, not {_shown(given)}")
    try:
        return msgspec.Raw(msgspec.json.encode(tuple(ids), enc_hook=_python_value))
    except (TypeError, *UNDECODABLE) as error:
        raise ConfigError(f"token_ids: {error}; given: {_shown(given)}") from error


def _plain(value: Any) -> Any:
    """Values of NumPy and PyTorch as Python's own."""
    return value.tolist() if hasattr(value, "tolist") else value


def _python_value(value: Any) -> Any:
    if isinstance(value, msgspec.Struct | Set):
        return msgspec.to_builtins(value, enc_hook=_python_value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")


# Unlike msgspec's, it refuses numbers that are not finite, which would be sent as null.
_ENCODER = JSONEncoder(default=_python_value, allow_nan=False)


def _with_value(refusal: str, body: bytes) -> str:
    """The refusal with the value of the field that it names, by a path or before its colon."""
    refusal = refusal.removeprefix("generate request: ")
    found = re.search(r"`\$\.([^`]+)`", refusal) or re.match(r"([\w.]+):", refusal)
    value: Any = msgspec.json.decode(body)
    for part in re.findall(r"\w+", found[1]) if found else ():
        if isinstance(value, dict):
            value = value.get(part, value.get("sampling_params", {}).get(part))
        elif isinstance(value, list) and part.isdecimal():
            value = value[int(part)]
    named = found is not None and value is not None
    return f"{refusal}; given: {_shown(value)}" if named else refusal


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
