"""Faults of engines: each names the party at fault, the engine or the request."""

from harvester.contracts.errors import Exhausted, RoseMuxError, Stale
from scheduler.gateway.engines.identity import Change

_RETRY_AFTER_S = 1.0
_RETRY_AFTER_MAX_S = 30.0
_WRONG_REQUEST = frozenset({400, 413, 422})
ADVICE = dict.fromkeys((401, 403), ", it refuses this gateway: see token_file and cert_file")
"""The settings that an operator is to look at, by HTTP status."""
_BETWEEN = frozenset({502, 504})
"""Answers of a proxy for an engine that does not answer."""


class EngineLost(RoseMuxError):  # noqa: N818 - named for the state
    """The engine does not answer or broke the stream."""


class EngineUnreachable(EngineLost):
    """No connection was made: the engine never saw the request."""

    def __init__(self, message: str, change: Change = Change.UNKNOWN) -> None:
        """`change`: PROCESS where the connection was refused, since no process listens."""
        super().__init__(message)
        self.change = change


class EngineChanged(EngineLost):
    """The answering process is a new one, or another caller may have changed its weights."""

    def __init__(self, message: str, change: Change = Change.PROCESS) -> None:
        super().__init__(message)
        self.change = change


class RequestRefused(RoseMuxError):  # noqa: N818 - as above
    """The engine rejects the request itself; no other engine would take it."""


class RequestFailed(RoseMuxError):  # noqa: N818 - as above
    """The engine answered this request with a failure; others may be served all the same."""


class EngineBusy(Exhausted):
    """The engine takes no more for now."""

    def __init__(self, message: str, *, retry_after_s: float = _RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def too_large(what: str, most_bytes: int) -> RequestRefused:
    """The fault of a request that an engine answers with more than the gateway takes: another
    engine would too, and none is to blame."""
    return RequestRefused(
        f"{what} of more than {most_bytes} bytes, the most that is taken: request fewer tokens, "
        "scores or candidates, or no routed experts"
    )


def refusal(status: int, message: str, retry_after: str = "") -> RoseMuxError:
    """The fault that an engine's answer with this HTTP status reports; `retry_after` as its header
    says."""
    if status == 409:
        return Stale(message)
    if status in ADVICE or status in _BETWEEN:
        return EngineLost(f"HTTP {status}{ADVICE.get(status, '')}: {message}")
    if status in (429, 503):
        return EngineBusy(message, retry_after_s=_retry_after_s(retry_after))
    if status in _WRONG_REQUEST:
        return RequestRefused(message)
    return RequestFailed(f"HTTP {status}: {message}")


def names_context(message: str) -> bool:
    """Whether vLLM's words are of a request that is too long for its context."""
    return "maximum context length" in message or "max_model_len" in message


def _retry_after_s(value: str) -> float:
    """Seconds of a Retry-After value, bounded; dates and other text count as the default."""
    try:
        retry_s = float(value)
    except ValueError:
        return _RETRY_AFTER_S
    return min(max(retry_s, 0.1), _RETRY_AFTER_MAX_S) if retry_s >= 0 else _RETRY_AFTER_S
