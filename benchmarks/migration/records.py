"""Records of the client and the engines' taps: one JSON line for each request and attempt.

The judge reads nothing else of the run. Times are seconds of one monotonic clock.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class RequestRecord(msgspec.Struct, kw_only=True):
    """A request of the client and its raw reply."""

    trajectory: str
    body: dict[str, Any]
    """As sent."""
    sent_s: float
    status: int = 0
    """0: no reply."""
    events: list[str] = []
    """Events of a stream, as they came."""
    reply: str = ""
    """Body of any other reply."""
    broken_off: bool = False
    """The client closed the connection itself, to send the request again."""
    error: str = ""
    ended_s: float = 0.0

    @property
    def request_id(self) -> str:
        return str(self.body["request_id"])

    @property
    def max_tokens(self) -> int:
        return int(self.body["sampling_params"]["max_tokens"])


class AttemptRecord(msgspec.Struct, kw_only=True):
    """One attempt as it passed between the gateway and an engine."""

    engine: str
    request_id: str
    """The turn's."""
    number: int
    context: list[int]
    """Prompt and output so far, as the gateway sent them."""
    sampling: dict[str, Any] = {}
    """Settings as the gateway sent them."""
    began_s: float
    status: int = 0
    identity: str = ""
    token_ids: list[int] = []
    """Tokens of whole events that were passed on."""
    passed: list[tuple[float, int]] = []
    """Time of each event, and its tokens."""
    finish_reason: str | None = None
    end: str = ""
    """`whole`, `refused`, `closed` by the gateway, `ended` by the engine without a finish, or
    `broken`."""
    ended_s: float = 0.0


class HeldRecord(msgspec.Struct, kw_only=True):
    """Weights that an engine's workers reported under one identity."""

    engine: str
    identity: str
    version: int
    state_hash: str


def append(path: Path, record: msgspec.Struct) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def read(path: Path, kind: type[T]) -> Iterable[T]:
    decoder = msgspec.json.Decoder(kind)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


class Reply(msgspec.Struct, kw_only=True):
    """A client's reply, put together from what it received."""

    token_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[dict[str, Any]] = []
    finish_reasons: list[str] = []
    fault: str = ""
    whole: bool = False

    @classmethod
    def of(cls, record: RequestRecord) -> "Reply":
        reply = cls()
        if record.status != 200:
            return reply
        texts = record.events or ([record.reply] if record.reply else [])
        for text in texts:
            if text == "[DONE]":
                reply.whole = True
                continue
            for choice in msgspec.json.decode(text).get("choices", []):
                reply._add(choice)
        reply.whole = reply.whole or bool(record.reply)
        return reply

    def _add(self, choice: dict[str, Any]) -> None:
        self.token_ids += choice.get("token_ids") or []
        self.logprobs += [one["logprob"] for one in (choice.get("logprobs") or {})["content"]]
        if choice.get("finish_reason"):
            self.finish_reasons.append(choice["finish_reason"])
            # The last event has all spans.
            self.spans = choice.get("spans") or []
        self.fault = choice.get("fault") or self.fault
