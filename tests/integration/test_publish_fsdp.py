"""A real FSDP2 trainer over gloo publishes without a gather, and receivers get its model."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from harvester.contracts.ids import WeightVersion
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

RANK = Path(__file__).with_name("fsdp_rank.py")
STEPS = 3
RANKS = 3


def test_every_version_is_what_a_gather_would_have_given(tmp_path: Path) -> None:
    store = tmp_path / "store"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    arguments = [str(tmp_path / "rendezvous"), str(store), str(STEPS)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(RANKS), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=240)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.wait()

    receiver, current = Receiver(store), None
    held = {
        n: torch.zeros_like(t) for n, t in load_file(tmp_path / "gathered-1.safetensors").items()
    }
    for step in range(1, STEPS + 1):
        expected = load_file(tmp_path / f"gathered-{step}.safetensors")
        current = receiver.sync(current, WeightVersion(step), TensorTarget(held)).version
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], expected[name]) for name in expected)
    full = load_file(store / "weight_v000001" / f"model-00001-of-{RANKS:05d}.safetensors")
    assert any(name.startswith("0.weight[0:") for name in full), "no rank wrote the whole"
