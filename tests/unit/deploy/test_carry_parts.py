"""A bundle cut into parts comes together whole or not at all."""

import io
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.gpu import parts
from deploy.gpu.parts import BundleManifest, BundleRefused, PartReader, PartWriter

CONTENT = random.Random(1).randbytes(2500)


def cut(folder: Path, content: bytes = CONTENT, *, limit_bytes: int = 1000) -> BundleManifest:
    folder.mkdir(parents=True, exist_ok=True)
    writer = PartWriter(folder, "engine-1.0", limit_bytes=limit_bytes)
    for start in range(0, len(content), 700):
        writer.write(content[start : start + 700])
    writer.write_manifest()
    return parts.read_manifest(folder)


def go(bundle: Path, there: Path, *indices: int) -> Path:
    """A folder with the manifest and these parts alone, as one go carries them."""
    there.mkdir(parents=True)
    for name in (parts.MANIFEST, *(f"part-{index}" for index in indices)):
        (there / name).write_bytes((bundle / name).read_bytes())
    return there


def whole(directory: Path) -> bytes:
    return io.BufferedReader(PartReader(directory, parts.read_manifest(directory))).read()


def test_no_part_is_above_the_bound_and_none_but_the_last_below(tmp_path: Path) -> None:
    manifest = cut(tmp_path / "bundle")
    sizes = [(tmp_path / "bundle" / part.file_name).stat().st_size for part in manifest.parts]
    assert sizes == [part.size_bytes for part in manifest.parts] == [1000, 1000, 500]


@given(content=st.binary(min_size=1, max_size=300), limit_bytes=st.integers(5, 400))
def test_any_content_comes_back_from_its_parts(
    content: bytes, limit_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bundle")
    manifest = cut(folder, content, limit_bytes=limit_bytes)
    assert all(part.size_bytes <= limit_bytes for part in manifest.parts)
    assert whole(folder) == content


def test_parts_join_in_any_order_and_twice(tmp_path: Path) -> None:
    cut(tmp_path / "bundle")
    there = tmp_path / "there"
    for at, (index, missing) in enumerate([(3, [1, 2]), (1, [2]), (1, [2]), (2, [])]):
        carried = go(tmp_path / "bundle", tmp_path / f"go{at}", index)
        assert [part.index for part in parts.join(carried, there)] == missing
    assert whole(there) == CONTENT


def test_a_torn_part_is_refused_and_leaves_the_others(tmp_path: Path) -> None:
    cut(tmp_path / "bundle")
    parts.join(go(tmp_path / "bundle", tmp_path / "go1", 1), tmp_path / "there")
    torn = go(tmp_path / "bundle", tmp_path / "go2", 2)
    (torn / "part-2").write_bytes((torn / "part-2").read_bytes()[:-1])
    with pytest.raises(BundleRefused, match="part-2 is torn: 999 of 1000 bytes"):
        parts.join(torn, tmp_path / "there")
    manifest = parts.read_manifest(tmp_path / "there")
    assert [part.index for part in parts.missing(tmp_path / "there", manifest)] == [2, 3]
    assert not list((tmp_path / "there").glob("part-2*"))


def test_a_part_with_one_changed_byte_is_refused(tmp_path: Path) -> None:
    cut(tmp_path / "bundle")
    changed = bytearray((tmp_path / "bundle/part-1").read_bytes())
    changed[500] ^= 1
    (tmp_path / "bundle/part-1").write_bytes(changed)
    with pytest.raises(BundleRefused, match="part-1 is damaged"):
        parts.join(tmp_path / "bundle", tmp_path / "there")


def test_a_part_torn_after_it_was_joined_is_taken_anew(tmp_path: Path) -> None:
    cut(tmp_path / "bundle")
    parts.join(tmp_path / "bundle", tmp_path / "there")
    (tmp_path / "there/part-2").write_bytes(b"")
    assert parts.join(tmp_path / "bundle", tmp_path / "there") == ()
    assert whole(tmp_path / "there") == CONTENT


def test_parts_of_two_bundles_do_not_mix(tmp_path: Path) -> None:
    cut(tmp_path / "one")
    cut(tmp_path / "two", CONTENT[::-1])
    parts.join(tmp_path / "one", tmp_path / "there")
    with pytest.raises(BundleRefused, match="another bundle"):
        parts.join(tmp_path / "two", tmp_path / "there")


def test_parts_without_their_manifest_are_no_bundle(tmp_path: Path) -> None:
    """A pack that was cut short has parts and no manifest."""
    writer = PartWriter(tmp_path, "engine-1.0", limit_bytes=1000)
    writer.write(CONTENT)
    writer.close()
    with pytest.raises(BundleRefused, match=r"is no bundle: it has no manifest\.json"):
        parts.join(tmp_path, tmp_path / "there")


def test_the_folder_above_the_bundles_names_them(tmp_path: Path) -> None:
    for name in ("engine-2.0", "engine-1.0"):
        cut(tmp_path / name)
    (tmp_path / "other").mkdir()
    with pytest.raises(BundleRefused) as refusal:
        parts.join(tmp_path, tmp_path / "there")
    assert str(refusal.value) == (
        f"{tmp_path} is no bundle; name one that is in it: "
        f"{tmp_path / 'engine-1.0'}, {tmp_path / 'engine-2.0'}"
    )
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    "manifest", [b"", b"[]", b'{"format": 2}', b'{"format": 1, "parts": []}', b"[" * 9000]
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, manifest: bytes) -> None:
    (tmp_path / parts.MANIFEST).write_bytes(manifest)
    with pytest.raises(BundleRefused, match="cannot be read"):
        parts.read_manifest(tmp_path)
