"""Files of vLLM and its requirements that a dense model in bf16 on Hopper never loads, removed."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from deploy.gpu.fatbin import keep_one_architecture

REMOVED = {
    "vllm/vllm-rs": "the front end in Rust: VLLM_USE_RUST_FRONTEND is off by default",
    "vllm/vllm_flash_attn/_vllm_fa2_C*.so": "FlashAttention 2: Hopper takes version 3",
    "vllm/_moe_C*.so": "mixtures of experts",
    "vllm/_qutlass_C*.so": "quantised weights on Blackwell",
    "vllm/_flashmla*.so": "multi-head latent attention",
    "vllm/third_party/deep_gemm": "FP8 matrix products; vLLM looks whether the folder is there",
    "vllm/third_party/fmha_sm100": "Blackwell",
    "vllm/third_party/tml_fa4": "Blackwell",
    "vllm/distributed/kv_transfer/*.jpg": "pictures",
    "**/*.a": "static libraries",
    "mistral_common/data": "tokenizers of Mistral's models",
    "pycountry/locales": "names of countries in other languages",
}
"""Paths in the site directory, with the reason. Imports of them are guarded, and
`deploy/gpu/check` shows it."""


@dataclass(frozen=True, slots=True)
class Stripped:
    removed_bytes: int
    zeroed_bytes: int


def strip(site: Path, *, every_architecture: bool = False) -> Stripped:
    """Remove the listed paths below `site`; zero the code of other GPUs in vLLM's libraries."""
    removed = 0
    for pattern in REMOVED:
        for path in sorted(site.glob(pattern)):
            removed += size_bytes(path)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    zeroed = 0
    if not every_architecture:
        for library in sorted(site.glob("vllm/**/*.so")):
            zeroed += _keep_hopper(library)
    return Stripped(removed, zeroed)


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _keep_hopper(library: Path) -> int:
    content = bytearray(library.read_bytes())
    zeroed = keep_one_architecture(content)
    if zeroed:
        library.write_bytes(content)
    return zeroed
