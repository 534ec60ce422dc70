"""`python -m benchmarks.migration --json PATH`: does a turn that moves equal the one that stays?

`forced` moves turns at chosen tokens, `faults` rolls trajectories out under kills, stalls, revoked
leases and version switches, `bias` compares sampled turns with and without moves.
"""

import argparse
import json
import signal
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.migration.bias_run import bias_faults, measured_bias
from benchmarks.migration.comparison import differing
from benchmarks.migration.deployment import CONTEXTS, deployed
from benchmarks.migration.faults import convicted, measured_faults, publishing
from benchmarks.migration.forced_moves import measured_moves
from benchmarks.migration.model import write_model

PARTS = ("forced", "faults", "bias")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.migration", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="parts; all of them by default")
    parser.add_argument("--quick", action="store_true", help="a tenth of the turns")
    parser.add_argument("--turns", type=int, help="moved turns of each setting of `forced`")
    parser.add_argument("--trajectories", type=int, help="of `faults`")
    parser.add_argument("--sampled", type=int, help="turns of `bias`, both arms together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a new folder for records and logs")
    given = parser.parse_args()
    # So that the engines end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found: dict[str, Any] = {}
    try:
        uvloop.run(measure(given, found))
    finally:
        text = json.dumps(found, indent=1)
        if given.json is not None:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(text)
        print(text)
    judges = {"forced": differing, "faults": convicted, "bias": bias_faults}
    faults = {part: judges[part](each) for part, each in found.items()}
    if any(faults.values()):
        sys.exit(f"convicted: {faults}")


async def measure(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Adds each part's result to `found` as soon as it has ended."""
    parts = given.only or PARTS
    if "forced" in parts:
        turns = given.turns or (2 if given.quick else 16)
        found["forced"] = await measured_moves(turns=turns, seed=given.seed)
    if not {"faults", "bias"} & set(parts):
        return
    async with AsyncExitStack() as stack:
        if given.keep is not None:
            given.keep.mkdir(parents=True)
            root = given.keep
        else:
            folder = tempfile.TemporaryDirectory(prefix="rosemux-migration-")
            root = Path(stack.enter_context(folder))
        model = root / "model"
        texts = [path.read_text() for path in sorted(Path("docs").glob("*.md"))]
        write_model(model, texts=texts, context_tokens=max(CONTEXTS.values()), seed=given.seed)
        deployment = await stack.enter_async_context(deployed(root, model))
        publisher = await stack.enter_async_context(publishing(deployment, model))
        if "bias" in parts:
            turns = given.sampled or (500 if given.quick else 5000)
            found["bias"] = await measured_bias(
                deployment, model, turns=turns, blocks=max(2, turns // 250), seed=given.seed
            )
        if "faults" in parts:
            found["faults"] = await measured_faults(
                deployment,
                publisher,
                model,
                trajectories=given.trajectories or (100 if given.quick else 1000),
                seed=given.seed,
            )


if __name__ == "__main__":
    main()
