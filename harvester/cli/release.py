"""`rosemux release`: an operator's word that a quarantined slot may be offered again."""

import time
from pathlib import Path
from typing import Annotated

import typer

from harvester.agent.operator_files import RELEASE_BYTES_MAX
from harvester.config_file import load_agent_config
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from harvester.platform import whole_file

_LOOK_S = 0.05
_PATIENCE_S = 3.0


def release(
    config: Annotated[Path, typer.Option(help="The agent's YAML file.")],
    reason: Annotated[str, typer.Option(help="Reason of the release, for the journal.")],
    slot: Annotated[
        str | None, typer.Option(help="Name of the slot; may be left out if there is one.")
    ] = None,
) -> None:
    """Lift a slot's quarantine, with a reason for the journal.

    An agent that is down obeys when it starts.
    """
    agent = load_agent_config(config, slot=slot)
    chosen = agent.slot_named(slot)
    text = reason.strip().encode()
    if not text or len(text) > RELEASE_BYTES_MAX:
        raise ConfigError(f"--reason: give 1 to {RELEASE_BYTES_MAX} bytes")
    path = agent.file_of(chosen, "release")
    try:
        whole_file.replace(path, text + b"\n", mode=0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    taken = _release_taken(path)
    typer.echo(
        f"{chosen.name}: the agent has ended the slot's quarantine"
        if taken
        else f"{chosen.name}: no agent has taken it yet; the next one that starts or can write "
        f"its journal will ({path})"
    )


def _release_taken(path: Path) -> bool:
    clock = MonotonicClock()
    until_s = clock.now() + _PATIENCE_S
    while path.exists():
        if clock.now() >= until_s:
            return False
        time.sleep(_LOOK_S)
    return True
