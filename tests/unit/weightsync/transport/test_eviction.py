"""Eviction removes the least recently used file, never one in use."""

from hypothesis import given
from hypothesis import strategies as st

from weightsync.transport.eviction import CacheEntry, evicted

entries = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 9), st.booleans()), max_size=12
).map(
    lambda given: [
        CacheEntry(key=f"o{at}", size_bytes=size, used_at=used_at, in_use=in_use)
        for at, (size, used_at, in_use) in enumerate(given)
    ]
)


@given(entries, st.integers(0, 100), st.integers(0, 300))
def test_kept_files_fit_the_cache_and_files_in_use_stay(
    held: list[CacheEntry], needed: int, capacity: int
) -> None:
    doomed = evicted(held, needed_bytes=needed, capacity_bytes=capacity)
    pinned = sum(entry.size_bytes for entry in held if entry.in_use)
    if doomed is None:
        assert pinned + needed > capacity
        return
    by_key = {entry.key: entry for entry in held}
    left = [entry for entry in held if entry.key not in doomed]
    assert sum(entry.size_bytes for entry in left) + needed <= capacity
    assert not any(by_key[key].in_use for key in doomed)
    if doomed:
        # Without the last of them it would not have fitted, and all that stay were used later.
        kept = sum(entry.size_bytes for entry in left) + by_key[doomed[-1]].size_bytes
        assert kept + needed > capacity
        last = max(by_key[key].used_at for key in doomed)
        assert all(entry.used_at >= last for entry in left if not entry.in_use)


def test_nothing_goes_while_there_is_room() -> None:
    held = [CacheEntry(key="a", size_bytes=60, used_at=0, in_use=False)]
    assert evicted(held, needed_bytes=40, capacity_bytes=100) == ()
