"""Pruning never takes a version away that a kept one needs."""

from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.ids import WeightVersion
from weightsync.layout.names import Kind, VersionRef
from weightsync.publish.version_writer import making_room, superseded


@given(
    latest=st.integers(1, 120),
    anchor_every=st.integers(1, 40),
    keep=st.integers(1, 60),
)
def test_every_kept_version_stays_reachable(latest: int, anchor_every: int, keep: int) -> None:
    weights = {VersionRef(Kind.WEIGHT, WeightVersion(v)) for v in range(1, latest + 1)}
    anchored = range(1 + anchor_every, latest + 1, anchor_every)
    anchors = {VersionRef(Kind.ANCHOR, WeightVersion(v)) for v in anchored}
    full = [WeightVersion(1), *(ref.version for ref in anchors)]
    doomed = superseded(
        weights | anchors,
        full_versions=full,
        latest=WeightVersion(latest),
        keep_versions=keep,
    )
    left = (weights | anchors) - set(doomed)
    for version in range(max(1, latest - keep + 1), latest + 1):
        root = max(v for v in full if v <= version)
        assert {ref for ref in left if ref.version == root}
        for step in range(root + 1, version + 1):
            assert VersionRef(Kind.WEIGHT, WeightVersion(step)) in left
    assert len([ref for ref in left if ref.kind is Kind.WEIGHT]) <= keep + anchor_every


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    anchor_every=st.integers(1, 25),
    needed=st.integers(0, 200),
    max_bytes=st.integers(0, 3000),
)
def test_room_is_made_by_the_fewest_versions_and_the_newest_chain_stays(
    sizes: list[int], anchor_every: int, needed: int, max_bytes: int
) -> None:
    refs = {VersionRef(Kind.WEIGHT, WeightVersion(v)): s for v, s in enumerate(sizes, 1)}
    full = [WeightVersion(v) for v in range(1, len(sizes) + 1, anchor_every)]
    found = making_room(
        refs,
        full_versions=full,
        latest=WeightVersion(len(sizes)),
        needed_bytes=needed,
        max_bytes=max_bytes,
    )
    newest_chain = sum(size for ref, size in refs.items() if ref.version >= full[-1])
    if found is None:
        assert newest_chain + needed > max_bytes
        return
    left = {ref.version: size for ref, size in refs.items() if ref not in found}
    assert sum(left.values()) + needed <= max_bytes
    assert min(left) in full, "what is kept begins with a full checkpoint"
    assert len(sizes) in left
    if found:
        before = max(v for v in full if v < min(left))
        kept = sum(size for ref, size in refs.items() if ref.version >= before)
        assert kept + needed > max_bytes, "no chain went for nothing"


def test_the_oldest_go_first() -> None:
    refs = {VersionRef(Kind.WEIGHT, WeightVersion(v)) for v in range(1, 9)}
    refs.add(VersionRef(Kind.ANCHOR, WeightVersion(6)))
    doomed = superseded(
        refs,
        full_versions=[WeightVersion(1), WeightVersion(6)],
        latest=WeightVersion(8),
        keep_versions=2,
    )
    assert [ref.version for ref in doomed] == [1, 2, 3, 4, 5]
