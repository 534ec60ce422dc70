"""Child of test_weight_sync_client.py: a trainer that uses nothing but vLLM's own classes.

Sends two states through the client to a URL; prints the versions' hashes, and how a backend that
wants a process group is answered.
"""

import json
import sys
from pathlib import Path

import requests
import torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightsync.layout.names import Kind, VersionRef
from weightsync.reading.store import Store
from weightsync.vllm.trainer import RoseMuxTrainerInitInfo


def main(url: str, store_dir: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 8).bfloat16()
    client = HTTPVLLMWeightSyncClient(url, timeout=60)
    sender = WeightTransferTrainerFactory.trainer_init(
        RoseMuxTrainerInitInfo(store_dir, rank=0), client=client, source=ModuleSource(model)
    )
    sender.send_weights()
    with torch.no_grad():
        model.weight += 1
    sender.send_weights()
    sender.shutdown()
    store = Store(Path(store_dir))
    hashes = []
    for version in (1, 2):
        section = store.manifest(VersionRef(Kind.WEIGHT, version)).section
        hashes.append(section.state_hash if section else None)
    try:
        client.init_weight_transfer_engine({"master_address": "127.0.0.1", "world_size": 3})
        refusal = "none"
    except requests.HTTPError as error:
        refusal = error.response.text
    print(json.dumps({"hashes": hashes, "refusal": refusal}))


if __name__ == "__main__":
    main(*sys.argv[1:])
