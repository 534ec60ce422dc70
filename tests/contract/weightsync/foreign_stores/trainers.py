"""Runs the writers of slime, miles, SkyRL and stitch from checkouts of their repositories.

None of their code is in this repository. Stand-ins replace the writers' imports of an accelerator,
Megatron or Ray, so that two gloo processes on a CPU are their source ranks; the code that diffs,
encodes, hashes, names and writes is theirs.

    python -m tests.contract.weightsync.foreign_stores.trainers --slime DIR --miles DIR \
        --skyrl DIR --stitch DIR [--out DIR]      writes the golden stores anew
"""

import argparse
import importlib
import os
import shutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

State = Mapping[str, torch.Tensor]
GOLDEN = Path(__file__).parent / "golden"
BASE = GOLDEN / "base"
RANKS = 2


def states() -> list[State]:
    """The checkpoint and three versions; the second moves nothing, the third two tensors."""
    torch.manual_seed(11)
    first = {
        "embed": torch.randn(40, 16).bfloat16(),
        "layer.weight": torch.randn(24, 16).bfloat16(),
        "layer.scale": torch.randn(24),
        "norm": torch.ones(16),
    }
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["embed"][3] *= 1.01
    second["layer.weight"][::5] += 0.02
    second["layer.scale"][8] = float("nan")
    third = {name: tensor.clone() for name, tensor in second.items()}
    last = {name: tensor.clone() for name, tensor in third.items()}
    last["layer.weight"][7] *= 0.97
    last["norm"][1] = 7.0
    return [first, second, third, last]


def write_base(directory: Path, state: State) -> None:
    """A checkpoint in two shards; the engines' and trainers' common start."""
    directory.mkdir(parents=True)
    names = sorted(state)
    for at, shard in enumerate((names[:2], names[2:]), start=1):
        part = {name: state[name] for name in shard}
        path = directory / f"model-{at:05d}-of-00002.safetensors"
        safetensors.torch.save_file(part, path, metadata={"format": "pt"})


def slime(checkout: Path, root: Path, base: Path, run: Sequence[State], **options: str) -> None:
    """`update_weights` for the baseline and for every further state, on two source ranks."""
    _ranks(_slime_rank, checkout, root, base, run, options)


def miles(checkout: Path, root: Path, base: Path, run: Sequence[State], **options: str) -> None:
    _ranks(_miles_rank, checkout, root, base, run, options)


def stitch(checkout: Path, root: Path, version: Path | None) -> None:
    """Claims the run `root`'s name, or publishes a version that lies in its `updates`."""
    sys.path.insert(0, str(checkout / "src"))
    publish = importlib.import_module("stitch.publish")
    stores = importlib.import_module("stitch.stores.modal_volume")
    store = stores.ModalVolumeStore(root, run_id=root.name)
    if version is None:
        publish.claim_run(store, None, root.name)
    else:
        publish.publish_version(store, None, str(version), run_id=root.name)


def skyrl(checkout: Path, root: Path, base: Path, run: Sequence[State], staging: Path) -> None:
    _packages(checkout, "skyrl.backends.skyrl_train.weight_sync")
    at = "skyrl.backends.skyrl_train.weight_sync"
    written = importlib.import_module(f"{at}.delta_checkpoint")
    chunk = importlib.import_module(f"{at}.base").WeightChunk
    publisher = written.DeltaCheckpointPublisher(str(base), str(root), str(staging))
    for state in run[1:]:
        names = list(state)
        given = chunk(
            names=names,
            dtypes=[str(state[name].dtype) for name in names],
            shapes=[list(state[name].shape) for name in names],
            tensors=[state[name] for name in names],
        )
        publisher.publish(publisher.create_delta_files([given]))


def _ranks(rank_main: Callable[..., None], *arguments: Any) -> None:
    port = 20000 + os.getpid() % 20000
    mp.spawn(_rank, args=(rank_main, port, arguments), nprocs=RANKS)


def _rank(rank: int, rank_main: Callable[..., None], port: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    rank_main(rank, *arguments)
    dist.destroy_process_group()


def _shares(rank: int, state: State, replicated: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors in turn; both ranks have a replicated one, as with tied embeddings."""
    own = {name: t for at, (name, t) in enumerate(state.items()) if at % RANKS == rank}
    return [*own.items(), *((n, t) for n, t in state.items() if n == replicated and n not in own)]


def _arguments(root: Path, base: Path, options: Mapping[str, str]) -> argparse.Namespace:
    return argparse.Namespace(
        update_weight_disk_dir=str(root),
        hf_checkpoint=str(base),
        update_weight_local_checkpoint_dir="",
        update_weight_delta_encoding=options["encoding"],
        update_weight_delta_checksum=options["checksum"],
        custom_update_weight_post_write_path=None,
        check_weight_update_equal=False,
        pause_generation_mode="retract",
    )


def _slime_rank(
    rank: int, checkout: Path, root: Path, base: Path, run: Sequence[State], options: dict[str, str]
) -> None:
    at = "slime.backends.megatron_utils.update_weight"
    _packages(checkout, at, "slime.utils")
    _stand_ins()
    _module("slime.utils.accelerator", current_device=lambda: "cpu")
    _module("slime.utils.distributed_utils", get_gloo_group=lambda: dist.group.WORLD)

    class Base:
        def __init__(self, args: Any, *_: Any, **__: Any) -> None:
            self.args, self.weight_version, self.update_weight_metrics = args, 0, {}

        def _iter_non_expert_chunks(self) -> Any:
            yield _shares(rank, self.state, options.get("replicated", ""))

        def _iter_expert_chunks(self) -> Any:
            yield []

    _module(f"{at}.update_weight_from_distributed", UpdateWeightFromDistributed=Base)
    written = importlib.import_module(f"{at}.update_weight_from_disk_delta")
    _publish(written.UpdateWeightFromDiskDelta, _arguments(root, base, options), run)


def _miles_rank(
    rank: int, checkout: Path, root: Path, base: Path, run: Sequence[State], options: dict[str, str]
) -> None:
    above = "miles.backends.megatron_utils.update_weight"
    at = f"{above}.update_weight_from_distributed"
    _packages(checkout, at, "miles.utils", "miles.backends.training_utils")
    _stand_ins()
    rank_zero = types.SimpleNamespace(rank=0)
    state = types.SimpleNamespace(intra_dp_cp=rank_zero, tp=rank_zero)
    _module("miles.backends.training_utils.parallel", get_parallel_state=lambda: state)
    _module("miles.utils.distributed_utils", get_gloo_group=lambda: dist.group.WORLD)
    _module(f"{above}.common", _check_weight_sync_results=lambda *_, **__: None)

    class Mixin:
        def _init_lora(self, **_: Any) -> None: ...

        def _gather_and_update_non_expert_weights(self, update: Any, pbar: Any = None) -> None:
            update(_shares(rank, self.state, options.get("replicated", "")), pbar)

        def _gather_and_update_expert_weights(self, update: Any, pbar: Any = None) -> None: ...

    _module(f"{at}.mixin", DistBucketedWeightUpdateMixin=Mixin)
    _module("tqdm", tqdm=lambda **_: None)
    written = importlib.import_module(f"{at}.delta")
    torch.cuda.current_device = lambda: "cpu"
    _publish(written.UpdateWeightFromDiskDelta, _arguments(root, base, options), run)


def _publish(writer: Any, arguments: argparse.Namespace, run: Sequence[State]) -> None:
    updates = writer(arguments, [], dict, model_name="m", quantization_config=None)
    updates.connect_rollout_engines([], None)
    for state in run:
        updates.state = state
        updates.update_weights()


def _stand_ins() -> None:
    _module("ray", get=lambda given: given)
    _module("ray.actor", ActorHandle=object)
    mpu = types.SimpleNamespace(
        get_data_parallel_rank=lambda **_: 0, get_tensor_model_parallel_rank=lambda: 0
    )
    _module("megatron")
    _module("megatron.core", mpu=mpu)


def _module(name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


def _packages(checkout: Path, *names: str) -> None:
    """Packages without their `__init__`, which would import the whole trainer."""
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = types.ModuleType(".".join(parts[:end]))
            package.__path__ = [str(checkout.joinpath(*parts[:end]))]
            sys.modules.setdefault(package.__name__, package)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("slime", "miles", "skyrl", "stitch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=GOLDEN)
    given = parser.parse_args()
    out: Path = given.out
    shutil.rmtree(out, ignore_errors=True)
    run = states()
    base = out / "base"
    write_base(base, run[0])
    for version, state in enumerate(run[1:], start=1):
        safetensors.torch.save_file(dict(state), out / f"state-{version}.safetensors")
    slime(given.slime, out / "slime-xor", base, run, encoding="xor", checksum="xxh3-128")
    slime(given.slime, out / "slime-overwrite", base, run, encoding="overwrite", checksum="blake3")
    tied = {"encoding": "xor", "checksum": "xxh3-128", "replicated": "embed"}
    slime(given.slime, out / "slime-replicated", base, run, **tied)
    miles(given.miles, out / "miles-xor", base, run, **(tied | {"checksum": "blake3"}))
    miles(given.miles, out / "miles-overwrite", base, run, encoding="overwrite", checksum="adler32")
    stitched = out / "stitch"
    stitched.mkdir()
    stitch(given.stitch, stitched, None)
    slime(given.slime, stitched / "updates", base, run, encoding="xor", checksum="xxh3-128")
    for version in (1, 2, 3):
        stitch(given.stitch, stitched, stitched / "updates" / f"weight_v{version:06d}")
    staging = out / "staging" / "x"
    skyrl(given.skyrl, out / "skyrl", base, run, staging)
    shutil.rmtree(staging.parent)


if __name__ == "__main__":
    main()
