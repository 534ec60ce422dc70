"""Steps and requests as both engines log them: nanoseconds of the machine's monotonic clock."""

import msgspec


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    """`decode` or `prefill`."""
    size: int
    """Requests of a decode, tokens of a prefill."""
    start_ns: int
    """Time before the launch, in ns."""
    end_ns: int
    """Time at which the device was seen to have finished it."""

    @property
    def step_s(self) -> float:
        return (self.end_ns - self.start_ns) * 1e-9

    @property
    def form(self) -> tuple[str, int]:
        """Steps of one form do the same work."""
        return self.kind, self.size

    @property
    def tokens(self) -> int:
        return self.size


class ServedRequest(msgspec.Struct, frozen=True, kw_only=True):
    number: int = 0
    """Number within its load."""
    arrival_ns: int
    first_ns: int
    """Its first token."""
    end_ns: int
    prompt_tokens: int
    itl_s: tuple[float, ...] = ()

    @property
    def ttft_s(self) -> float:
        return (self.first_ns - self.arrival_ns) * 1e-9


class ProductionLog(msgspec.Struct, frozen=True, kw_only=True):
    steps: tuple[LoggedStep, ...] = ()
    requests: tuple[ServedRequest, ...] = ()

    def until(self, end_ns: int) -> "ProductionLog":
        """Steps and requests that ended by then."""
        return ProductionLog(
            steps=tuple(step for step in self.steps if step.end_ns <= end_ns),
            requests=tuple(one for one in self.requests if one.end_ns <= end_ns),
        )


class GuestLog(msgspec.Struct, frozen=True, kw_only=True):
    steps: tuple[LoggedStep, ...] = ()
    closed: dict[str, int] = {}
    """Decisions that admitted no step, by reason."""
    probes: int = 0
    """Steps of one token against the prediction, among `steps`."""
    smallest_step_s: float = 0.0
    """Predicted time of a decode of one request, by the guest's own model."""

    def until(self, end_ns: int) -> "GuestLog":
        """Steps that ended by then."""
        steps = tuple(step for step in self.steps if step.end_ns <= end_ns)
        return msgspec.structs.replace(self, steps=steps)
