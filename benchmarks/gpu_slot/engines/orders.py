"""Setting, orders and replies of an engine process: one JSON object a line, each way."""

import msgspec

from benchmarks.gpu_slot.engines.request_load import Request
from benchmarks.gpu_slot.engines.step_log import GuestLog, ProductionLog
from harvester.contracts.isolation import IsolationBackend

ENGINE = "production"
"""Production's name, and its pulse page's."""


class EngineForms(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that an engine captures at its start."""

    prefills: tuple[int, ...]
    decodes: tuple[int, ...]
    context_tokens: int
    """KV of each request of a decode."""


class EngineSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One process with production, with a guest, or with both."""

    kind: str
    tiny: bool
    pages: str
    production: EngineForms | None = None
    guest: EngineForms | None = None
    isolation: IsolationBackend = IsolationBackend.NONE
    """Backend that the guest's threads on the host are put under, and that its page names."""
    partition_ratio: float = 0.0
    """Both in one process: the guest's share of the multiprocessors by green contexts; 0 shares
    all of them."""


class EnginesReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    start_s: float
    multiprocessors: dict[str, int] = {}
    """Multiprocessors that production and guest may use, if known."""


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    load: tuple[Request, ...]
    seconds: float


class Roll(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    seconds: float
    mixed: bool = False
    seed: int = 0


class ServedLoad(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    log: ProductionLog


class Rolled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    log: GuestLog


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order failed; a CUDA context may be lost with it."""

    number: int
    error: str


Order = Serve | Roll
Reply = EnginesReady | ServedLoad | Rolled | Broken
ORDERS: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
REPLIES: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
