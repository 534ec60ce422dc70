"""`python -m scheduler.phases`: what `rosemux phases serve` does, without the other commands."""

import sys

import typer

from harvester.contracts.errors import RoseMuxError
from scheduler.phases.command import serve


def main() -> None:
    app = typer.Typer(add_completion=False)
    app.command(help=serve.__doc__)(serve)
    try:
        app(prog_name="scheduler.phases")
    except RoseMuxError as error:
        sys.exit(f"scheduler.phases: {error}")


if __name__ == "__main__":
    main()
