"""What is true in a run beside the jobs: how long switching and loading take.

No planner and no permit is told any of it; they measure what they see.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    cold_start_s: float = 135.0
    """A job's state from storage, before its first iteration."""
    warm_start_s: float = 5.0
    """A resident state back on its node's accelerators, where another job's was there."""
    move_s: float = 300.0
    """A job's state from its old nodes to its new ones."""
    migrate_s: float = 3.0
    """A rollout's tail to a share of its accelerators; the next rollout there waits as long."""
    sync_s: float = 0.0
    """New weights to the rollout engines, once an iteration; holds no node."""


PAPER_WORLD = World()
"""What RollMux publishes; it has no figure for weight sync and its iterations none."""
