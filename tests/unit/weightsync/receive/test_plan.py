"""Plans: the cheaper of chain and checkpoint, or a clear refusal."""

from dataclasses import dataclass, field

import pytest

from harvester.contracts.errors import ConfigError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.encoding.codec import Encoding
from weightsync.layout.manifest import Manifest
from weightsync.reading.store import Kind, VersionRef
from weightsync.receive.plan import Plan, Step, planned


@dataclass
class FakeStore:
    """Versions by size; a base of None is a full one."""

    steps: dict[VersionRef, Step] = field(default_factory=dict)

    def add(self, kind: Kind, version: int, size_bytes: int, *, full: bool) -> None:
        ref = VersionRef(kind, WeightVersion(version))
        manifest = Manifest(
            version=ref.version,
            base_version=None if full else WeightVersion(version - 1),
            delta_encoding=None if full else Encoding.ROSEMUX,
            checksum_format="xxh3-128",
            weight_map={},
            block=None,
        )
        self.steps[ref] = Step(ref, manifest, size_bytes)

    def step(self, ref: VersionRef) -> Step | None:
        return self.steps.get(ref)


@pytest.fixture
def store() -> FakeStore:
    """1 full, 2 to 8 deltas of 10 bytes, an anchor of 100 bytes beside 5."""
    store = FakeStore()
    store.add(Kind.WEIGHT, 1, 100, full=True)
    for version in range(2, 9):
        store.add(Kind.WEIGHT, version, 10, full=False)
    store.add(Kind.ANCHOR, 5, 100, full=True)
    return store


def _plan(store: FakeStore, current: int | None, target: int, latest: int = 8) -> Plan:
    return planned(
        store,
        current=None if current is None else WeightVersion(current),
        target=WeightVersion(target),
        latest=WeightVersion(latest),
    )


def _directories(plan: Plan) -> list[str]:
    return [step.ref.directory for step in plan.steps]


def test_a_follower_takes_the_deltas_alone(store: FakeStore) -> None:
    plan = _plan(store, 6, 8)
    assert plan.current == 6
    assert _directories(plan) == ["weight_v000007", "weight_v000008"]
    assert plan.root.ref == VersionRef(Kind.ANCHOR, WeightVersion(5))


def test_a_joiner_starts_from_the_nearest_checkpoint(store: FakeStore) -> None:
    plan = _plan(store, None, 7)
    assert plan.current is None
    assert _directories(plan) == ["anchor_v000005", "weight_v000006", "weight_v000007"]
    assert plan.size_bytes == 120


def test_a_chain_passes_an_anchor_while_it_is_cheaper(store: FakeStore) -> None:
    assert _plan(store, 2, 8).current == 2
    assert len(_plan(store, 2, 8).steps) == 6


def test_a_checkpoint_is_taken_where_the_chain_is_dearer(store: FakeStore) -> None:
    for version in (3, 4):
        store.add(Kind.WEIGHT, version, 90, full=False)
    plan = _plan(store, 2, 6)
    assert plan.current is None
    assert _directories(plan) == ["anchor_v000005", "weight_v000006"]


def test_nothing_is_read_where_the_version_is_held(store: FakeStore) -> None:
    plan = _plan(store, 8, 8)
    assert plan.steps == ()
    assert plan.manifest.version == 8


def test_a_chain_does_not_cross_a_new_beginning(store: FakeStore) -> None:
    store.add(Kind.WEIGHT, 7, 100, full=True)
    assert _directories(_plan(store, 6, 8)) == ["weight_v000007", "weight_v000008"]
    assert _plan(store, 6, 8).current is None


def test_a_missing_link_leads_to_the_checkpoint_behind_it(store: FakeStore) -> None:
    del store.steps[VersionRef(Kind.WEIGHT, WeightVersion(4))]
    assert _plan(store, 3, 6).current is None


def test_an_unpublished_version_says_what_is_there(store: FakeStore) -> None:
    with pytest.raises(ConfigError, match="version 9 is not published yet; the newest is 8"):
        _plan(store, None, 9)
    with pytest.raises(ConfigError, match="the newest is 7"):
        _plan(store, None, 8, latest=7)


def test_going_back_is_stale(store: FakeStore) -> None:
    with pytest.raises(Stale, match="older than version 6"):
        _plan(store, 6, 5)


def test_a_pruned_version_is_stale(store: FakeStore) -> None:
    for version in (1, 2, 3, 4):
        del store.steps[VersionRef(Kind.WEIGHT, WeightVersion(version))]
    for current in (None, 2, 3):
        with pytest.raises(Stale, match="pruned"):
            _plan(store, current, 4)
