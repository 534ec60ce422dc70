"""Seeded faults over real processes: all recover, and nothing is claimed that is not there."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from benchmarks.weightsync.faults import measure
from benchmarks.weightsync.faults.fault import FaultClass, Mend, nothing
from benchmarks.weightsync.faults.headers import HEADERS
from benchmarks.weightsync.faults.kills import KILLS
from benchmarks.weightsync.faults.machine import MACHINE
from benchmarks.weightsync.faults.manifests import MANIFESTS
from benchmarks.weightsync.faults.payloads import PAYLOADS
from benchmarks.weightsync.faults.states import LAYOUT, states
from benchmarks.weightsync.faults.template import Division, Template
from benchmarks.weightsync.faults.trials import struck
from benchmarks.weightsync.faults.world import FaultWorld
from benchmarks.weightsync.faults.zygote import Zygote
from weightsync.encoding.codec import Encoding, encode
from weightsync.encoding.grouped import GROUPS
from weightsync.encoding.sparse import SPARSE
from weightsync.receive.held_parts import TensorParallel


def test_twenty_faults_are_survived() -> None:
    result = measure(seed=11, count=20)
    assert result["failures"] == []
    assert (result["tried"], result["recovered"], result["wrong_state"]) == (20, 20, 0)
    assert result["refused"] > 0


def test_the_states_are_published_in_groups_and_in_streams() -> None:
    first, second = states(1)[:2]
    made = [encode(first[name], second[name]) for name in LAYOUT if first[name].size]
    layouts = {found.payload[1] for found in made if found and found.encoding is Encoding.ROSEMUX}
    assert layouts == {GROUPS, SPARSE}


def test_no_two_classes_share_a_name() -> None:
    names = [fault.name for fault in (*KILLS, *PAYLOADS, *HEADERS, *MANIFESTS, *MACHINE)]
    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template(tmp_path_factory.mktemp("faults"), seed=3)


@pytest.fixture
def world(template: Template, tmp_path: Path) -> Iterator[FaultWorld]:
    """A world without a fork server: these faults kill no process."""
    made = FaultWorld(root=tmp_path / "world", template=template, rng=Random(1), zygote=Zygote())
    yield made
    made.end()


def test_a_holder_that_claims_other_bits_is_found_out(world: FaultWorld) -> None:
    def strike(world: FaultWorld) -> Mend:
        holder = world.hold_memory()
        holder.bits["layers.0.scale"][3] ^= 1
        world.look()
        return nothing

    struck(world, FaultClass("a lie", strike))
    assert world.wrong == ["claims version 5 and holds other bits"]


def test_a_rank_that_holds_other_bits_than_its_part_is_found_out(world: FaultWorld) -> None:
    def strike(world: FaultWorld) -> Mend:
        holder = world.hold_part()
        next(bits for bits in holder.bits.values() if bits.size)[0] ^= 1
        world.look()
        return nothing

    struck(world, FaultClass("a lie", strike))
    assert world.wrong == ["claims version 5 and holds other bits"]


def test_an_engine_that_holds_other_bits_is_found_out(world: FaultWorld) -> None:
    def strike(world: FaultWorld) -> Mend:
        world.hold_engine().model.held["layers.0.norm.weight"].data[3] += 1
        world.look()
        return nothing

    outcome = struck(world, FaultClass("a lie", strike))
    assert world.wrong == ["claims version 5 and holds other bits"]
    assert outcome.recovered, "the next version finds it and is written whole"


@pytest.mark.parametrize("is_cut", [True, False])
def test_only_a_forged_delta_of_a_box_is_beyond_a_rank(world: FaultWorld, is_cut: bool) -> None:
    """It is counted apart, and the restarted rank is whole. All else that is wrong stays wrong."""

    def strike(world: FaultWorld) -> Mend:
        holder = world.hold_part()
        while not isinstance(holder.share, TensorParallel):
            holder = world.hold_part()
        holder.attempt()
        name = next(
            name
            for name, bits in holder.bits.items()
            if bits.size and (bits.size < LAYOUT[name].elements) == is_cut
        )
        holder.bits[name][0] ^= 1
        world.forged_delta = {name}
        world.look()
        return nothing

    outcome = struck(world, FaultClass("a forged delta", strike, in_store=True))
    assert world.has_unseen == is_cut
    assert outcome.recovered == is_cut
    assert world.wrong[:1] == ([] if is_cut else ["claims version 7 and holds other bits"])


@pytest.mark.parametrize("division", [*Division])
def test_one_damaged_file_of_several_is_found_out(
    template: Template, tmp_path: Path, division: Division
) -> None:
    """A rank takes no damaged file of its part, and gets there once the store is whole."""
    world = FaultWorld(
        root=tmp_path / "world",
        template=template,
        rng=Random(2),
        zygote=Zygote(),
        division=division,
        is_object_store=True,
    )
    for number in range(3):
        world.hold_part(fresh=number == 2)
        for shard in world.store.glob("*/*.safetensors"):
            shard.write_bytes(shard.read_bytes()[:-1])
        assert world.attempt() is not None
        world.restore()
        assert world.recovered()
        world.holder.close()
    assert world.wrong == []
    world.end()


def test_a_holder_that_claims_another_version_is_found_out(world: FaultWorld) -> None:
    def strike(world: FaultWorld) -> Mend:
        holder = world.hold_memory()
        holder.version = holder.version and type(holder.version)(4)
        world.look()
        return nothing

    struck(world, FaultClass("a lie", strike))
    assert world.wrong[0].startswith("claims version 4, ")


def test_a_store_that_stays_broken_is_no_recovery(world: FaultWorld) -> None:
    def strike(world: FaultWorld) -> Mend:
        world.hold_directory()
        world.shard(world.newest).write_bytes(b"")
        for anchor in world.store.glob("anchor_*"):
            (anchor / "READY").unlink()
        return nothing

    outcome = struck(world, FaultClass("never mended", strike))
    assert (outcome.recovered, outcome.refused) == (False, True)
    assert world.wrong == []


def test_a_crash_is_no_recovery(world: FaultWorld) -> None:
    def strike(world: FaultWorld) -> Mend:
        world.hold_memory()
        raise KeyError("not ours")

    outcome = struck(world, FaultClass("a crash", strike))
    assert not outcome.recovered
    assert "not ours" in outcome.failure
