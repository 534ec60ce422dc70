"""Records of the client and the engines' taps: one JSON line for each request and attempt.

The judge reads nothing else of the run. Times are seconds of one monotonic clock.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.migration.rollout_routes import RolloutRoute

T = TypeVar("T")


class RequestRecord(msgspec.Struct, kw_only=True):
    """A request of the client and its raw reply."""

    trajectory: str
    body: dict[str, Any]
    """In the words of the gateway's own route; the request was sent in those of `route`."""
    route: RolloutRoute = RolloutRoute.GENERATE
    turn: int = 0
    """Its number in the trajectory."""
    sent_s: float
    status: int = 0
    """0: no reply."""
    events: list[str] = []
    """Events of a stream, as they came."""
    reply: str = ""
    """Body of any other reply; of Tinker's route, base 64 of its protobuf or JSON of an error."""
    retry_after: str = ""
    """The header of a refusal that says when to ask again."""
    broken_off: bool = False
    """The client closed the connection itself, to send the request again."""
    error: str = ""
    ended_s: float = 0.0
    tap_spans: dict[int, list[dict[str, Any]]] = {}
    """Spans of each choice that the judge takes from taps, where the route tells none."""

    @property
    def request_id(self) -> str:
        return str(self.body["request_id"])

    @property
    def samples(self) -> int:
        """Choices that were asked for, each a turn of its own."""
        return int(self.body["sampling_params"].get("n", 1))

    def choice_name(self, index: int) -> str:
        return self.request_id if self.samples == 1 else f"{self.request_id}.{index}"

    @property
    def pin(self) -> dict[str, Any]:
        """Versions that may make the tokens; empty: all."""
        return self.body.get("weight_version") or {}

    @property
    def pins(self) -> list[str]:
        """Kinds of the pins that it has."""
        numerics = ["equal_numerics"] if self.body.get("equal_numerics") else []
        return [*sorted(self.pin.keys() - {"wait_s"}), *numerics]

    @property
    def refusal(self) -> int:
        """The status of a refusal: the reply's, or what its stream says in place of an end; 0.
        Tinker's replies tell only whether to ask again: 409, or not: 410."""
        if self.route is RolloutRoute.TINKER:
            return {"server": 409, "user": 410}.get(self.tinker_error.get("category", ""), 0)
        if self.status != 200:
            return self.status
        last = self.events[-2:-1]
        reply = msgspec.json.decode(last[0]) if last else {}
        return int(reply["error"]["code"]) if "error" in reply else 0

    @property
    def tinker_error(self) -> dict[str, Any]:
        """The error of a promise that was not kept; empty for any other reply."""
        is_error = self.status == 200 and self.reply.startswith("{")
        return msgspec.json.decode(self.reply, type=dict[str, Any]) if is_error else {}

    @property
    def max_tokens(self) -> int:
        return int(self.body["sampling_params"]["max_tokens"])


class AttemptRecord(msgspec.Struct, kw_only=True):
    """One attempt as it passed between the gateway and an engine."""

    engine: str
    request_id: str
    """The turn's, as the gateway names it."""
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
    late_s: float = 0.0
    """Time before it for which the tap did not run: it may have ended so much earlier."""


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
