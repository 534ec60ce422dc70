"""`rosemux undo`: takes back what agent and guests left on this host."""

from pathlib import Path
from typing import Annotated

import typer

from harvester.agent.host_removal import undo as take_back
from harvester.config_file import read_agent_config
from harvester.contracts.errors import Exhausted


def undo(
    config: Annotated[Path, typer.Option(help="The agent's YAML file.")],
    records: Annotated[
        bool, typer.Option("--records", help="Remove audit, journals and states too.")
    ] = False,
) -> None:
    """Remove pages, locks, files and control groups of RoseMux from this host.

    Stop the agent and the guests first. Says what it removes and what it leaves. Exit status 0:
    nothing of it is left but what running production uses. 1: something else is left.
    """
    done = take_back(read_agent_config(config).config, records=records)
    for path in done.removed:
        typer.echo(f"removed {path}")
    for path, why in done.in_use.items():
        typer.echo(f"in use  {path}: {why}")
    for path, why in done.left.items():
        typer.echo(f"left    {path}: {why}")
    if done.left:
        raise Exhausted(f"{len(done.left)} files or groups are left: see above")
    if done.in_use:
        typer.echo(
            "once production has restarted without RoseMux, another undo or a boot removes it"
        )
    if not records:
        typer.echo("audit, journals and states stay in state_dir: --records removes them")
