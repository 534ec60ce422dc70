"""Publish a checkpoint as the next version of a job; the publisher tells the gateway.

    python examples/publish.py --checkpoint model.safetensors --store /srv/weights/job-a --job job-a

In a trainer it is two lines, the first of them once:

    publisher = Publisher("/srv/weights/job-a", announce="http://127.0.0.1:8300/v1/jobs/job-a")
    published = publisher.publish(model.state_dict())

The second returns when the version is durable. The gateway hears of it in the background, and
`publisher.announced(timeout_s)` is `served` once every dedicated engine serves it, and
`announced, not active` where they serve another job until this one is activated.

A sharded trainer (FSDP2, tensor parallel) does the same on every rank, without a gather:

    publisher = sharded_publisher("/srv/weights/job-a", announce=job_url)
    published = publisher.publish(model.state_dict(), step=step)

Megatron-style ranks declare their parts: `("embed_tokens.weight", rows_of(part, rank, shape))`.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync import Publisher, ShardSlice

if TYPE_CHECKING:
    import torch


def sharded_publisher(store: str, *, announce: str = "") -> Publisher:
    """This rank's; the copy in `copy_dir` lets a restarted trainer go on with a delta."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    copies = Publisher.Work(copy_dir="/var/tmp/rosemux-copies")
    return Publisher(store, rank=rank, ranks=ranks, work=copies, announce=announce)


def rows_of(part: "torch.Tensor", rank: int, shape: tuple[int, ...]) -> ShardSlice:
    """The `rank`-th of equal blocks of rows of a tensor of `shape`."""
    return ShardSlice(part, shape, dim=0, offset=rank * part.shape[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="a safetensors file")
    parser.add_argument("--store", type=Path, required=True, help="this job's weight store")
    parser.add_argument("--job", required=True)
    parser.add_argument("--gateway", default="http://127.0.0.1:8300")
    given = parser.parse_args()

    from safetensors.torch import load_file

    job = f"{given.gateway}/v1/jobs/{given.job}"
    with Publisher(given.store, announce=job) as publisher:
        published = publisher.publish(load_file(given.checkpoint))
        print(
            f"version {published.version}: {published.bytes_sent} of {published.bytes_dense} bytes"
        )
        state = publisher.announced(timeout_s=450)
        print(state or f"not in force: {publisher.announce_faults}")


if __name__ == "__main__":
    main()
