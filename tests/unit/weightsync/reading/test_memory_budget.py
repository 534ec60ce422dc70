"""A receiver's memory budget: half kept, half lent, the largest tensor alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import ConfigError
from weightsync.elements.batches import spread
from weightsync.reading.memory_budget import MIN_STAGING_BYTES, MemoryBudget

MIB = 1 << 20


def test_half_of_it_is_kept() -> None:
    room = MemoryBudget(4 * MIB)
    assert room.keep(2 * MIB)
    assert not room.keep(1)
    room.give_back(MIB)
    assert room.keep(MIB)
    assert not room.keep(1)


def test_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least"):
        MemoryBudget(MIN_STAGING_BYTES - 1)


@given(sizes=st.lists(st.integers(0, 3 * MIB), max_size=40))
def test_concurrent_work_fits_the_room_or_is_alone(sizes: list[int]) -> None:
    room, lock = MemoryBudget(4 * MIB), threading.Lock()
    running: list[int] = []

    def work(number: int) -> int:
        with lock:
            running.append(sizes[number])
            assert len(running) == 1 or sum(running) <= room.lent_bytes
        with lock:
            running.remove(sizes[number])
        return number

    with ThreadPoolExecutor(3) as pool:
        found = list(
            spread(pool, work, range(len(sizes)), sizes.__getitem__, limit_bytes=room.lent_bytes)
        )
    assert found == list(range(len(sizes)))


def test_an_error_comes_after_everything_has_ended() -> None:
    room, slow, ended = MemoryBudget(MIN_STAGING_BYTES), threading.Event(), threading.Event()

    def work(number: int) -> None:
        if number == 0:
            slow.wait(10)
            raise ValueError("broken")
        slow.set()
        ended.wait(0.05)
        ended.set()

    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="broken"):
        list(spread(pool, work, range(2), lambda _: 0, limit_bytes=room.lent_bytes))
    assert ended.is_set()
