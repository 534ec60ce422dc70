"""One measured request to production, as a raw fact with its times (CLOCK_MONOTONIC seconds)."""

import msgspec


class ProductionRequest(msgspec.Struct, frozen=True, kw_only=True, tag="production"):
    """One request of the open-loop client. Latencies count from when it was due, not when sent."""

    arm: str
    """The arm of the run: the demo and each benchmark have their own."""
    block: int
    due_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float | None
    """First-token latency from the due time, in s; None without a first token."""
    itl_s: tuple[float, ...]
    failed: bool
    error: str = ""
    sent_s: float | None = None
    """Time at which the client began to send it; None if it never did."""
    trace_index: int = -1
    """Position in the replayed window: the same index is the same request in every block."""
