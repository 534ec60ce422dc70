"""`python -m scheduler.phases`: the phase control of one machine."""

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from harvester.contracts.errors import RoseMuxError
from scheduler.phases.service import serve
from scheduler.policy.phases.terms import PermitsConfig


def main() -> None:
    parser = argparse.ArgumentParser(prog="scheduler.phases", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="SQLite file; without it a restart forgets")
    parser.add_argument("--journal", type=Path, help="directory for the journal of decisions")
    defaults = PermitsConfig()
    for field in msgspec.structs.fields(PermitsConfig):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=float, default=getattr(defaults, field.name))
    given = parser.parse_args()
    names = [field.name for field in msgspec.structs.fields(PermitsConfig)]
    try:
        config = msgspec.convert({name: getattr(given, name) for name in names}, PermitsConfig)
        asyncio.run(serve(given.socket, config, state=given.state, journal=given.journal))
    except (RoseMuxError, msgspec.ValidationError) as error:
        sys.exit(f"scheduler.phases: {error}")


if __name__ == "__main__":
    main()
