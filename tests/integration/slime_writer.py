"""Publications on disk as slime's and miles' UpdateWeightFromDiskDelta leave them (slime 624b824a,
miles 31f1ca96).

Their first update publishes nothing: it empties the directory and takes the Hugging Face
checkpoint's bytes for version 0. Each later one is a directory of one shard for every source rank
that has changes, numbered from 0, and an index, written last; there is no READY and no LATEST.
Made of the official packages and by hand, never by our writer.
"""

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import blake3
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import safetensors.torch
import torch
import xxhash
import zstandard

State: TypeAlias = Mapping[str, torch.Tensor]
Raw: TypeAlias = npt.NDArray[np.uint8]


def raw(tensor: torch.Tensor) -> Raw:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class DeltaTrainer:
    """The writer's side of a trainer; the ranks take the tensors in turn."""

    def __init__(
        self, root: Path, checkpoint: Path, *, encoding: str, checksum: str, ranks: int = 1
    ) -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        self.version = 0
        self._root, self._ranks = root, ranks
        self._encoding, self._checksum = encoding, checksum
        self._snapshot: dict[str, Raw] = {}
        for shard in checkpoint.glob("*.safetensors"):
            held = safetensors.torch.load_file(shard)
            self._snapshot |= {name: raw(tensor).copy() for name, tensor in held.items()}

    def update(self, state: State) -> Path:
        """The directory of the next version."""
        self.version += 1
        directory = self._root / f"weight_v{self.version:06d}"
        directory.mkdir()
        parts: list[dict[str, Raw]] = [{} for _ in range(self._ranks)]
        sums: list[dict[str, str]] = [{} for _ in range(self._ranks)]
        for at, (name, tensor) in enumerate(state.items()):
            old, new = self._snapshot[name], raw(tensor).copy()
            if (old != new).any():
                payload = zstandard.ZstdCompressor(level=1).compress(self._encoded(old, new))
                parts[at % self._ranks][name] = np.frombuffer(payload, dtype=np.uint8)
                sums[at % self._ranks][name] = self._digest(new)
            self._snapshot[name] = new
        written = [(part, s) for part, s in zip(parts, sums, strict=True) if part]
        weight_map = {}
        for at, (part, checksums) in enumerate(written):
            shard = f"model-{at:05d}-of-{len(written):05d}.safetensors"
            _replace(directory / shard, safetensors.numpy.save(part, metadata=checksums))
            weight_map |= dict.fromkeys(part, shard)
        metadata = {
            "version": f"{self.version:06d}",
            "base_version": f"{self.version - 1:06d}",
            "delta_encoding": self._encoding,
            "compression_format": "zstd",
            "checksum_format": self._checksum,
        }
        index: dict[str, Any] = {"metadata": metadata, "weight_map": weight_map}
        _replace(directory / "model.safetensors.index.json", json.dumps(index).encode())
        return directory

    def _encoded(self, old: Raw, new: Raw) -> bytes:
        if self._encoding == "xor":
            return (old ^ new).tobytes()
        at = np.flatnonzero(old != new).astype("<u4")
        return np.array([at.size], "<u4").tobytes() + at.tobytes() + new[at].tobytes()

    def _digest(self, new: Raw) -> str:
        if self._checksum == "adler32":
            return f"{zlib.adler32(new.data):08x}"
        if self._checksum == "blake3":
            return blake3.blake3(new.data).hexdigest()
        return str(xxhash.xxh3_128_hexdigest(new.data))


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
