"""The hash as kernels compute it is the library's. Needs Triton: `make kernels`.

Kernels run in Triton's interpreter, on the host, and are compiled for a GPU that is not there.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.contracts.errors import Unsupported
from tests.unit.weightsync.allocated_bytes import AllocatedBytes
from weightsync.elements import device_hash
from weightsync.elements.bits import bits_of
from weightsync.elements.device_hash import digests_on_device, is_proven, kernel_digests
from weightsync.elements.state_hash import digest_of

# Read when the kernels are defined, which is when they are first called.
os.environ["TRITON_INTERPRET"] = "1"
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None,
    reason="Triton is not beside vLLM's CPU build (decision 8): make kernels",
)

KIB = 1024
EDGES = [241, 255, 256, 257, 1023, 1024, 1025, 1088, 1089, 2047, 2048, 2049, 17 * KIB, 17 * KIB + 1]
LONG = [32 * KIB, 32 * KIB + 1, 33 * KIB + 1, 49 * KIB + 3, 100_000]
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weightsync.elements import hash_kernels as kernels

kinds = {"tiles": "*i64", "rows": "*i64", "secret": "*u64", "sums": "*u64", "states": "*u64"}
for kernel, constant, warps in (
    (kernels.sum_stripes, {"BLOCKS": kernels.BLOCKS_AT_ONCE}, 4),
    (kernels.chain_sums, {"STEP": kernels.STEP_BLOCKS}, 1),
):
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    # Memory of torch's, as a launch tells the compiler.
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(len(kernel.arg_names) - 1)}
    source = ASTSource(kernel, signature, constant, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(len(made.asm["cubin"]), "ld.global.v2.b64" in made.asm["ptx"], made.metadata.shared)
"""


def _bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def _librarys(data: torch.Tensor) -> str:
    return str(xxhash.xxh3_128_hexdigest(data.numpy().data))


@needs_triton
@pytest.mark.parametrize("size", EDGES + LONG)
def test_it_is_the_librarys_hash(size: int) -> None:
    data = _bytes(size)
    assert kernel_digests([data]) == [_librarys(data)]


@needs_triton
@given(
    st.lists(st.one_of(st.sampled_from(EDGES), st.integers(241, 9000)), min_size=1, max_size=8),
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
)
@settings(deadline=None, max_examples=20)
def test_states_of_many_tensors_are_taken_in_rounds(
    sizes: list[int], seed: int, blocks_at_once: int
) -> None:
    data = [_bytes(size, seed + number) for number, size in enumerate(sizes)]
    found = kernel_digests(data, scratch_bytes=64 * blocks_at_once)
    assert found == [_librarys(part) for part in data]


@needs_triton
@pytest.mark.parametrize("value", [0, 255])
def test_words_of_zeros_and_of_ones_are_carried(value: int) -> None:
    data = torch.full((5 * KIB,), value, dtype=torch.uint8)
    assert kernel_digests([data]) == [_librarys(data)]


@needs_triton
@pytest.mark.parametrize("at", [0, 1023, 1024, 2500, 4096, 4999])
def test_one_flipped_bit_is_another_digest(at: int) -> None:
    data = _bytes(5000)
    before = kernel_digests([data])
    data[at] ^= 1
    assert kernel_digests([data]) != before


@needs_triton
def test_it_takes_scratch_memory_of_a_given_size() -> None:
    data = [_bytes(30 * KIB), _bytes(3 * KIB)]
    with AllocatedBytes() as allocated:
        found = kernel_digests(data, scratch_bytes=KIB)
    assert found == [_librarys(part) for part in data]
    # Beside it: spare sums, the ends of the tensors and tables.
    assert allocated.most <= KIB + 8 * KIB


@needs_triton
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.bool]
)
def test_tensors_of_every_kind_take_the_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the host were an accelerator.
    monkeypatch.setattr(device_hash, "HOST", "elsewhere")
    state = {
        "matrix": _bytes(6000).view(-1).to(dtype).view(60, 100),
        "short": _bytes(8).to(dtype),
        "scalar": _bytes(1).to(dtype).view(()),
        "nothing": _bytes(0).to(dtype),
        "moved": _bytes(6000).to(dtype)[1:],
    }
    digests = {name: digest_of(bits_of(tensor)) for name, tensor in state.items()}
    assert digests_on_device(state) == digests


def test_tensors_on_the_host_are_the_librarys() -> None:
    state = {"long": _bytes(5000).view(torch.float16), "short": _bytes(240)}
    digests = {name: digest_of(bits_of(tensor)) for name, tensor in state.items()}
    assert digests_on_device(state) == digests
    assert not is_proven(torch.device("cpu"))


def _wrong(data: Sequence[torch.Tensor]) -> list[str]:
    return ["0" * 32 for _ in data]


def _failing(data: Sequence[torch.Tensor]) -> list[str]:
    raise RuntimeError("no C compiler")


@pytest.mark.parametrize(
    ("kernels", "why"), [(_wrong, "hash wrongly"), (_failing, "no C compiler")]
)
def test_a_device_that_does_not_hash_as_the_library_is_not_believed(
    kernels: Callable[[Sequence[torch.Tensor]], list[str]],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(device_hash, "HOST", "elsewhere")
    monkeypatch.setattr(device_hash, "kernel_digests", kernels)
    # Not the remembered answer.
    assert not is_proven.__wrapped__(torch.device("cpu"))
    assert why in caplog.text


@needs_triton
def test_a_device_that_hashes_as_the_library_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_hash, "HOST", "elsewhere")
    assert is_proven.__wrapped__(torch.device("cpu"))


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(Unsupported, match="columns is not contiguous"):
        digests_on_device({"columns": _bytes(6000).view(60, 100).T})


@pytest.mark.parametrize(
    ("left", "blocks", "shares"),
    [
        ([10, 10], 100, [10, 10]),
        ([10, 1000, 7], 100, [10, 83, 7]),
        ([1000, 10, 1000], 100, [45, 10, 45]),
        ([5, 0, 5], 4, [2, 0, 2]),
        ([5, 0, 5, 5], 2, [1, 0, 1, 0]),
    ],
)
def test_chains_advance_alike(left: list[int], blocks: int, shares: list[int]) -> None:
    assert device_hash.next_shares(np.array(left), blocks).tolist() == shares


@needs_triton
def test_the_kernels_compile_for_a_gpu_with_wide_loads(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=kept | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sums, chain = (line.split() for line in done.stdout.splitlines())
    assert sums[1:] == ["True", "0"], "16 bytes at a time, nothing through shared memory"
    assert chain[2] == "0"
