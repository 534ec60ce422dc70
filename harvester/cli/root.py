"""The command tree and what becomes of an error: one clear line on stderr and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong settings or an unsupported machine, 75 right settings and a
machine that lacks what they name (an address, a user, a file: it may come) or on which another
process still has it, 130 interrupted.
"""

import importlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from harvester.contracts.errors import ConfigError, NotYet, RoseMuxError, Unsupported
from harvester.distribution import needing, rosemux_version

EXIT_FAILED = 1
EXIT_SETTINGS = 2
EXIT_NOT_YET = os.EX_TEMPFAIL
EXIT_INTERRUPTED = 130
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """A command by module and function, imported only when it is called, so that `rosemux --help`
    needs neither an engine nor a web server."""

    target: str
    """`module:name` of a function that is a typer command, or of a typer app with several."""
    summary: str
    """Line in the list of commands; also the help of a function without a docstring."""
    in_checkout: bool = False
    """Part of the repository only: no wheel has it."""
    extra: str = ""
    """Extra of the distribution that has what the command imports beside the dependencies."""
    reads_files: bool = False
    """Only reads what agents and engines left on this machine, which not every user may."""


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
    "discover": LazyCommand(
        target="harvester.cli.discover:discover",
        summary="Write the slots of a node's production engines for its agent's slots_file.",
    ),
    "guest": LazyCommand(
        target="harvester.cli.guest:guest",
        summary="Start a slot's guest as this machine, this vLLM and your consent allow; say why.",
    ),
    "release": LazyCommand(
        target="harvester.cli.release:release",
        summary="Lift a slot's quarantine, with a reason for the journal.",
    ),
    "hold": LazyCommand(
        target="harvester.cli.stop:hold",
        summary="Stop admission: no new lease, no new turn; running turns end by themselves.",
    ),
    "drain": LazyCommand(
        target="harvester.cli.stop:drain",
        summary="Stop admission and evict what runs: grants close and leases end at once.",
    ),
    "resume": LazyCommand(
        target="harvester.cli.stop:resume",
        summary="Lift a hold or a drain of the same scope; other orders stay in force.",
    ),
    "undo": LazyCommand(
        target="harvester.cli.undo:undo",
        summary="Remove pages, locks, files and control groups of RoseMux from this host.",
    ),
    "gateway": LazyCommand(
        target="scheduler.gateway.serve_command:gateway",
        summary="Run the rollout gateway with its scheduler.",
    ),
    "engine-proxy": LazyCommand(
        target="harvester.proxy.proxy_command:engine_proxy",
        summary="Let the gateway on another machine reach an engine that listens on loopback.",
    ),
    "phases": LazyCommand(
        target="scheduler.rollmux.control.command:phases",
        summary="Run the phase control of jobs that share nodes, and show its state.",
        extra="rollmux",
    ),
    "status": LazyCommand(
        target="harvester.cli.status:status",
        reads_files=True,
        summary="Show the slots of this machine, an agent's and a gateway's engines and jobs.",
    ),
    "top": LazyCommand(
        target="harvester.cli.top:top",
        summary="Show the slots of agents live: state, lease, guards, latencies, tokens.",
    ),
    "audit": LazyCommand(
        target="harvester.cli.audit_command:audit",
        reads_files=True,
        summary="Print leases with holders and end reasons, and changes with authors.",
    ),
    "schema": LazyCommand(
        target="harvester.cli.schema_command:schema",
        summary="Print the JSON schema of a configuration file: every field, its type and meaning.",
    ),
    "profile": LazyCommand(
        target="harvester.cli.profile:profile",
        summary="Print production's learned step times as the `profile` of a slot's policy.",
    ),
    "weights": LazyCommand(
        target="weightsync.command:weights",
        summary="Pull, serve, relay and list published weights.",
        extra="weights",
    ),
    "replay": LazyCommand(
        target="scheduler.sim.simulate_commands:replay",
        reads_files=True,
        summary="Feed a recorded journal to its policy again and report the first difference.",
    ),
    "plan": LazyCommand(
        target="scheduler.rollmux.plan.plan_command:plan",
        summary="Place RL jobs on shared nodes: groups, prices, reasons and a timeline per node.",
        extra="rollmux",
    ),
    "simulate": LazyCommand(
        target="scheduler.sim.simulate_commands:simulate",
        summary="Simulate many RL jobs on shared nodes: dollars and kept SLOs, arm by arm.",
        extra="rollmux",
    ),
}


class LazyGroup(TyperGroup):
    """Lists every command from the table and imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        command = COMMANDS.get(cmd_name)
        return None if command is None else TyperCommand(cmd_name, help=command.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, placeholder, rest = super().resolve_command(ctx, args)
        if name is None or placeholder is None:
            return name, placeholder, rest
        self.called = name
        return name, load(name, COMMANDS[name]), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PermissionError as error:
            if not COMMANDS[self.called].reads_files:
                raise
            why = f"cannot read {error.filename}: {error.strerror}"
            raise ConfigError(f"{why}; run it as root or as the agent's user") from error
        except ModuleNotFoundError:  # commands import what is heavy when they run
            with needing(COMMANDS[self.called].extra, subject=f"rosemux {self.called}"):
                raise


def load(name: str, command: LazyCommand) -> Any:
    """Import a command. Raises Unsupported outside a checkout for a command of the checkout."""
    module_name, _, function_name = command.target.partition(":")
    if command.in_checkout:
        _find_in_checkout(name, module_name)
    function = getattr(importlib.import_module(module_name), function_name)
    if isinstance(function, typer.Typer):
        return get_command(function)
    app = typer.Typer(add_completion=False)
    app.command(name, help=function.__doc__ or command.summary)(function)
    return get_command(app)


def _find_in_checkout(name: str, module_name: str) -> None:
    """Makes the checkout's own modules importable. Raises Unsupported outside a checkout."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / module_name.replace(".", "/")).with_suffix(".py").is_file():
        raise Unsupported(
            f"rosemux {name} is no part of the installed package: run it from a checkout of the "
            "repository (make demo)"
        )
    # First: other distributions leave a package `examples` beside the installed ones.
    sys.path.insert(0, str(checkout))


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"rosemux {rosemux_version()}")
        raise typer.Exit


def _root(
    show_version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Lend the idle part of production LLM serving to reinforcement-learning rollouts."""


def _group() -> Any:
    app = typer.Typer(cls=LazyGroup, name="rosemux", add_completion=False, no_args_is_help=True)
    app.callback()(_root)
    return get_command(app)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `rosemux` command; leaves through SystemExit."""
    try:
        _group()(args=arguments, prog_name="rosemux")
    except NotYet as error:
        _fail(error, EXIT_NOT_YET)
    except (ConfigError, Unsupported) as error:
        _fail(error, EXIT_SETTINGS)
    except RoseMuxError as error:
        _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def plain(text: str) -> str:
    """Words of another process, which shall neither command a terminal nor add a line to it: a
    blank for each control character."""
    return _CONTROL.sub(" ", text)


def _fail(error: RoseMuxError, code: int) -> None:
    print(f"rosemux: {plain(str(error))}", file=sys.stderr)
    sys.exit(code)
