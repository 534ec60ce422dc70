"""`python -m tests.explore [lease|permit|version ...] --states N`: what may happen to a protocol?

Explores each protocol to N states and prints how far that is. Ends with 1 at a violation, whose
shortest way is printed as steps.
"""

import resource
import sys
from typing import Annotated, Any

import typer

from tests.explore.lease import LeaseModel
from tests.explore.permit import PermitModel
from tests.explore.search import explore
from tests.explore.version import VersionModel

MODELS: dict[str, Any] = {"lease": LeaseModel, "permit": PermitModel, "version": VersionModel}
_MIB = 1024


def main(
    protocols: Annotated[list[str] | None, typer.Argument(help="All of them, if none.")] = None,
    states: Annotated[int, typer.Option(help="States of each protocol.")] = 1_000_000,
) -> None:
    broken = False
    for name in protocols or list(MODELS):
        if name not in MODELS:
            raise typer.BadParameter(f"{name}: there are {', '.join(MODELS)}")
        found = explore(MODELS[name](), states=states)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // _MIB
        print(f"{name}: {found}; at most {peak_mib:,} MiB", flush=True)
        broken |= bool(found.fault)
    sys.exit(int(broken))


if __name__ == "__main__":
    typer.run(main)
