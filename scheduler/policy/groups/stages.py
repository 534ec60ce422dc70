"""What a group's execution consists of: the records of a job, of a node and of an event.

A job waits for its rollout nodes, rolls out, waits for its training nodes, trains, sends its new
weights to its rollout engines where that takes time, and begins again. A rollout is its bulk, which
fills the nodes, and its tail, which needs only a share of them. Nodes are bits of a mask, numbered
within their group.
"""

from typing import Final, NamedTuple

import numpy as np

from scheduler.policy.groups.compiled import Records

LOADING: Final = 0
"""State comes from storage or from another node; holds no permit."""
WAITS_ROLLOUT: Final = 1
BULK: Final = 2
TAIL_HELD: Final = 3
"""The tail still runs on all of the job's nodes, because nobody asked for them."""
TAIL_MOVED: Final = 4
TAIL_LEASED: Final = 5
"""The tail runs on leased slots and holds no node; without slots it waits to come home."""
WAITS_TRAINING: Final = 6
TRAINING: Final = 7
SYNCING: Final = 8
"""New weights go to the rollout engines: holds no node and waits for none."""
PARKED: Final = 9
"""At an iteration's end, ready to be moved."""
DONE: Final = 10

ROLLOUT_STARTED: Final = 0
TAIL_MIGRATED: Final = 1
ROLLOUT_ENDED: Final = 2
TRAINING_STARTED: Final = 3
TRAINING_ENDED: Final = 4
JOB_PARKED: Final = 5
JOB_DONE: Final = 6
JOB_READY: Final = 7
TAIL_SENT: Final = 8
TAIL_RETURNED: Final = 9
SYNC_ENDED: Final = 10

BUSY: Final = 0
TAILS: Final = 1

NODES_MAX: Final = 62

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
        ("iterations", "i8"),
        ("park", "i8"),
        ("slo", "f8"),
        ("began_s", "f8"),
        ("solo_s", "f8"),
        ("rollout_mean_s", "f8"),
        ("training_mean_s", "f8"),
        ("sync_s", "f8"),
        ("divisible", "i8"),
        ("bulk_ratio", "f8"),
        ("tail_share", "f8"),
        ("slots", "i8"),
        ("slots_coming", "i8"),
        ("slots_ready_s", "f8"),
        ("published_s", "f8"),
        ("tail_sent", "i8"),
    ]
)
"""`left_s` and `worked_s` are solo seconds of the present stage and phase; overheads run first.
`rollout_mean_s` and `training_mean_s` are what the policy believes, never what will be; a weight
sync takes `sync_s` after every training, 0 where there is none. The last five are a job's leases:
slots that serve it, slots on their way and when they are there, since when its present weights are
published, and whether this rollout's tail was leased already."""

NODE: Final = np.dtype([("loaded", "i8"), ("warm_at_s", "f8"), ("left_at_s", "f8")])
"""`left_at_s` is when the last tail that was moved has left all but its share."""

EVENT: Final = np.dtype(
    [("t_s", "f8"), ("kind", "i8"), ("job", "i8"), ("nodes", "i8"), ("solo_s", "f8")]
)


class Rules(NamedTuple):
    """What is done for a phase that waits, and what switching costs."""

    migrate: bool
    prewarm: bool
    warm_s: float
    migrate_s: float


def empty_nodes() -> Records:
    nodes = np.zeros(NODES_MAX, dtype=NODE)
    nodes["loaded"] = -1
    return nodes


def empty_permits() -> Records:
    return np.zeros(2, dtype=np.int64)
