"""Pruning never takes a version away that a kept one needs."""

from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.ids import WeightVersion
from weightsync.retention import superseded
from weightsync.store import Kind, VersionRef


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
