"""An RL job whose phases sleep: a demonstration of a planning control with two of them.

    rosemux phases serve --socket /tmp/toy/phases.sock --state /tmp/toy/phases.sqlite \
        --journal /tmp/toy --nodes examples/nodes.yaml &
    python examples/toy_job.py /tmp/toy/phases.sock math &
    python examples/toy_job.py /tmp/toy/phases.sock code &
    until rosemux phases status --socket /tmp/toy/phases.sock; do sleep 1; done

Alone an iteration takes 3 s. Both jobs have the same two nodes: while one trains, the other rolls
out, and neither may be slowed more than 1.9 times.
"""

import argparse
import time
from pathlib import Path

from scheduler import JobSpec, PhaseClient, PhaseKind, PhaseSpec, SocketTransport

GB = 10**9
STEPS = 20


def submission(given: argparse.Namespace) -> JobSpec:
    """The job's declaration; `max_s` is a phase with every response at its token limit."""
    return JobSpec(
        job=given.job,
        slo=1.9,
        host_bytes=400 * GB,
        phases=(
            PhaseSpec(kind=PhaseKind.ROLLOUT, max_s=1.5 * given.rollout_s),
            PhaseSpec(kind=PhaseKind.TRAINING, max_s=1.5 * given.training_s),
        ),
    )


def places(permit: PhaseClient.Permit) -> str:
    """The permit's nodes, with the accelerators of partly held ones."""
    parts = permit.accelerators
    return " ".join(f"{node}{list(parts[node]) if node in parts else ''}" for node in permit.nodes)


def roll_out(permit: PhaseClient.Permit, seconds: float) -> None:
    """Says how far it is, and makes room for a job that waits, as a real rollout's tail would."""
    for step in range(STEPS):
        time.sleep(seconds / STEPS)
        permit.progress((step + 1) / STEPS)
        if permit.keep is not None:
            # Here the open responses go to the accelerators that the permit keeps.
            permit.narrowed()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("job")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--rollout-s", type=float, default=2.0)
    parser.add_argument("--training-s", type=float, default=1.0)
    given = parser.parse_args()

    def moved(move: PhaseClient.Move) -> None:
        """Frees the old nodes' state between two iterations; the next permit is on the new
        nodes."""
        say(f"moves to {move.text}")

    def say(words: str) -> None:
        print(f"{given.job}: {words}", flush=True)

    phases = PhaseClient(SocketTransport(given.socket), submission(given), on_move=moved)
    place = phases.placement
    assert place is not None
    say(f"{place.group} on {place.text}: {place.reason}")
    for iteration in range(1, given.iterations + 1):
        with phases.phase("rollout") as permit:
            say(f"iteration {iteration} rolls out on {places(permit)}")
            roll_out(permit, given.rollout_s)
        with phases.phase("training") as permit:
            say(f"iteration {iteration} trains on {' '.join(permit.nodes)}")
            time.sleep(given.training_s)
    phases.forget()


if __name__ == "__main__":
    main()
