"""Every number format of the installed safetensors and torch goes through stores bit for bit."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save, save_file

from harvester.cli import main
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.ids import WeightVersion
from tests.integration.slime_writer import DeltaTrainer, raw
from weightsync import Publisher, Receiver, ShardSlice, TensorTarget
from weightsync.elements.bits import spec_of
from weightsync.encoding.codec import Encoding
from weightsync.layout.shard import shard_header
from weightsync.publish.settings import ExchangeSettings, VersionSettings
from weightsync.receive.held_parts import TensorParallel

State = dict[str, torch.Tensor]
FORMATS = {
    "F4": torch.float4_e2m1fn_x2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
SHAPES = ((64, 96), (5, 7), (2, 3, 1), (9,), (3, 0), (0, 3))
SHARD = "model-00001-of-00001.safetensors"


def drawn(seed: int) -> State:
    """Any bits at all, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    state = {"norm.weight": torch.randn(8, generator=generator).bfloat16()}
    for name, dtype in FORMATS.items():
        for shape in SHAPES:
            whole = torch.empty(shape, dtype=dtype)
            data = torch.randint(0, 256, (whole.nbytes,), dtype=torch.uint8, generator=generator)
            state[f"{name}.{'x'.join(map(str, shape))}"] = data.view(dtype).view(shape)
    return state


def moved(state: State, seed: int) -> State:
    """Some bytes are others."""
    generator = torch.Generator().manual_seed(seed)
    found: State = {}
    for name, tensor in state.items():
        data = torch.from_numpy(raw(tensor).copy())
        hit = torch.rand(data.shape, generator=generator) < 0.05
        found[name] = (data + 37 * hit.byte()).view(tensor.dtype).view(tensor.shape)
    return found


def forms(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    """Everything that two equal states have in common."""
    return {
        name: (tensor.dtype, tuple(tensor.shape), raw(tensor).tobytes())
        for name, tensor in state.items()
    }


def blank(state: State) -> State:
    return {
        name: torch.zeros(t.nbytes, dtype=torch.uint8).view(t.dtype).view(t.shape)
        for name, t in state.items()
    }


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


@pytest.fixture(scope="module")
def steps() -> list[State]:
    first = drawn(0)
    second = moved(first, 1)
    return [first, second, moved(second, 2)]


def test_full_versions_are_files_that_safetensors_loads_as_they_were_given(
    tmp_path: Path, steps: list[State]
) -> None:
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(steps[0])
    shard = tmp_path / "store" / "weight_v000001" / SHARD
    assert forms(load_file(shard)) == forms(steps[0])
    save_file(steps[0], tmp_path / "theirs.safetensors")
    ours, theirs = header(shard), header(tmp_path / "theirs.safetensors")
    assert {n: (ours[n]["dtype"], ours[n]["shape"]) for n in steps[0]} == {
        n: (theirs[n]["dtype"], theirs[n]["shape"]) for n in steps[0]
    }


def test_headers_that_safetensors_wrote_have_the_shapes_of_the_tensors(steps: list[State]) -> None:
    held = shard_header(np.frombuffer(save(steps[0]), np.uint8))
    assert held.layout == {name: spec_of(tensor) for name, tensor in steps[0].items()}
    assert held.layout["F4.5x7"].shape == (5, 7)


@pytest.mark.parametrize("encoding", [*Encoding][1:])
def test_deltas_of_every_format_are_exact(
    tmp_path: Path, steps: list[State], encoding: Encoding
) -> None:
    with Publisher(tmp_path, versions=VersionSettings(encoding=encoding)) as publisher:
        done = [publisher.publish(state) for state in steps]
    assert [version.is_full for version in done] == [True, False, False]
    held = blank(steps[0])
    receiver, current = Receiver(tmp_path), None
    for version, state in zip(done, steps, strict=True):
        current = receiver.sync(current, version.version, TensorTarget(held)).version
        assert forms(held) == forms(state)


def test_pulled_checkpoints_are_exact_after_deltas_too(
    tmp_path: Path, steps: list[State], capsys: pytest.CaptureFixture[str]
) -> None:
    store, into = tmp_path / "store", tmp_path / "held"
    with Publisher(store) as publisher:
        for state in steps:
            publisher.publish(state)
            with pytest.raises(SystemExit) as left:
                main(["weights", "pull", str(store), str(into)])
            assert left.value.code in {None, 0}, capsys.readouterr().err
            held: State = {}
            for shard in into.glob("*.safetensors"):
                held |= load_file(shard)
            assert forms(held) == forms(state)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_stores_of_other_trainers_may_have_every_format(
    tmp_path: Path, steps: list[State], encoding: str
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file(steps[0], base / "model.safetensors")
    trainer = DeltaTrainer(tmp_path / "store", base, encoding=encoding, checksum="xxh3-128")
    for state in steps[1:]:
        trainer.update(state)
    held = blank(steps[0])
    receiver = Receiver(tmp_path / "store", base_checkpoint=base)
    receiver.sync(None, receiver.latest(), TensorTarget(held))
    assert forms(held) == forms(steps[2])


def _shares(state: State, rank: int) -> list[tuple[str, torch.Tensor | ShardSlice]]:
    """Columns of matrices, so for F4 columns of bytes; the rest is rank 0's."""
    share: list[tuple[str, torch.Tensor | ShardSlice]] = []
    for name, tensor in state.items():
        if name.endswith(".64x96"):
            part = tensor[:, (0, 41)[rank] : (41, 96)[rank]]
            share.append((name, ShardSlice(part, (64, 96), 1, (0, 41)[rank])))
        elif rank == 0:
            share.append((name, tensor))
    return share


def test_slices_along_packed_columns_make_the_whole_and_parts_of_it(
    tmp_path: Path, steps: list[State]
) -> None:
    publishers = [
        Publisher(tmp_path, rank=r, ranks=2, exchange=ExchangeSettings(rank_timeout_s=60.0))
        for r in (0, 1)
    ]
    with ThreadPoolExecutor(2) as pool:
        for state in steps[:2]:
            calls = [
                pool.submit(publisher.publish, iter(_shares(state, rank)))
                for rank, publisher in enumerate(publishers)
            ]
            assert len({call.result().state_hash for call in calls}) == 1
    for publisher in publishers:
        publisher.close()
    found: State = {}
    for shard in (tmp_path / "weight_v000001").glob("*.safetensors"):
        found |= load_file(shard)
    assert found["F4.64x96[:, 41:96]"].shape == (64, 55)
    held = blank(steps[0])
    Receiver(tmp_path).sync(None, WeightVersion(2), TensorTarget(held))
    assert forms(held) == forms(steps[1])
    columns = TensorParallel(
        rank=1, ranks=3, dim_of=lambda name: 1 if name.endswith(".64x96") else None
    )
    cut = {n: t[:, 32:64].contiguous() if "64x96" in n else t for n, t in steps[1].items()}
    held = blank(cut)
    receiver = Receiver(tmp_path, selection=columns)
    receiver.sync(None, WeightVersion(1), TensorTarget(held))
    receiver.sync(WeightVersion(1), WeightVersion(2), TensorTarget(held))
    assert forms(held) == forms(cut)


def test_a_conjugated_view_is_published_with_its_own_values(tmp_path: Path) -> None:
    plain = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = {"a": plain, "b": plain.conj(), "c": plain.imag, "d": plain.conj().imag}
    with Publisher(tmp_path) as publisher:
        publisher.publish(state)
    held = load_file(tmp_path / "weight_v000001" / SHARD)
    assert all(torch.equal(held[name], tensor) for name, tensor in state.items())


def test_a_tensor_that_no_file_can_hold_is_refused_before_anything_is_written(
    tmp_path: Path, steps: list[State]
) -> None:
    scalar = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(())
    with Publisher(tmp_path / "store") as publisher:
        for wrong, words in (
            (scalar, "F4 numbers without a dimension"),
            (torch.zeros(1, dtype=torch.complex128), "complex128 cannot be published"),
        ):
            with pytest.raises(Unsupported, match=words):
                publisher.publish(steps[0] | {"wrong": wrong})
            assert not list((tmp_path / "store").glob("*v0*"))
        publisher.publish(steps[0])


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "words"),
    [
        ("F4", [2, 7], 7, "F4 of shape .* splits a byte between rows"),
        ("F4", [3, 7], 11, "splits a byte between rows"),
        ("F4", [], 1, "splits a byte between rows"),
        ("F6_E2M3", [4], 3, "dtype 'F6_E2M3' is not one of"),
        ("F6_E3M2", [4], 3, "dtype 'F6_E3M2' is not one of"),
    ],
)
def test_checkpoints_with_numbers_that_torch_has_no_tensor_for_are_refused(
    tmp_path: Path, dtype: str, shape: list[int], size: int, words: str
) -> None:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    head = json.dumps({"a": entry}).encode()
    data = len(head).to_bytes(8, "little") + head + bytes(size)
    with pytest.raises(Unsupported, match=words):
        shard_header(np.frombuffer(data, np.uint8))
    (tmp_path / "model.safetensors").write_bytes(data)
    with (
        pytest.raises(safetensors.SafetensorError),
        safetensors.safe_open(tmp_path / "model.safetensors", "pt") as theirs,
    ):
        theirs.get_tensor("a")


@pytest.mark.parametrize(
    ("dtype", "byte", "refused"),
    [
        ("F8_E8M0", 0xFF, True),
        ("F8_E8M0", 0xFE, False),
        ("F8_E4M3FNUZ", 0x80, True),
        ("F8_E5M2FNUZ", 0x80, True),
        ("F8_E4M3FNUZ", 0x7F, False),
        ("F4", 0xFF, False),
    ],
)
def test_elements_that_are_no_numbers_are_found_in_every_format(
    tmp_path: Path, dtype: str, byte: int, refused: bool
) -> None:
    tensor = torch.tensor([0, byte, 1, 2], dtype=torch.uint8).view(FORMATS[dtype])
    with Publisher(tmp_path, versions=VersionSettings(check_finite=True)) as publisher:
        if refused:
            with pytest.raises(ConfigError, match="a has NaN or infinite"):
                publisher.publish({"a": tensor})
        else:
            publisher.publish({"a": tensor})


@pytest.mark.parametrize("value", [complex(0, float("nan")), complex(float("inf"), 0)])
def test_either_part_of_a_complex_number_may_be_none(tmp_path: Path, value: complex) -> None:
    wrong = torch.tensor([1j, value], dtype=torch.complex64)
    with (
        Publisher(tmp_path, versions=VersionSettings(check_finite=True)) as publisher,
        pytest.raises(ConfigError, match="a has NaN or infinite"),
    ):
        publisher.publish({"a": wrong})
