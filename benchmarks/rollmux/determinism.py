"""Determinism of one seed: equal events in other processes and under other hash seeds."""

import hashlib
import os
import subprocess
import sys

from harvester.contracts.errors import ConfigError

HASH_SEEDS = (0, 1, 4242)
_PROGRAM = """
import hashlib, sys, msgspec
from scheduler.sim.rollmux.arms import ARMS, run_arm
from scheduler.sim.rollmux.disruptions import Disruptions
from scheduler.sim.rollmux.workload import Drift, w1

jobs = w1(3, jobs=int(sys.argv[1]), drift=Drift.MIXED, wide_ratio=0.1)
harsh = Disruptions(seed=3, node_mtbf_s=100 * 3600.0, leaving_ratio=0.1)
run = run_arm(ARMS["ours"], jobs, seed=3, record=True, disruptions=harsh)
print(hashlib.sha256(msgspec.json.encode(run.ledger.events)).hexdigest())
"""


def deterministic(*, jobs: int = 24) -> bool:
    """Whether a run with drift, wide jobs and failures writes the same events every time."""
    return len({events_digest(hash_seed=seed, jobs=jobs) for seed in (*HASH_SEEDS, 0)}) == 1


def events_digest(*, hash_seed: int, jobs: int) -> str:
    """SHA-256 of our arm's events, from a process of its own.

    Raises ConfigError if that process fails.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(jobs)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    digest = done.stdout.strip()
    if done.returncode or len(digest) != 2 * hashlib.sha256().digest_size:
        raise ConfigError(f"a run under hash seed {hash_seed} failed: {done.stderr[-400:]}")
    return digest
