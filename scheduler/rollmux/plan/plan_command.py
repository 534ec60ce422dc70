"""`rosemux plan`."""

from pathlib import Path
from typing import Annotated

import typer


def plan(
    jobs: Annotated[Path, typer.Argument(help="YAML file of jobs, nodes and prices.")],
    json: Annotated[Path | None, typer.Option(help="File for the plan, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for an HTML page of the plan.")] = None,
) -> None:
    """Place RL jobs on shared nodes: groups, prices, reasons and a timeline per node."""
    import msgspec
    from rich.console import Console

    from harvester.platform.whole_file import make_writable, write_whole
    from scheduler.rollmux.plan.drafting import draft
    from scheduler.rollmux.plan.jobs_file import read_jobs
    from scheduler.rollmux.plan.plan_text import plan_text

    if html is not None:
        from scheduler.rollmux.plan.plan_page import plan_page
    for path in filter(None, (json, html)):
        make_writable(path)
    drafted = draft(read_jobs(jobs))
    console = Console(highlight=False)
    console.print(plan_text(drafted, width=console.width))
    if json is not None:
        write_whole(json, msgspec.json.format(msgspec.json.encode(drafted), indent=1).decode())
    if html is not None:
        write_whole(html, plan_page(drafted, title=f"RoseMux plan: {jobs.name}"))
    if drafted.unplaced:
        raise typer.Exit(1)
