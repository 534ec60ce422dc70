"""Which subcommands there are and where each one lives.

A command is named here by module and function and imported only when it is called, so that
`rosemux --help` needs neither an engine nor a web server.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    target: str
    """`module:name` of a function that is a typer command, or of a typer app with several."""
    summary: str
    in_checkout: bool = False
    """Part of the repository only: no wheel has it."""


COMMANDS: dict[str, LazyCommand] = {
    "demo": LazyCommand(
        target="examples.demo.command:demo",
        summary="Run production, a guest and an RL job on this machine and compare three arms.",
        in_checkout=True,
    ),
    "agent": LazyCommand(
        target="harvester.cli.agent:agent",
        summary="Run the node agent: watch production, grant its idle part, take it back.",
    ),
    "guest": LazyCommand(
        target="harvester.cli.guest:guest",
        summary="Start a slot's guest, or print its isolation and memory without a start.",
    ),
    "release": LazyCommand(
        target="harvester.cli.release:release",
        summary="Lift a slot's quarantine, with a reason for the journal.",
    ),
    "gateway": LazyCommand(
        target="scheduler.gateway.command:gateway",
        summary="Run the rollout gateway with its scheduler.",
    ),
    "phases": LazyCommand(
        target="scheduler.rollmux.control.command:phases",
        summary="Run the phase control of jobs that share nodes, and show its state.",
    ),
    "status": LazyCommand(
        target="harvester.cli.status:status",
        summary="Show the slots of this machine: production, grant, guest and lease.",
    ),
    "profile": LazyCommand(
        target="harvester.cli.profile:profile",
        summary="Print production's learned step times, to start another slot from.",
    ),
    "weights": LazyCommand(
        target="weightsync.command:weights",
        summary="Pull, serve, relay and list published weights.",
    ),
    "replay": LazyCommand(
        target="scheduler.sim.command:replay",
        summary="Feed a recorded journal to its policy again and report the first difference.",
    ),
    "plan": LazyCommand(
        target="scheduler.rollmux.plan.command:plan",
        summary="Place RL jobs on shared nodes: groups, prices, reasons and timelines.",
    ),
    "simulate": LazyCommand(
        target="scheduler.sim.command:simulate",
        summary="Simulate many RL jobs on shared nodes: dollars and kept SLOs, arm by arm.",
    ),
    "simulate-fleet": LazyCommand(
        target="scheduler.sim.command:simulate_fleet",
        summary="Simulate rollouts of a small fleet, with and without leased guests.",
    ),
}
