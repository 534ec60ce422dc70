"""A relay's directory: bounded, of one process, and nothing half in it is believed."""

import asyncio
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import xxhash

from harvester.contracts.errors import ConfigError, Corrupt, Exhausted
from weightsync.serve.object_cache import CachedObject, ObjectCache, digest_on_disk
from weightsync.serve.relayed_file import RelayedFile
from weightsync.transport.ranges import ByteSpan


def _key(raw: bytes) -> str:
    return f"{xxhash.xxh3_128_hexdigest(raw)}-{len(raw)}"


def _put(cache: ObjectCache, raw: bytes, *, store: str = "job-a") -> CachedObject:
    held = cache.take(store, _key(raw), len(raw))
    held.part.write_bytes(raw)
    cache.settle(held)
    cache.leave(held)
    return held


def test_a_whole_object_is_there_after_a_restart_and_has_to_prove_itself(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 1000)
    _put(cache, b"weights" * 10)
    cache.close()
    again = ObjectCache(tmp_path, 1000)
    held = again.take("job-a", _key(b"weights" * 10), 70)
    assert held.is_whole
    assert not held.proved
    assert held.handle is not None
    assert digest_on_disk(held.handle, 70) == xxhash.xxh3_128_hexdigest(b"weights" * 10)
    again.leave(held)
    again.close()


def test_a_growing_object_is_gone_after_a_restart(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 1000)
    held = cache.take("job-a", _key(b"half"), 4)
    held.part.write_bytes(b"ha")
    cache.close()
    again = ObjectCache(tmp_path, 1000)
    assert [path.name for path in (tmp_path / "job-a").iterdir()] == []
    held = again.take("job-a", _key(b"half"), 4)
    assert held.chunks is not None
    assert not held.is_whole
    again.leave(held)
    again.close()


def test_an_unverifiable_file_is_not_kept_over_a_restart(tmp_path: Path) -> None:
    ObjectCache(tmp_path, 1000).close()
    (tmp_path / "job-a").mkdir()
    for name in ("0" * 32 + "-foreign", "0" * 32 + "-foreign.part", "0" * 32 + "-7.part"):
        (tmp_path / "job-a" / name).write_bytes(b"x")
    ObjectCache(tmp_path, 1000).close()
    assert list((tmp_path / "job-a").iterdir()) == []


def test_files_that_no_relay_wrote_stay(tmp_path: Path) -> None:
    ObjectCache(tmp_path, 1000).close()
    theirs = tmp_path / "photos" / "2026" / "a.jpg"
    theirs.parent.mkdir(parents=True)
    for path in (theirs, tmp_path / "photos" / "passwd", tmp_path / "photos" / "film.part"):
        path.write_bytes(b"x")
    before = set(tmp_path.rglob("*"))
    ObjectCache(tmp_path, 1000).close()
    assert set(tmp_path.rglob("*")) == before


def test_a_directory_with_other_files_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(ConfigError, match="name an empty directory"):
        ObjectCache(tmp_path, 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 100)
    first, second = _put(cache, b"a" * 40), _put(cache, b"b" * 40)
    cache.leave(cache.take("job-a", _key(b"a" * 40), 40))
    _put(cache, b"c" * 40)
    assert first.path.exists()
    assert not second.path.exists()
    cache.close()


def test_a_file_in_use_stays_in_the_cache(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 100)
    _put(cache, b"a" * 60)
    held = cache.take("job-a", _key(b"a" * 60), 60)
    with pytest.raises(Exhausted, match="in use"):
        cache.take("job-a", _key(b"b" * 60), 60)
    cache.leave(held)
    _put(cache, b"b" * 60)
    assert not held.path.exists()
    cache.close()


@contextmanager
def _disk_of(size_bytes: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files under `root` are refused beyond this size together."""
    allocate = os.posix_fallocate

    def limited(handle: int, at: int, size: int) -> None:
        if (
            sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) + size
            > size_bytes
        ):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(handle, at, size)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", limited)
        yield


def test_a_disk_that_is_smaller_than_the_bound_has_the_copies_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raws = [bytes([n]) * 300 for n in range(6)]
    with closing(ObjectCache(tmp_path, 64 << 30)) as cache, _disk_of(1000, tmp_path, monkeypatch):
        for raw in raws:
            _put(cache, raw)
        assert [cache.holds("job-a", _key(raw)) for raw in raws] == [False] * 3 + [True] * 3
        used = [cache.take("job-a", _key(raw), 300) for raw in raws[3:5]]
        with pytest.raises(Exhausted, match="No space left"):
            cache.take("job-a", _key(b"large" * 200), 1000)
        assert all(held.is_whole and held.path.exists() for held in used), "they are being read"
        for held in used:
            cache.leave(held)


def test_a_disk_that_others_filled_costs_no_more_copies_than_the_new_one_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raws = [bytes([n]) * 300 for n in range(6)]
    with closing(ObjectCache(tmp_path, 64 << 30)) as cache:
        for raw in raws:
            _put(cache, raw)
        with _disk_of(0, tmp_path, monkeypatch), pytest.raises(Exhausted, match="No space left"):
            cache.take("job-a", _key(b"new" * 150), 450)
        assert [cache.holds("job-a", _key(raw)) for raw in raws] == [False] * 2 + [True] * 4


def test_a_cache_that_shrank_is_within_its_bound_from_the_start(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 1000)
    for letter in b"abc":
        _put(cache, bytes([letter]) * 100)
    cache.close()
    ObjectCache(tmp_path, 150).close()
    assert sum(path.stat().st_size for path in (tmp_path / "job-a").iterdir()) <= 150


def test_a_file_larger_than_the_cache_is_refused_with_the_remedy(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 100)
    with pytest.raises(ConfigError, match="--cache-bytes"):
        cache.take("job-a", _key(b"x" * 101), 101)
    cache.close()


def test_a_deleted_file_begins_anew(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 100)
    _put(cache, b"gone").path.unlink()
    held = cache.take("job-a", _key(b"gone"), 4)
    assert not held.is_whole
    cache.leave(held)
    cache.close()


def test_two_relays_do_not_share_a_directory(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 100)
    with pytest.raises(ConfigError, match="another cache"):
        ObjectCache(tmp_path, 100)
    cache.close()


def test_equal_files_of_two_stores_are_two_objects(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 1000)
    first = _put(cache, b"same")
    held = cache.take("job-b", _key(b"same"), 4)
    assert not held.is_whole
    assert held.path != first.path
    cache.leave(held)
    cache.close()


@contextmanager
def _relayed(cache: ObjectCache, raw: bytes) -> Iterator[RelayedFile]:
    held = cache.take("job-a", _key(raw), len(raw))

    async def pull(span: ByteSpan) -> None:
        with held.part.open("r+b") as file:
            file.seek(span.start)
            file.write(raw[span.start : span.stop])

    with ThreadPoolExecutor(1) as disk:
        relayed = RelayedFile(
            held,
            cache,
            xxh3_128=xxhash.xxh3_128_hexdigest(raw),
            pull=pull,
            streams=1,
            disk=disk,
            on_end=lambda _: None,
        )
        with relayed.reader() as file:
            yield file


def _failing(*_: object) -> str:
    raise OSError(errno.EIO, "Input/output error")


async def test_a_copy_that_the_disk_does_not_give_back_is_served_to_no_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.serve.relayed_file.digest_on_disk", _failing)
    with closing(ObjectCache(tmp_path, 1000)) as cache, _relayed(cache, b"weights") as file:
        for _ in range(2):
            with pytest.raises(Corrupt, match="cannot be verified"):
                await asyncio.wait_for(file.read(ByteSpan(0, 7)), 30.0)
        assert not await file.is_sound(again=False)
    assert list((tmp_path / "job-a").iterdir()) == []


async def test_a_whole_copy_that_the_disk_does_not_give_back_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(ObjectCache(tmp_path, 1000)) as cache:
        _put(cache, b"weights")
    with closing(ObjectCache(tmp_path, 1000)) as cache:
        with _relayed(cache, b"weights") as file, monkeypatch.context() as patched:
            patched.setattr("weightsync.serve.relayed_file.digest_on_disk", _failing)
            assert not await file.is_sound(again=False)
        with _relayed(cache, b"weights") as file:
            assert await file.is_sound(again=False)
            assert await file.read(ByteSpan(0, 7)) == b"weights"
