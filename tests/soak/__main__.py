"""`python -m tests.soak --hours 8`: do all parts keep their promises for hours, whatever fails?

Runs real engines, agent, gateway and clients with a fault every half minute, in pieces: Ctrl-C or
SIGTERM ends one, the same command goes on. Judges all pieces and ends with 1 at a violation.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.testbed.prerequisites import check_machine
from harvester.contracts.errors import RoseMuxError
from tests.soak.judge import judged, soaked_s
from tests.soak.leavings import SHARED
from tests.soak.piece import PiecePlan, SoakPiece, ends_by
from tests.soak.processes import end_strays
from tests.soak.records import SoakRecord, read_records

_MOUNTS = "ROSEMUX_SOAK_MOUNTS"
"""Set in a process that has mounts of its own."""


def main(
    out: Annotated[Path, typer.Option("--out", "--resume", help="Records of all pieces.")] = Path(
        "out/soak"
    ),
    hours: Annotated[float, typer.Option(help="Of all pieces together.")] = 8.0,
    minutes: Annotated[float | None, typer.Option(help="In place of hours.")] = None,
    piece_minutes: Annotated[float | None, typer.Option(help="End this piece after.")] = None,
    every_s: Annotated[float, typer.Option(help="Seconds from one fault to the next.")] = 30.0,
    publish_s: Annotated[float, typer.Option(help="Seconds from one version to the next.")] = 180.0,
    seed: Annotated[int, typer.Option(help="Of faults, loads and weights.")] = 1,
    lift_starts: Annotated[
        bool, typer.Option(help="Guests start outside of their idle group: for a full machine.")
    ] = False,
    fresh: Annotated[bool, typer.Option(help="Remove the pieces that are there.")] = False,
    judge_only: Annotated[bool, typer.Option(help="Run no piece.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="The summary.")] = None,
) -> None:
    """Resumes the soak in `out`, and judges all of its pieces."""
    if fresh:
        shutil.rmtree(out, ignore_errors=True)
    done = _pieces(out)
    before_s = sum(map(soaked_s, done))
    left_s = (hours * 3600.0 if minutes is None else minutes * 60.0) - before_s
    if piece_minutes is not None:
        left_s = min(left_s, piece_minutes * 60.0)
    if left_s > 0 and not judge_only:
        _own_mounts()
        plan = PiecePlan(
            out=out.absolute(),
            number=len(done),
            seed=seed,
            seconds=left_s,
            every_s=every_s,
            publish_s=publish_s,
            soaked_s=before_s,
            lift_starts=lift_starts,
            own_mounts=_MOUNTS in os.environ,
        )
        try:
            end_strays()
            check_machine()
            asyncio.run(_run(plan))
        except RoseMuxError as error:
            print(f"soak: {error}", file=sys.stderr)
            sys.exit(2)
    verdict = judged(_pieces(out))
    summary = json.dumps(verdict.plain(), indent=1)
    print(summary)
    if json_file is not None:
        json_file.write_text(summary + "\n")
    sys.exit(int(verdict.violations > 0))


async def _run(plan: PiecePlan) -> None:
    stopped = asyncio.Event()
    ends_by(stopped)
    await SoakPiece(plan, stopped=stopped).run()


def _pieces(out: Path) -> list[list[SoakRecord]]:
    return [list(read_records(path)) for path in sorted(out.glob("piece-*.jsonl"))]


def _own_mounts() -> None:
    """As root, goes on in a mount namespace of its own: what is left in its shared memory is the
    soak's, and a small disk can be filled. Without root the fault `disk full` is skipped."""
    if _MOUNTS in os.environ or os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    mount = f"mount -t tmpfs -o size=2g tmpfs {SHARED}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        return
    again = ["-m", "tests.soak", *sys.argv[1:]]
    if "--fresh" in again:
        again.remove("--fresh")  # It has been done.
    os.execvpe(
        "unshare",
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, *again],
        {**os.environ, _MOUNTS: "1"},
    )


if __name__ == "__main__":
    typer.run(main)
