"""Publish a checkpoint as the next version of a job, and tell the gateway.

    python examples/publish.py --checkpoint model.safetensors --store /srv/weights/job-a --job job-a

In a trainer it is three lines, the first of them once:

    publisher = Publisher("/srv/weights/job-a")
    published = publisher.publish(model.state_dict())
    announce(gateway_url, "job-a", announcement(published, "job-a"))

The second returns when the version is durable, the third when every dedicated engine serves it.

A sharded trainer (FSDP2, tensor parallel) calls the first two on every rank, without a gather:

    publisher = sharded_publisher("/srv/weights/job-a")
    published = publisher.publish(model.named_parameters(), step=step)
    if dist.get_rank() == 0:
        announce(gateway_url, "job-a", announcement(published, "job-a"))

Megatron-style ranks declare their parts: `("embed_tokens.weight", rows_of(part, rank, shape))`.
"""

import argparse
import json
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.publish.intake import ShardSlice
from weightsync.publisher import Published, Publisher

if TYPE_CHECKING:
    import torch


def announcement(published: Published, store: str) -> dict[str, Any]:
    """`store` is the directory's name under the engines' ROSEMUX_WEIGHT_ROOT."""
    return {"version": published.version, "store": store}


def announce(gateway_url: str, job: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{gateway_url}/v1/jobs/{job}/versions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=150) as reply:
        switched: dict[str, Any] = json.load(reply)
    return switched


def sharded_publisher(store: str) -> Publisher:
    """This rank's; the copy in `copy_dir` lets a restarted trainer go on with a delta."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    return Publisher(store, rank=rank, ranks=ranks, copy_dir="/var/tmp/rosemux-copies")


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

    with Publisher(given.store) as publisher:
        published = publisher.publish(load_file(given.checkpoint))
    print(f"version {published.version}: {published.bytes_sent} of {published.bytes_dense} bytes")
    switched = announce(given.gateway, given.job, announcement(published, given.store.name))
    for engine, state in switched["engines"].items():
        print(f"{engine}: {state}")


if __name__ == "__main__":
    main()
