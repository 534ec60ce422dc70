"""What one API-server process hears of its engine: each step, and what its siblings have."""

import msgspec


class EngineStep(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration as the statistics logger reports it."""

    running: int | None
    """None where this process got no scheduler statistics for the step."""
    kv_usage_ratio: float | None
    first_tokens: int
    prompt_tokens: int
    generation_tokens: int
    inter_token_s: tuple[float, ...]
    finished_prompt_tokens: tuple[int, ...]
    rank: int = 0
    """Of the engine core, with data parallelism."""
    ours: bool = True
    """Whether requests of this process were in it."""
    waiting: int | None = None
    """As `running`: requests without a place in the batch."""

    @property
    def served(self) -> bool:
        """Whether it gave requests of this process anything; outputs of aborted ones are not."""
        return bool(
            self.generation_tokens
            or self.first_tokens
            or self.prompt_tokens
            or self.inter_token_s
            or self.finished_prompt_tokens
        )


class Siblings(msgspec.Struct, frozen=True):
    """What the engine's other API servers have together."""

    in_flight: int = 0
    waiting: int = 0
    decoding: int = 0
    requests_total: int = 0
    steps_total: int = 0
    """Steps that served several processes are counted by each of them."""


NO_SIBLINGS = Siblings()
