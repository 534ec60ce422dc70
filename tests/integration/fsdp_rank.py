"""One rank of a sharded trainer: `python fsdp_rank.py RANK RANKS RENDEZVOUS STORE STEPS`.

FSDP2 over gloo on loopback; publishes every step's named parameters and writes what a gather of its
model gives, for the test to compare with.
"""

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weightsync.publish.settings import ExchangeSettings
from weightsync.publisher import Publisher


def _parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """One at a time, as a trainer that converts names does."""
    yield from model.named_parameters()


def main(rank: int, ranks: int, rendezvous: Path, store: Path, steps: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    torch.manual_seed(0)
    # 7 and 5 rows do not divide by the ranks; one rank holds nothing of the last bias.
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5), torch.nn.Linear(5, 1))
    model = model.bfloat16()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Publisher(
        store, rank=rank, ranks=ranks, exchange=ExchangeSettings(rank_timeout_s=120.0)
    ) as publisher:
        for step in range(1, steps + 1):
            published = publisher.publish(_parts(model), step=step)
            assert (published.version, published.is_full) == (step, step == 1)
            whole = {
                name: value.full_tensor() if isinstance(value, DTensor) else value
                for name, value in model.state_dict().items()
            }
            if rank == 0:
                save_file(whole, store.parent / f"gathered-{step}.safetensors")
            model(torch.randn(4, 6).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
