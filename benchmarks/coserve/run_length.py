"""How much of each part is measured: as the README's figures are, or within one command of minutes
on a machine that is lent."""

import math
from dataclasses import dataclass

PROVING_SLICE_S = 60.0
PROVING_SLICES_MAX = 60
"""Twice the half hour that a new slot has to prove itself in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    seconds: float = 160.0
    """Default measured seconds of each arm."""
    slice_s: float = 20.0
    """Length of one arm in one round."""
    proves: bool = True
    """Whether the slot proves itself before the rounds, for half an hour."""
    preparation_s: float = 15.0
    """Length of each of the three replays before the first round."""
    shrinks: int = 30
    """Count for each kind; so for the next four."""
    activations: int = 10
    surges: int = 20
    long_prompts: int = 3
    full_kv: int = 1
    closings_s: float = 180.0
    openings_s: float = 20.0
    closed_windows: int = 5
    within_s: float = math.inf
    """Time limit from the run's start, in s: a round or a part that would end later is left out,
    but for the first round."""
    part_s: float = 0.0
    """Time that one part may take, where the time is bounded."""
    trial_s: float = 0.0
    """Time that one trial of the fail-safe may take, with the start of a new agent; as above."""


FULL = RunLength()
SHORT = RunLength(
    seconds=30.0,
    slice_s=10.0,
    proves=False,
    preparation_s=10.0,
    shrinks=8,
    activations=4,
    surges=5,
    long_prompts=1,
    closings_s=20.0,
    openings_s=10.0,
    closed_windows=2,
    within_s=540.0,
    part_s=160.0,
    trial_s=30.0,
)
"""Ten minutes, engines' start and end included."""
