"""`rosemux agent`."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from yaml import YAMLError

from harvester.config_file import LoadedConfig, read_agent_config, read_slots_file, with_slots
from harvester.contracts.errors import ConfigError
from harvester.distribution import rosemux_version
from harvester.platform.logs import begin_log
from harvester.platform.yaml_file import parse_value


def agent(
    config: Annotated[Path, typer.Option(help="YAML file with the node's slots.")],
    mode: Annotated[str | None, typer.Option(help="off, observe or harvest.")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0 chooses a free one.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="field.path=value, over everything else.")
    ] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Check the configuration and stop.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    flags = _flags(mode, port, assignments or [])

    def load() -> LoadedConfig:
        return read_agent_config(config, flags=flags)

    loaded = load()
    if check_config:
        slots_file = loaded.config.slots_file
        found = read_slots_file(loaded, slots_file)
        if slots_file is not None and found is None:
            typer.echo(f"note: no slots file at {slots_file} yet: its slots open once it is there")
        loaded = with_slots(loaded, found)
        checked = loaded.config
        checked.check_here()
        checked.check_devices()
        from harvester.agent.shared_memory import SharedMemory

        groups = [SharedMemory(slot.memory_group) for slot in checked.slots if slot.memory_group]
        for note in (*loaded.notes, *[group.note for group in groups if group.note]):
            typer.echo(f"note: {note}")
        names = ", ".join(slot.name for slot in checked.slots) or "none yet"
        typer.echo(f"{config}: good; node {checked.node}, mode {checked.mode}, slots {names}")
        return
    begin_log(log_level)
    from harvester.agent.agent_process import AgentProcess

    asyncio.run(AgentProcess(loaded, reload=load, version=rosemux_version()).run())


def _flags(mode: str | None, port: int | None, assignments: list[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for assignment in assignments:
        field, equals, value = assignment.partition("=")
        if not field or not equals:
            raise ConfigError(f"--set {assignment}: write field.path=value")
        try:
            flags[field] = parse_value(value)
        except YAMLError as error:
            raise ConfigError(f"--set {assignment}: the value is not YAML") from error
    if mode is not None:
        flags["mode"] = mode
    if port is not None:
        flags["http.port"] = port
    return flags
