"""`rosemux phases status` in a terminal of 80 columns."""

from io import StringIO

import pytest
from rich.console import Console

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.cluster.job_placement import PlacementStage
from scheduler.rollmux.control.printed import printed
from scheduler.rollmux.control.wire import JobStatus, PlanStatus
from scheduler.rollmux.permits.job_permit import PermitStage

HEADINGS = [
    "job",
    "phase",
    "stage",
    "holds",
    "waits",
    "for",
    "complete",
    "failures",
    "group",
    "rollout",
    "training",
    "slow-down",
    "SLO",
    "credit",
    "s",
    "iterations",
    "moves",
]


def shown(*jobs: JobStatus) -> list[str]:
    console = Console(file=StringIO(), width=80)
    console.print(printed(jobs))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def status(job: str, nodes: tuple[str, ...]) -> JobStatus:
    half = len(nodes) // 2
    names = tuple(map(NodeId, nodes))
    plan = PlanStatus(
        job=JobId(job),
        stage=PlacementStage.PLACED,
        group="group-1024",
        rollout_nodes=names[:half],
        training_nodes=names[half:],
        moves_to=(),
        reason="it joins group-1024",
        slo=1.95,
        slowdown=11.25,
        credit_s=-12345.0,
        iterations=12345,
        moves=12,
        waits_s=0.0,
    )
    return JobStatus(
        job=JobId(job),
        stage=PermitStage.RUNNING,
        kind=PhaseKind.TRAINING,
        nodes=names,
        awaits=names,
        complete_ratio=1.0,
        warned=True,
        failures=100,
        plan=plan,
    )


@pytest.mark.parametrize(
    ("job", "nodes"),
    [
        ("a", ("r0", "t0")),
        ("mathematics-of-several-steps-32b-instruct", ("h100-rack17-node03",) * 8),
    ],
)
def test_headings_and_numbers_stay_whole_and_names_are_wrapped(
    job: str, nodes: tuple[str, ...]
) -> None:
    lines = shown(status(job, nodes))
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    whole = {word for line in lines for word in line.split()}
    assert whole.issuperset(HEADINGS)
    assert whole.issuperset(("100%", "11.25", "1.95", "-12345", "12345", "group-1024"))
    permits = lines[1 : lines.index("")]
    width = lines[0].index("phase")
    assert "".join(line[:width].strip() for line in permits) == job
