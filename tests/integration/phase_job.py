"""A job in a process of its own: `python -m tests.integration.phase_job SOCKET JOB [GATEWAY]`.

stdin    a kind of phase, to enter it; in it a share, for progress; an empty line, to end it
stdout   what happened, a line each
"""

import sys
from pathlib import Path

from harvester.contracts.errors import RoseMuxError
from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.control.job_gateway import GatewayAccess
from scheduler.rollmux.control.phase_client import PhaseClient
from scheduler.rollmux.control.socket_transport import SocketTransport
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms


def main() -> None:
    path, job, *gateway = sys.argv[1:]
    nodes = {PhaseKind.ROLLOUT: "r0", PhaseKind.TRAINING: "t0"}
    phases = PhaseClient(
        SocketTransport(Path(path), answer_s=1.0),
        JobTerms(
            job=JobId(job),
            phases=tuple(
                PhaseTerms(kind=kind, nodes=(NodeId(node),)) for kind, node in nodes.items()
            ),
        ),
        gateway=GatewayAccess(url=gateway[0]) if gateway else None,
    )
    say("placed")
    for line in sys.stdin:
        try:
            with phases.phase(line.strip()) as permit:
                say(f"granted {permit.epoch}")
                while share := sys.stdin.readline().strip():
                    permit.progress(float(share))
            say("ended")
        except RoseMuxError as error:
            say(f"{type(error).__name__}: {error}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
