"""Constants of a run beside the jobs: durations of switching and loading.

The published values are also the defaults of a control's settings; if they are wrong, it measures
moves and warm starts. No policy sees any other part of a world.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    cold_start_s: float = 135.0
    """A job's state from storage, before its first iteration."""
    warm_start_s: float = 5.0
    """A resident state back on its node's accelerators, and another job's off them."""
    move_s: float = 300.0
    """A job's state to its new nodes, from its checkpoint: its old nodes are free at once."""
    migrate_s: float = 3.0
    """A rollout's tail to a share of its accelerators; the next rollout there waits as long."""
    sync_s: float = 0.0
    """New weights to the rollout engines, once an iteration; holds no node."""


PAPER_WORLD = World()
"""RollMux's published values; it has none for weight sync, and its iterations have no sync."""
