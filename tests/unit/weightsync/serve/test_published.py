"""A relay and a receiver read the same facts from an index."""

from pathlib import Path

import msgspec
import pytest
import torch

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.layout import names
from weightsync.layout.manifest import decoded_manifest
from weightsync.layout.tables import packed_table
from weightsync.publisher import Publisher
from weightsync.serve.published import published_files, summary_line


def test_the_shards_of_a_published_version_are_those_of_its_manifest(tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher:
        publisher.publish({"w": torch.ones(40, 5)})
        publisher.publish({"w": torch.full((40, 5), 1.5)})
    for version, kind in ((1, "full"), (2, "rosemux on 000001")):
        raw = (tmp_path / f"weight_v{version:06d}" / names.INDEX_FILE).read_bytes()
        manifest = decoded_manifest(raw, expected=WeightVersion(version))
        assert manifest.section is not None
        found = published_files(raw)
        assert {name: (file.size_bytes, file.xxh3_128) for name, file in found.items()} == {
            name: (record.bytes, record.xxh3_128) for name, record in manifest.section.files.items()
        }
        assert summary_line(raw).startswith(f"{kind}, 1 tensors")


def test_a_version_of_another_system_is_kept_apart_by_its_index() -> None:
    first = published_files(b'{"metadata": {"version": "1"}, "weight_map": {"w": "a", "x": "b"}}')
    second = published_files(b'{"metadata": {"version": "2"}, "weight_map": {"w": "a", "x": "b"}}')
    keys = {file.key for file in (*first.values(), *second.values())}
    assert len(keys) == 4
    assert all(file.xxh3_128 is None for file in first.values())


def test_fields_of_a_newer_index_are_passed_over() -> None:
    record = {"bytes": 7, "xxh3_128": "0" * 32, "later": [1]}
    section = {"format": 2, "state_hash": "", "bytes_dense": 7, "files": {"a": record}, "later": 1}
    index = {"metadata": {"version": 1}, "weight_map": {"w": "a"}, "rosemux": section, "later": {}}
    assert published_files(msgspec.json.encode(index))["a"].key == f"{'0' * 32}-7"


def with_file(record: str) -> bytes:
    section = f'{{"format": 1, "state_hash": "", "bytes_dense": 1, "files": {{"a": {record}}}}}'
    return f'{{"metadata": {{"version": 1}}, "weight_map": {{}}, "rosemux": {section}}}'.encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"weight_map": {"w": "a"}}',
        b'{"metadata": {"version": 1}, "weight_map": {"w": 1}}',
        with_file(f'{{"bytes": -1, "xxh3_128": "{"0" * 32}"}}'),
        with_file('{"bytes": 1, "xxh3_128": "../../x"}'),
    ],
)
def test_a_hostile_index_is_corrupt(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        published_files(raw)


def test_an_index_of_a_few_kilobytes_is_not_made_into_gigabytes_of_files() -> None:
    """A relay reads the indexes that its tenants write."""
    chunks = "[]," * (23 << 20)
    much = with_file(f'{{"bytes": 1, "xxh3_128": "{"0" * 32}", "chunks": [{chunks}[]]}}')
    many = ",".join(f'"{n}": "{n}"' for n in range((1 << 16) + 1))
    for raw in (much, f'{{"metadata": {{"version": 1}}, "weight_map": {{{many}}}}}'.encode()):
        with pytest.raises(Corrupt, match="an index with"):
            published_files(packed_table(raw))
