"""Child of test_weightsync_parallel.py: two tensor-parallel engines of one checkpoint, in turn.

The first loads it, the second follows a store; writes seen.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration.weightsync_derived_engine import checkpoints
from tests.integration.weightsync_engine import generated, new_engine, update

PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def _reports(engine: Any) -> list[dict[str, Any]]:
    """Of each rank."""
    return list(engine.collective_rpc("rosemux_weights"))


def main(root: Path) -> None:
    states = checkpoints(root)
    fresh = new_engine(str(root / "second"), **PARALLEL)
    seen: dict[str, Any] = {"fresh": generated(fresh)}
    fresh.llm_engine.engine_core.shutdown()
    following = new_engine(
        str(root / "first"),
        load_format="dummy",
        weight_transfer_config={"backend": "rosemux"},
        **PARALLEL,
    )

    from weightsync.publisher import Publisher

    with Publisher(Path(os.environ["ROSEMUX_WEIGHT_ROOT"]) / "experts") as publisher:
        seen["published"] = [publisher.publish(state).state_hash for state in states]
    for version in (1, 2):
        update(following, store="experts", version=version)
        seen[f"reports_{version}"] = _reports(following)
        seen[f"version_{version}"] = generated(following)
    (root / "seen.json").write_text(json.dumps(seen))
    following.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
