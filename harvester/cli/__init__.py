"""The `rosemux` command."""

from harvester.cli.root import main

__all__ = ["main"]
