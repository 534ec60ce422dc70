"""A job in a process of its own: `python -m tests.integration.phase_job SOCKET JOB`.

stdin    a kind of phase, to enter it; an empty line, to end it
stdout   what happened, a line each
"""

import sys
from pathlib import Path

from harvester.contracts.errors import RoseMuxError
from harvester.contracts.ids import JobId, NodeId
from scheduler.phases.control import PhaseControl
from scheduler.phases.socket_control import SocketControl
from scheduler.policy.model import PhaseKind
from scheduler.policy.phases.terms import JobTerms, PhaseTerms


def main() -> None:
    path, job = sys.argv[1:]
    nodes = {PhaseKind.ROLLOUT: "r0", PhaseKind.TRAINING: "t0"}
    phases = PhaseControl(
        SocketControl(Path(path), answer_s=1.0),
        JobTerms(
            job=JobId(job),
            phases=tuple(
                PhaseTerms(kind=kind, nodes=(NodeId(node),)) for kind, node in nodes.items()
            ),
        ),
    )
    say("placed")
    for line in sys.stdin:
        try:
            with phases.phase(line.strip()) as permit:
                say(f"granted {permit.epoch}")
                sys.stdin.readline()
            say("ended")
        except RoseMuxError as error:
            say(f"{type(error).__name__}: {error}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
