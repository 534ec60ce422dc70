"""Child of test_weightsync_foreign.py: an engine follows stores as other trainers leave them.

The engine is started from the trainers' checkpoint and is told nothing else of it. With a directory
of checkouts in FOREIGN_TRAINERS (slime, miles, skyrl, stitch below it) their own code writes the
stores; without it DeltaTrainer does, which a contract test holds to what they write.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.contract.weightsync.foreign_stores import trainers
from tests.integration.slime_writer import DeltaTrainer

VERSIONS = (1, 2, 3)


def write_stores(stores: Path, base: Path, run: list[trainers.State]) -> list[str]:
    """Every store holds the versions 1 to 3 of the run."""
    checkouts = os.environ.get("FOREIGN_TRAINERS")
    if checkouts is None:
        for name, encoding, checksum in (
            ("slime", "xor", "xxh3-128"),
            ("miles", "overwrite", "blake3"),
        ):
            trainer = DeltaTrainer(
                stores / name, base, encoding=encoding, checksum=checksum, ranks=2
            )
            for state in run[1:]:
                trainer.update(state)
        return ["slime", "miles"]
    at = Path(checkouts)
    options = {"encoding": "xor", "checksum": "xxh3-128"}
    trainers.slime(at / "slime", stores / "slime", base, run, **options)
    trainers.miles(
        at / "miles", stores / "miles", base, run, encoding="overwrite", checksum="blake3"
    )
    trainers.stitch(at / "stitch", stores / "stitch", None)
    trainers.slime(at / "slime", stores / "stitch" / "updates", base, run, **options)
    for version in VERSIONS:
        written = stores / "stitch" / "updates" / f"weight_v{version:06d}"
        trainers.stitch(at / "stitch", stores / "stitch", written)
    trainers.skyrl(at / "skyrl", stores / "skyrl", base, run, stores.parent / "staging" / "x")
    return ["slime", "miles", "stitch", "skyrl"]


def main(root: Path) -> None:
    # The ranks of a trainer import this module too, and need none of these.
    from tests.integration.weightsync_engine import (
        generated,
        new_engine,
        new_model,
        new_steps,
        refused,
        saved,
        update,
    )

    stores = Path(os.environ["ROSEMUX_WEIGHT_ROOT"])
    model = new_model()
    run = new_steps(model)[:4]
    base = saved(model, run[0], root / "hf")
    seen: dict[str, Any] = {"stores": write_stores(stores, Path(base), run), "fresh": {}}
    alive = []
    for version in (2, 3):
        fresh = new_engine(saved(model, run[version], root / f"version_{version}"))
        seen["fresh"][version] = generated(fresh)
        alive.append(fresh)
    engine = new_engine(base, weight_transfer_config={"backend": "rosemux"})
    for store in seen["stores"]:
        seen[store] = {}
        for version in VERSIONS:
            report = update(engine, store=store, version=version)
            seen[store][version] = {"report": report, "generated": generated(engine)}
    shard = min((stores / "slime" / "weight_v000003").glob("*.safetensors"))
    whole = shard.read_bytes()
    checksum = re.findall(rb'"([0-9a-f]{32})"', whole)[0]
    update(engine, store="miles", version=3)
    update(engine, store="slime", version=2)
    shard.write_bytes(whole.replace(checksum, checksum[::-1]))
    seen["refused"] = refused(engine, store="slime", version=3)
    seen["after_refusal"] = generated(engine)
    shard.write_bytes(whole)
    update(engine, store="slime", version=3)
    seen["repaired"] = generated(engine)
    (root / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
