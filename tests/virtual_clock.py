"""A `Clock` that a test moves."""

from dataclasses import dataclass


@dataclass(slots=True)
class VirtualClock:
    now_s: float = 0.0

    def now(self) -> float:
        return self.now_s

    def advance_to(self, now_s: float) -> None:
        if now_s < self.now_s:
            raise ValueError(f"time runs forward: {now_s} < {self.now_s}")
        self.now_s = now_s
