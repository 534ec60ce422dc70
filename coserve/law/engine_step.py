"""One engine step as an API-server process observes it, and the totals of its siblings."""

import msgspec


class EngineStep(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration as the statistics logger reports it."""

    running: int | None
    """None if this process got no scheduler statistics for the step."""
    kv_usage_ratio: float | None
    first_tokens: int
    prompt_tokens: int
    generation_tokens: int
    inter_token_s: tuple[float, ...]
    finished_prompt_tokens: tuple[int, ...]
    rank: int = 0
    """Data-parallel rank of the engine core."""
    ours: bool = True
    """Whether the step held requests of this process."""
    waiting: int | None = None
    """Requests without a place in the batch; None as for `running`."""

    @property
    def served(self) -> bool:
        """Whether the step gave output to this process's requests; aborted requests get none."""
        return bool(
            self.generation_tokens
            or self.first_tokens
            or self.prompt_tokens
            or self.inter_token_s
            or self.finished_prompt_tokens
        )


class Siblings(msgspec.Struct, frozen=True):
    """Totals of the engine's other API servers."""

    in_flight: int = 0
    waiting: int = 0
    decoding: int = 0
    requests_total: int = 0
    steps_total: int = 0
    """A step that served several processes is counted by each of them."""


NO_SIBLINGS = Siblings()
