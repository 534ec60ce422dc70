"""Records of a group's execution: of a job, of a node and of an event.

A job waits for its rollout nodes, rolls out, waits for its training nodes, trains, sends its new
weights to its rollout engines where that takes time, and begins again. A rollout is its bulk, which
fills the nodes, and its tail, which needs only a share of them. Nodes are bits of a mask, numbered
within their group.
"""

from typing import Final, NamedTuple

import numpy as np

from scheduler.rollmux.forecast.compiled import Records

WAITS_ROLLOUT: Final = 0
BULK: Final = 1
TAIL_HELD: Final = 2
"""The tail still runs on all of the job's nodes, because no job waits for them."""
TAIL_MOVED: Final = 3
WAITS_TRAINING: Final = 4
TRAINING: Final = 5
SYNCING: Final = 6
"""New weights go to the rollout engines: holds no node and waits for none."""

ROLLOUT_STARTED: Final = 0
TAIL_MIGRATED: Final = 1
ROLLOUT_ENDED: Final = 2
TRAINING_STARTED: Final = 3
TRAINING_ENDED: Final = 4
SYNC_ENDED: Final = 5

BUSY: Final = 0
TAILS: Final = 1

FORECAST_NODES_MAX: Final = 62

JOB: Final = np.dtype(
    [
        ("id", "i8"),
        ("stage", "i8"),
        ("rollout_nodes", "i8"),
        ("training_nodes", "i8"),
        ("left_s", "f8"),
        ("overhead_s", "f8"),
        ("worked_s", "f8"),
        ("waits_since_s", "f8"),
        ("offset", "i8"),
        ("length", "i8"),
        ("done", "i8"),
        ("slo", "f8"),
        ("solo_s", "f8"),
        ("rollout_mean_s", "f8"),
        ("training_mean_s", "f8"),
        ("sync_s", "f8"),
        ("divisible", "i8"),
        ("bulk_ratio", "f8"),
        ("tail_share", "f8"),
    ]
)
"""`left_s` and `worked_s` are solo seconds of the present stage and phase; overheads run first.
`rollout_mean_s` and `training_mean_s` are the policy's beliefs, never the future; a weight sync
takes `sync_s` after every training, 0 without one."""

NODE: Final = np.dtype([("loaded", "i8"), ("left_at_s", "f8")])
"""`left_at_s` is when the last tail that was moved has left all but its share."""

EVENT: Final = np.dtype([("t_s", "f8"), ("kind", "i8"), ("job", "i8"), ("nodes", "i8")])


class Rules(NamedTuple):
    """Rules of switching: tail migration, and the costs of a warm start and a migration, in s."""

    migrate: bool
    warm_s: float
    migrate_s: float


def empty_nodes() -> Records:
    nodes = np.zeros(FORECAST_NODES_MAX, dtype=NODE)
    nodes["loaded"] = -1
    return nodes


def empty_permits() -> Records:
    return np.zeros(2, dtype=np.int64)
