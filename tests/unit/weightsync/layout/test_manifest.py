"""Index files from outside: names never become paths, and contradictions are refused."""

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import Corrupt, RoseMuxError, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync.encoding.codec import Encoding
from weightsync.layout.manifest import (
    AdapterRecord,
    FileRecord,
    IndexSection,
    Manifest,
    decoded_manifest,
    encoded_manifest,
)
from weightsync.layout.names import MAX_VERSION
from weightsync.layout.slices import SliceRecord
from weightsync.layout.tables import MAX_TABLE_BYTES, packed_table
from weightsync.serve.published import published_files

SEVEN = WeightVersion(7)


def _metadata(**changes: Any) -> dict[str, Any]:
    return {
        "version": "000007",
        "base_version": "000006",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    } | changes


def _raw(metadata: dict[str, Any], **more: Any) -> bytes:
    index = {"metadata": metadata, "weight_map": {"w": "model-00001.safetensors"}} | more
    return json.dumps(index).encode()


def test_written_bytes_are_read_back() -> None:
    manifest = Manifest(
        version=SEVEN,
        base_version=WeightVersion(6),
        delta_encoding=Encoding.ROSEMUX,
        checksum_format="xxh3-128",
        weight_map={"w": "a.safetensors", "v": "a.safetensors"},
        section=IndexSection(
            format=1,
            state_hash="ab",
            bytes_dense=12,
            files={"a.safetensors": FileRecord(10, "cd")},
            encodings={"v": Encoding.DENSE},
        ),
    )
    read = decoded_manifest(encoded_manifest(manifest), expected=SEVEN)
    assert read == manifest
    assert read.encoding_of("v") is Encoding.DENSE
    assert read.encoding_of("w") is Encoding.ROSEMUX


def _of_many(*, delta: bool, slices: bool) -> Manifest:
    """A version of 3,000 tensors, cut or whole."""
    records = {
        f"model.layers.{number}.weight[0:8, :]": SliceRecord(
            f"model.layers.{number}.weight", (16, 8), (0, 0), (8, 8)
        )
        for number in range(3000)
    }
    return Manifest(
        version=SEVEN,
        base_version=WeightVersion(6) if delta else None,
        delta_encoding=Encoding.ROSEMUX if delta else None,
        checksum_format="xxh3-128",
        weight_map=dict.fromkeys(records, "a.safetensors"),
        section=IndexSection(1, "ab", 12, {"a.safetensors": FileRecord(10, "cd" * 16)})
        if not slices
        else IndexSection(1, "ab", 12, {"a.safetensors": FileRecord(10, "cd" * 16)}, {}, records),
    )


@pytest.mark.parametrize(("delta", "slices"), [(True, False), (False, True)])
def test_a_large_index_that_only_we_read_is_compressed(delta: bool, slices: bool) -> None:
    manifest = _of_many(delta=delta, slices=slices)
    raw = encoded_manifest(manifest)
    assert len(raw) < 40_000
    assert decoded_manifest(raw, expected=SEVEN) == manifest
    assert published_files(raw)["a.safetensors"].size_bytes == 10


def test_a_checkpoint_s_index_stays_as_other_systems_read_it() -> None:
    raw = encoded_manifest(_of_many(delta=False, slices=False))
    assert len(json.loads(raw)["weight_map"]) == 3000


@pytest.mark.parametrize("slices", [False, True])
def test_too_many_entries_are_refused_with_what_helps_a_single_rank_too(
    monkeypatch: pytest.MonkeyPatch, slices: bool
) -> None:
    monkeypatch.setattr("weightsync.layout.manifest.MAX_INDEX_BYTES", 10_000)
    with pytest.raises(Unsupported, match="of 3000 entries is larger than readers take"):
        encoded_manifest(_of_many(delta=False, slices=slices))


def test_chunks_are_left_out_where_a_table_would_be_too_large_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = _of_many(delta=True, slices=False)
    assert manifest.section is not None
    chunks = "0123456789abcdef" * 50_000
    record = FileRecord(50_000, "cd" * 16, 1, chunks)
    section = msgspec.structs.replace(manifest.section, files={"a.safetensors": record})
    monkeypatch.setattr("weightsync.layout.manifest.MAX_TABLE_BYTES", 500_000)
    read = decoded_manifest(encoded_manifest(replace(manifest, section=section)), expected=SEVEN)
    assert read.section is not None
    assert not read.section.files["a.safetensors"].chunks
    assert read.weight_map == manifest.weight_map


def test_an_index_that_unpacks_to_more_than_the_limit_is_corrupt() -> None:
    packing = zstandard.ZstdCompressor().compressobj(size=MAX_TABLE_BYTES + 1)
    announcing = packing.compress(b" ") + packing.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    cut = packed_table(b"{}")[:-1]
    for raw, words in ((announcing, "the limit is"), (cut, "a compressed table")):
        with pytest.raises(Corrupt, match=words):
            decoded_manifest(raw, expected=SEVEN)
        with pytest.raises(Corrupt, match=words):
            published_files(raw)


def test_an_index_says_nothing_of_slices_and_adapters_that_are_not_there() -> None:
    """Byte for byte what stores of whole models have always held."""
    manifest = Manifest(
        version=SEVEN,
        base_version=WeightVersion(6),
        delta_encoding=Encoding.ROSEMUX,
        checksum_format="xxh3-128",
        weight_map={"w": "a.safetensors"},
        section=IndexSection(
            format=1,
            state_hash="ab",
            bytes_dense=12,
            files={"a.safetensors": FileRecord(10, "cd")},
        ),
    )
    assert (
        encoded_manifest(manifest).decode()
        == """{
 "metadata": {
  "version": "000007",
  "base_version": "000006",
  "delta_encoding": "rosemux",
  "compression_format": "zstd",
  "checksum_format": "xxh3-128"
 },
 "weight_map": {
  "w": "a.safetensors"
 },
 "rosemux": {
  "format": 1,
  "state_hash": "ab",
  "bytes_dense": 12,
  "files": {
   "a.safetensors": {
    "bytes": 10,
    "xxh3_128": "cd"
   }
  },
  "encodings": {}
 }
}"""
    )


def test_slices_and_an_adapter_s_base_are_read_back() -> None:
    manifest = Manifest(
        version=SEVEN,
        base_version=None,
        delta_encoding=None,
        checksum_format="xxh3-128",
        weight_map={"w[0:1, :]": "a.safetensors"},
        section=IndexSection(
            format=1,
            state_hash="ab",
            bytes_dense=12,
            files={"a.safetensors": FileRecord(10, "cd")},
            slices={"w[0:1, :]": SliceRecord("w", (2, 3), (0, 0), (1, 3))},
            adapter=AdapterRecord("job-a", 3, "ef", FileRecord(20, "01")),
        ),
    )
    read = decoded_manifest(encoded_manifest(manifest), expected=SEVEN)
    assert read == manifest
    assert read.slicing.records["w[0:1, :]"].tensor == "w"


def test_an_index_of_another_system_is_read() -> None:
    read = decoded_manifest(_raw(_metadata(version=7, base_version=6)), expected=SEVEN)
    assert read.section is None
    assert read.encoding_of("w") is Encoding.XOR
    assert not read.is_full


@pytest.mark.parametrize("shard", ["../w.safetensors", "/etc/passwd", "a/b", "", ".hidden"])
def test_shard_names_that_could_be_paths_are_corrupt(shard: str) -> None:
    with pytest.raises(Corrupt):
        decoded_manifest(_raw(_metadata(), weight_map={"w": shard}), expected=SEVEN)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "000008"},
        {"version": "seven"},
        {"version": -7},
        {"base_version": None},
        {"base_version": "000007"},
        {"base_version": "000009"},
        {"delta_encoding": "dense"},
        {"delta_encoding": "pickle"},
        {"delta_encoding": None},
    ],
)
def test_contradictions_are_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        decoded_manifest(_raw(_metadata(**changes)), expected=SEVEN)


def test_an_unknown_compression_or_format_is_unsupported() -> None:
    section = {"format": 2, "state_hash": "", "bytes_dense": 0, "files": {}}
    for raw in (_raw(_metadata(compression_format="lz4")), _raw(_metadata(), rosemux=section)):
        with pytest.raises(Unsupported):
            decoded_manifest(raw, expected=SEVEN)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_unexpected(raw: bytes) -> None:
    with pytest.raises(RoseMuxError):
        decoded_manifest(raw, expected=SEVEN)


def test_every_number_that_a_directory_can_have_is_read() -> None:
    """Publishers give numbers up to MAX_VERSION."""
    for newest, is_read in ((MAX_VERSION, True), (MAX_VERSION + 1, False)):
        raw = _raw(_metadata(version=str(newest), base_version=str(newest - 1)))
        with nullcontext() if is_read else pytest.raises(Corrupt, match="version"):
            assert decoded_manifest(raw, expected=WeightVersion(newest)).version == newest
