"""Plans: the cheaper of chain and checkpoint, or a clear refusal."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from harvester.contracts.errors import ConfigError, Corrupt, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.encoding.codec import Encoding
from weightsync.layout.manifest import IndexSection, Manifest
from weightsync.layout.names import Kind, VersionRef
from weightsync.receive.plan import MAX_CHAIN, PlanStep, PullPlan, likely_refs, plans


@dataclass
class FakeStore:
    """Versions by size; a base of None is a full one."""

    steps: dict[VersionRef, PlanStep] = field(default_factory=dict)
    broken: set[VersionRef] = field(default_factory=set)
    asked: list[VersionRef] = field(default_factory=list)

    def add(
        self, kind: Kind, version: int, size_bytes: int, *, full: bool, is_ours: bool = True
    ) -> None:
        ref = VersionRef(kind, WeightVersion(version))
        manifest = Manifest(
            version=ref.version,
            base_version=None if full else WeightVersion(version - 1),
            delta_encoding=None if full else Encoding.ROSEMUX,
            checksum_format="xxh3-128",
            weight_map={},
            section=IndexSection(1, "", 0, {}) if is_ours else None,
        )
        self.steps[ref] = PlanStep(ref, manifest, size_bytes)

    def add_skip(self, base: int, version: int, size_bytes: int) -> None:
        ref = VersionRef(Kind.SKIP, WeightVersion(version), WeightVersion(base))
        weight = self.steps[VersionRef(Kind.WEIGHT, ref.version)].manifest
        self.steps[ref] = PlanStep(ref, replace(weight, base_version=ref.base), size_bytes)

    def step(self, ref: VersionRef) -> PlanStep | None:
        self.asked.append(ref)
        if ref in self.broken:
            raise Corrupt(f"{ref.directory} is broken")
        return self.steps.get(ref)

    def strike(self, kind: Kind, version: int) -> None:
        self.broken.add(VersionRef(kind, WeightVersion(version)))


@pytest.fixture
def store() -> FakeStore:
    """1 full, 2 to 8 deltas of 10 bytes, an anchor of 100 bytes beside 5."""
    store = FakeStore()
    store.add(Kind.WEIGHT, 1, 100, full=True)
    for version in range(2, 9):
        store.add(Kind.WEIGHT, version, 10, full=False)
    store.add(Kind.ANCHOR, 5, 100, full=True)
    return store


def _plan(store: FakeStore, current: int | None, target: int, latest: int = 8) -> PullPlan:
    return next(_plans(store, current, target, latest))


def _plans(
    store: FakeStore, current: int | None, target: int, latest: int = 8, *, known: bool = False
) -> Iterator[PullPlan]:
    return plans(
        store.step,
        current=None if current is None else WeightVersion(current),
        target=WeightVersion(target),
        latest=WeightVersion(latest),
        layout_is_known=known,
        skips=[ref for ref in store.steps if ref.kind is Kind.SKIP],
    )


def _directories(plan: PullPlan) -> list[str]:
    return [step.ref.directory for step in plan.steps]


def test_a_follower_takes_the_deltas_alone(store: FakeStore) -> None:
    plan = _plan(store, 6, 8)
    assert plan.current == 6
    assert _directories(plan) == ["weight_v000007", "weight_v000008"]
    assert plan.root is not None
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


def test_a_broken_anchor_is_passed_on_the_way_to_an_older_one(store: FakeStore) -> None:
    store.strike(Kind.ANCHOR, 5)
    joins, follows = _plan(store, None, 7), _plan(store, 6, 8)
    assert _directories(joins)[0] == "weight_v000001"
    assert len(joins.steps) == 7
    assert (follows.current, len(follows.steps)) == (6, 2)
    assert follows.root is not None
    assert follows.root.ref == VersionRef(Kind.WEIGHT, WeightVersion(1))


def test_the_other_ways_are_older_checkpoints_and_their_layouts_for_the_same_chain(
    store: FakeStore,
) -> None:
    ways = [
        (way.current, None if way.root is None else way.root.ref.directory)
        for way in _plans(store, 6, 8, known=True)
    ]
    assert ways == [
        (6, "anchor_v000005"),
        (None, "anchor_v000005"),
        (6, "weight_v000001"),
        (None, "weight_v000001"),
        (6, None),
    ]


def test_an_older_way_is_read_only_when_the_first_is_refused(store: FakeStore) -> None:
    ways = _plans(store, None, 8)
    next(ways)
    oldest_read = min(ref.version for ref in store.asked)
    assert oldest_read == 5
    next(ways)
    assert min(ref.version for ref in store.asked) == 1


def test_a_holder_needs_no_checkpoint_at_all_where_it_knows_its_own_layout(
    store: FakeStore,
) -> None:
    store.strike(Kind.ANCHOR, 5)
    store.strike(Kind.WEIGHT, 1)
    with pytest.raises(Corrupt, match="anchor_v000005"):
        _plan(store, 6, 8)
    (way,) = _plans(store, 6, 8, known=True)
    assert (way.root, _directories(way)) == (None, ["weight_v000007", "weight_v000008"])


def test_a_broken_target_is_reached_by_the_anchor_beside_it(store: FakeStore) -> None:
    store.strike(Kind.WEIGHT, 5)
    assert _directories(_plan(store, 4, 5)) == ["anchor_v000005"]
    assert _directories(_plan(store, 4, 6)) == ["anchor_v000005", "weight_v000006"]


def test_without_an_intact_way_the_first_fault_is_raised(store: FakeStore) -> None:
    store.strike(Kind.WEIGHT, 8)
    with pytest.raises(Corrupt, match="weight_v000008 is broken"):
        _plan(store, 6, 8)


@pytest.fixture
def theirs() -> FakeStore:
    """Another trainer's store: its base and more deltas than a chain may have."""
    store = FakeStore()
    store.add(Kind.WEIGHT, 0, 100, full=True, is_ours=False)
    for version in range(1, MAX_CHAIN + 77):
        store.add(Kind.WEIGHT, version, 10, full=False, is_ours=False)
    return store


def test_a_holder_of_another_trainer_s_store_looks_at_new_versions_alone(theirs: FakeStore) -> None:
    newest = MAX_CHAIN + 76
    plan = next(_plans(theirs, newest - 2, newest, newest, known=True))
    assert (plan.current, plan.root, len(plan.steps)) == (newest - 2, None, 2)
    assert min(ref.version for ref in theirs.asked) == newest - 2


def test_a_broken_chain_of_another_trainer_leads_to_its_base(theirs: FakeStore) -> None:
    ways = [(way.current, len(way.steps)) for way in _plans(theirs, 6, 8, 1000, known=True)]
    assert ways[:2] == [(6, 2), (6, 2)]
    assert (None, 9) in ways


def test_a_reader_too_far_from_a_full_checkpoint_is_refused(theirs: FakeStore) -> None:
    newest = MAX_CHAIN + 76
    with pytest.raises(Stale, match=f"version {newest} is over {MAX_CHAIN} deltas away"):
        _plan(theirs, None, newest, newest)


@pytest.fixture
def skipping(store: FakeStore) -> FakeStore:
    """The store with skip deltas from 1 to 5, 5 to 7 and 3 to 7."""
    for base, version, size_bytes in ((1, 5, 25), (5, 7, 15), (3, 7, 28)):
        store.add_skip(base, version, size_bytes)
    return store


def test_a_follower_takes_the_longest_skip_delta_that_it_can_use(skipping: FakeStore) -> None:
    assert _directories(_plan(skipping, 3, 8)) == ["skip_v000003_v000007", "weight_v000008"]
    assert _directories(_plan(skipping, 4, 8)) == [
        "weight_v000005",
        "skip_v000005_v000007",
        "weight_v000008",
    ]
    assert _directories(_plan(skipping, 6, 8)) == ["weight_v000007", "weight_v000008"]


def test_a_skip_delta_saves_the_indexes_of_what_it_replaces(skipping: FakeStore) -> None:
    _plan(skipping, 3, 8)
    asked = {ref.directory for ref in skipping.asked}
    assert not asked & {"weight_v000007", "weight_v000006", "weight_v000005"}


def test_the_ways_without_a_skip_delta_follow_those_with_one(skipping: FakeStore) -> None:
    ways = [_directories(plan) for plan in _plans(skipping, 5, 7)]
    assert ways[0] == ["skip_v000005_v000007"]
    assert ["weight_v000006", "weight_v000007"] in ways
    assert ["anchor_v000005", "skip_v000005_v000007"] in ways


def test_the_index_of_a_broken_skip_delta_costs_no_way(skipping: FakeStore) -> None:
    skipping.broken.add(VersionRef(Kind.SKIP, WeightVersion(7), WeightVersion(3)))
    assert _directories(_plan(skipping, 3, 7)) == [
        "weight_v000004",
        "weight_v000005",
        "skip_v000005_v000007",
    ]


def test_a_skip_delta_with_another_base_than_its_name_is_not_taken(store: FakeStore) -> None:
    store.add_skip(5, 7, 15)
    ref = VersionRef(Kind.SKIP, WeightVersion(7), WeightVersion(5))
    wrong = replace(store.steps[ref].manifest, base_version=WeightVersion(4))
    store.steps[ref] = PlanStep(ref, wrong, 15)
    assert _directories(_plan(store, 5, 7)) == ["weight_v000006", "weight_v000007"]


@pytest.mark.parametrize(("current", "target"), [(3, 8), (4, 8), (6, 8), (1, 5), (7, 7), (0, 8)])
def test_the_indexes_that_a_plan_reads_are_those_that_names_announce(
    skipping: FakeStore, current: int, target: int
) -> None:
    refs = likely_refs(skipping.steps, since=WeightVersion(current), target=WeightVersion(target))
    plan = _plan(skipping, current or None, target)
    assert {step.ref for step in plan.steps if step.manifest.base_version} <= refs
    assert len(refs) <= len(plan.steps) + 3


def test_the_number_of_a_version_costs_nothing_to_look_ahead(skipping: FakeStore) -> None:
    """LATEST may name any: `weight_v999999999999999`."""
    huge = WeightVersion(999_999_999_999_999)
    skipping.add(Kind.WEIGHT, huge, 10, full=False)
    refs = likely_refs(skipping.steps, since=WeightVersion(0), target=huge)
    assert VersionRef(Kind.WEIGHT, huge) in refs
    assert len(refs) <= len(skipping.steps)


def test_a_broken_skip_delta_is_not_read_again_behind_a_full_checkpoint(
    skipping: FakeStore,
) -> None:
    ways = [_directories(plan) for plan in _plans(skipping, 5, 7)]
    singles = ways.index(["weight_v000006", "weight_v000007"])
    assert all("skip_v000005_v000007" not in way for way in ways[1 : singles + 1])


def test_the_first_fault_is_of_a_version_and_not_of_a_skip_delta(skipping: FakeStore) -> None:
    for base in (3, 5):
        skipping.broken.add(VersionRef(Kind.SKIP, WeightVersion(7), WeightVersion(base)))
    for version in range(1, 8):
        skipping.strike(Kind.WEIGHT, version)
    skipping.strike(Kind.ANCHOR, 5)
    with pytest.raises(Corrupt, match=r"anchor|weight"):
        _plan(skipping, None, 7)


def test_a_skip_delta_behind_the_held_version_costs_no_way_either(skipping: FakeStore) -> None:
    ways = [_directories(plan) for plan in _plans(skipping, 7, 8)]
    assert ways[0] == ["weight_v000008"]
    assert ["anchor_v000005", "weight_v000006", "weight_v000007", "weight_v000008"] in ways
