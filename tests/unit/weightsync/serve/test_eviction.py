"""Room is made with the least recently used, never with what is in use."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from weightsync.serve.object_cache import CachedObject, evicted

objects = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(0, 1)), max_size=12
).map(
    lambda given: [
        CachedObject(Path(f"o{at}"), size, None, users=users, used_at=used_at)
        for at, (size, used_at, users) in enumerate(given)
    ]
)


@given(objects, st.integers(-100, 300))
def test_kept_files_fit_the_cache_and_files_in_use_stay(
    held: list[CachedObject], capacity: int
) -> None:
    doomed = evicted(held, capacity_bytes=capacity)
    if doomed is None:
        assert sum(one.size_bytes for one in held if one.users) > capacity
        return
    left = [one for one in held if one not in doomed]
    left_bytes = sum(one.size_bytes for one in left)
    assert left_bytes <= capacity
    assert not any(one.users for one in doomed)
    if doomed:
        # Without the last of them it would not have fitted, and all that stay were used later.
        assert left_bytes + doomed[-1].size_bytes > capacity
        last = max(one.used_at for one in doomed)
        assert all(one.used_at >= last for one in left if not one.users)


def test_nothing_goes_while_there_is_room() -> None:
    assert evicted([CachedObject(Path("a"), 60, None)], capacity_bytes=60) == ()
