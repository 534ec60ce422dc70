"""`rosemux replay` and `rosemux simulate`."""

from pathlib import Path
from typing import Annotated

import typer


def replay(
    journal: Annotated[Path, typer.Argument(help="A recorded journal file.")],
    config: Annotated[
        Path | None, typer.Option(help="An agent's YAML file: what would it have granted?")
    ] = None,
    slot: Annotated[
        str | None, typer.Option(help="Slot of that file; by default the one of the journal.")
    ] = None,
) -> None:
    """Feed a recorded journal to its policy again and report the first difference.

    With --config, compare the recorded settings of a slot with others."""
    from harvester.contracts.errors import ConfigError, Corrupt
    from harvester.contracts.journal import read_journal

    if not journal.is_file():
        raise ConfigError(f"no journal at {journal}")
    _say_torn(journal)
    if next(read_journal(journal), None) is None:
        raise Corrupt(f"{journal.name}: no line is whole")
    if config is not None:
        _compare(journal, config, slot)
    else:
        _repeat(journal)


def _repeat(journal: Path) -> None:
    import msgspec

    from harvester.distribution import rosemux_version
    from scheduler.sim.replay import replay_journal

    replayed = replay_journal(journal)
    difference = replayed.difference
    if difference is None:
        if not replayed.decisions:
            typer.echo("nothing to compare: no decision yet")
            return
        typer.echo(f"identical: {replayed.decisions} decisions, {replayed.effects} effects")
        return
    typer.echo(f"{journal.name} line {difference.line}, t={difference.t_s} s differs")
    typer.echo(f"  recorded: {msgspec.json.encode(difference.recorded).decode()}")
    typer.echo(f"  replayed: {msgspec.json.encode(difference.replayed).decode()}")
    if replayed.version != (here := rosemux_version()):
        wrote = replayed.version or "an earlier version"
        typer.echo(f"  the journal is of {wrote}, this is {here}, which may decide otherwise")
    raise typer.Exit(1)


def _compare(journal: Path, config: Path, slot: str | None) -> None:
    from harvester.config_file import load_agent_config
    from harvester.contracts.journal import read_journal
    from scheduler.sim.what_if import what_if, what_if_text

    agent = load_agent_config(config, slot=slot)
    first = next(read_journal(journal))
    names = {one.name for one in agent.slots}
    recorded = getattr(first, "actor", "").removeprefix("agent:")
    chosen = agent.slot_named(slot or (recorded if recorded in names else None))
    typer.echo(what_if_text(what_if(journal, agent.settings_of(chosen))))


def _say_torn(journal: Path) -> None:
    from harvester.contracts.journal import torn_bytes

    if torn := torn_bytes(journal):
        typer.echo(f"{journal.name}: the last {torn} bytes are torn and left out", err=True)


def simulate(
    workload: Annotated[
        Path | None, typer.Option(help="CSV of jobs instead of the built-in workload.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and durations.")] = 0,
    jobs: Annotated[
        int,
        typer.Option(min=1, max=2000, help="Jobs of the built-in workload; all: 200."),
    ] = 40,
    drift: Annotated[
        str, typer.Option(help="Drift of durations: none, increasing, decreasing or mixed.")
    ] = "none",
    events: Annotated[
        Path | None, typer.Option(help="File for the events of RoseMux's arm, as JSON lines.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for the figures, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for an HTML page of the figures.")] = None,
) -> None:
    """Simulate many RL jobs on shared nodes: dollars and kept SLOs, arm by arm."""
    import msgspec
    from rich.console import Console

    from harvester.contracts.errors import ConfigError
    from harvester.platform.whole_file import make_writable, write_whole
    from scheduler.sim.rollmux.comparison import compare
    from scheduler.sim.rollmux.comparison_text import TITLES, comparison_text
    from scheduler.sim.rollmux.ledger import write_events
    from scheduler.sim.rollmux.workload import Drift, w1
    from scheduler.sim.rollmux.workload_csv import read_workload

    if html is not None:
        from scheduler.sim.rollmux.comparison_page import comparison_page
    if drift not in list(Drift):
        raise ConfigError(f"--drift {drift[:40]}: use {', '.join(Drift)}")
    if workload is not None:
        chosen = read_workload(workload, seed=seed)
    else:
        chosen = w1(seed, jobs=jobs, drift=Drift(drift))
    for path in filter(None, (events, json, html)):
        make_writable(path)
    progress = Console(stderr=True, highlight=False)
    found, ledger = compare(
        chosen,
        seed=seed,
        record=events is not None,
        on_progress=lambda arm: progress.print(f"{TITLES.get(arm, arm)} ...", style="dim"),
    )
    Console(highlight=False).print(comparison_text(found))
    if events is not None:
        write_events(ledger, events)
    if json is not None:
        write_whole(json, msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    if html is not None:
        write_whole(html, comparison_page(found))
