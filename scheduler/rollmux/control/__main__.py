"""`python -m scheduler.rollmux.control`: `rosemux phases serve` without the other commands."""

import sys

import typer

from harvester.contracts.errors import RoseMuxError
from scheduler.rollmux.control.command import serve


def main() -> None:
    app = typer.Typer(add_completion=False)
    app.command(help=serve.__doc__)(serve)
    try:
        app(prog_name="scheduler.rollmux.control")
    except RoseMuxError as error:
        sys.exit(f"scheduler.rollmux.control: {error}")


if __name__ == "__main__":
    main()
