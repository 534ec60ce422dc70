"""A submitted job in a process of its own.

`python -m tests.integration.planned_job SOCKET JOB SLO`

stdin    a kind of phase, to enter it; an empty line, to end it; `forget`
stdout   what happened, a line each
"""

import sys
from pathlib import Path

from harvester.contracts.errors import RoseMuxError
from harvester.contracts.ids import JobId
from scheduler.model import JobSpec, PhaseSpec
from scheduler.rollmux.cluster.job_limits import KINDS
from scheduler.rollmux.cluster.runtime_events import (
    OrderMove,
)
from scheduler.rollmux.control.phase_client import PhaseClient
from scheduler.rollmux.control.socket_transport import SocketTransport


def main() -> None:
    path, job, slo = sys.argv[1:]
    asked = JobSpec(
        job=JobId(job),
        slo=float(slo),
        host_bytes=400,
        phases=tuple(PhaseSpec(kind=kind, max_s=600.0) for kind in KINDS),
    )
    phases = PhaseClient(SocketTransport(Path(path), answer_s=2.0), asked, on_move=told)
    place = phases.placement
    assert place is not None
    say(f"placed {' '.join(place.nodes)}")
    for line in sys.stdin:
        if line.strip() == "forget":
            phases.forget()
            say("forgotten")
            continue
        try:
            with phases.phase(line.strip()) as permit:
                say(f"granted {' '.join(permit.nodes)}")
                sys.stdin.readline()
            say("ended")
        except RoseMuxError as error:
            say(f"{type(error).__name__}: {error}")


def told(move: OrderMove) -> None:
    say(f"moves {' '.join(move.nodes)}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
