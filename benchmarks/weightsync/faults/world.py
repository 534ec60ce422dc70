"""One fault's world: a store, a holder of its weights, and the truth about every version.

The holders are the product's own; their claims are checked here by other means: the bytes of the
files or of the memory against the state that was published under that version.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from socket import create_connection

from safetensors import SafetensorError

from benchmarks.weightsync.faults.holders import (
    Claim,
    DirectoryHolder,
    EngineHolder,
    Holder,
    MemoryHolder,
    Share,
    Source,
)
from benchmarks.weightsync.faults.states import COUNT, LAYOUT, dim_of, hashes, states, tensors
from benchmarks.weightsync.faults.tasks import ChildEnd, ChildTask
from benchmarks.weightsync.faults.template import (
    ANCHOR_EVERY,
    HELD_VERSION,
    NEWEST,
    SHARD_BYTES,
    Division,
    Template,
)
from benchmarks.weightsync.faults.zygote import Zygote
from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import RoseMuxError
from harvester.contracts.ids import WeightVersion
from weightsync.encoding.codec import Encoding
from weightsync.layout.names import INDEX_FILE, LATEST_FILE, READY_FILE, Kind, VersionRef, refs_in
from weightsync.publish.settings import VersionSettings, WorkSettings
from weightsync.publisher import Publisher
from weightsync.receive.held_parts import Names, TensorParallel

_LISTENS_WITHIN_S = 1.0
_ATTEMPTS = 3
"""A `--watch` tries for ever; three must do."""


@dataclass
class FaultWorld:
    """The place of one fault. `newest` is 6 (reached by deltas) or 7 (an anchor beside it)."""

    root: Path
    template: Template
    rng: Random
    zygote: Zygote
    servers: tuple[Zygote, ...] = ()
    """Fork servers for what serves: a child of each lives while others work."""
    encoding: Encoding = Encoding.ROSEMUX
    division: Division = Division.ONE_FILE
    is_object_store: bool = False
    """Whether the holder reads the store as objects, by fsspec."""
    clock: Clock = field(default_factory=MonotonicClock)
    newest: int = NEWEST
    wrong: list[str] = field(default_factory=list)
    forged_delta: set[str] = field(default_factory=set)
    """Tensors in a file of a delta that was bent, and whose digest in the index was forged."""
    has_unseen: bool = False
    """Whether a rank took such a delta of a tensor that it holds a box of. Nothing that it has
    tells it: the tensor's digest covers the other ranks' boxes too, and it has not read those."""
    ends: list[Callable[[], None]] = field(default_factory=list)
    """Actions to undo when the world ends."""
    holder: Holder = field(init=False)
    last_refusal: str | None = None

    def __post_init__(self) -> None:
        self.store = self.root / "store"
        location = f"file://{self.store}" if self.is_object_store else self.store
        self.source: Source = lambda: location
        self.is_served = False
        """Whether the holder reads by HTTP, from a server that may not listen yet."""
        self._stops: dict[int, Path] = {}
        self.truth = {version: version - 1 for version in range(1, NEWEST + 1)}
        """Index of the state that was published, or would have been, under a version."""
        self._next_state = NEWEST
        shutil.copytree(self.original, self.store)
        if self.newest < NEWEST:
            for version in range(self.newest + 1, NEWEST + 1):
                self.remove(version)
            self.point_latest(self.newest)
        self.pristine = self.root / "pristine"
        shutil.copytree(self.store, self.pristine)

    # The state that a fault finds.

    def read_by(self, source: Source) -> None:
        """Holders read from a server or relay."""
        self.source, self.is_served = source, True

    @property
    def source_kind(self) -> str:
        return f"{self.encoding} {self.division} {self.is_object_store}"

    def words(self) -> tuple[str, ...]:
        """Words for this world in counts."""
        objects = "read as objects" if self.is_object_store else "read as files"
        source = "read by HTTP" if self.is_served else objects
        return str(self.division), source, f"held in {self.holder.place}"

    @property
    def original(self) -> Path:
        """The store that this one is a copy of, with every version."""
        return self.template.store(self.encoding, self.division)

    @property
    def shard_bytes(self) -> int:
        """Bytes after which the store's publishers begin another file."""
        return SHARD_BYTES[self.division]

    def hold_directory(self, *, fresh: bool = False) -> DirectoryHolder:
        directory = self.root / "held"
        if not fresh:
            shutil.copytree(self.template.held, directory)
        holder = DirectoryHolder(self.source, directory, self.clock)
        self.holder = holder
        return holder

    def hold_memory(self, *, fresh: bool = False) -> MemoryHolder:
        version = None if fresh else HELD_VERSION
        holder = MemoryHolder(self.source, self.template.seed, self.clock, version=version)
        self.holder = holder
        return holder

    def hold_part(self, *, fresh: bool = False) -> MemoryHolder:
        """A rank of a parallel engine. Only what itself has written tells it what it holds."""
        holder = MemoryHolder(
            self.source, self.template.seed, self.clock, version=None, share=self._some_share()
        )
        if not (fresh or self.is_served):
            holder.take(WeightVersion(HELD_VERSION))
        self.holder = holder
        return holder

    def hold_engine(self, *, fresh: bool = False) -> EngineHolder:
        holder = EngineHolder(self.source, self.clock, stages=self.rng.random() < 0.5)
        if not (fresh or self.is_served):
            holder.take(WeightVersion(HELD_VERSION))
        self.holder = holder
        return holder

    def _some_share(self) -> Share:
        half = self.rng.choice("01234"), self.rng.choice("56789")
        ranks = self.rng.choice([2, 4])
        if self.rng.random() < 0.3:
            prefixes = tuple(f"layers.{layer}." for layer in half)
            return Names(lambda name: name.startswith(prefixes))
        return TensorParallel(rank=self.rng.randrange(ranks), ranks=ranks, dim_of=dim_of)

    def hold_any(self) -> Holder:
        fresh = self.rng.random() < 0.3
        holds = (self.hold_directory, self.hold_memory, self.hold_part, self.hold_engine)
        return self.rng.choice(holds)(fresh=fresh)

    def version_dir(self, version: int, kind: Kind = Kind.WEIGHT) -> Path:
        return self.store / VersionRef(kind, WeightVersion(version)).directory

    def shard(self, version: int, kind: Kind = Kind.WEIGHT) -> Path:
        """One of the version's files of tensors."""
        return self.rng.choice(shards(self.version_dir(version, kind)))

    def index(self, version: int, kind: Kind = Kind.WEIGHT) -> Path:
        return self.version_dir(version, kind) / INDEX_FILE

    def ready(self, version: int) -> Path:
        return self.version_dir(version) / READY_FILE

    @property
    def latest_file(self) -> Path:
        return self.store / LATEST_FILE

    def point_latest(self, version: int) -> None:
        name = VersionRef(Kind.WEIGHT, WeightVersion(version)).directory
        self.latest_file.write_text(name + "\n")

    def remove(self, version: int) -> None:
        for directory in self.store.glob(f"*_v{version:06d}"):
            shutil.rmtree(directory)

    def copy_held(self, target: Path) -> None:
        shutil.copytree(self.template.held, target)

    def make_foreign(self) -> None:
        """Makes the store like slime's and others': no section of ours, no READY, no anchors."""
        for root in (self.store, self.pristine):
            for extra in (*root.glob("anchor_*"), *root.glob("skip_*")):
                shutil.rmtree(extra)
            for ready in root.glob(f"*/{READY_FILE}"):
                ready.unlink()
            for index in root.glob(f"*/{INDEX_FILE}"):
                fields = json.loads(index.read_bytes())
                del fields["rosemux"]
                index.write_text(json.dumps(fields))

    # Remedies.

    def restore(self) -> None:
        """The damaged files are whole again, under the same names."""
        shutil.rmtree(self.store)
        shutil.copytree(self.pristine, self.store)

    def republish(self, *, copy_dir: Path | None = None) -> None:
        """A publisher is started on the store as it is and publishes the next state."""
        with Publisher(
            self.store,
            versions=VersionSettings(anchor_every=ANCHOR_EVERY),
            work=WorkSettings(copy_dir=copy_dir, shard_bytes=self.shard_bytes),
        ) as publisher:
            self.publish_with(publisher)

    def republish_and_prune(self) -> None:
        """Runs `republish` twice, and keeps nothing older."""
        with Publisher(
            self.store, versions=VersionSettings(anchor_every=1, keep_versions=1)
        ) as publisher:
            self.publish_with(publisher)
            self.publish_with(publisher)

    def keep_serving(self, which: int, task: ChildTask) -> None:
        """Starts a server that lives until the world ends."""
        self.serve(which, task)

        def end() -> None:
            self.stop(which)

        self.ends.append(end)

    def serve(self, which: int, task: ChildTask) -> None:
        self._stops[which] = Path(task.target)
        self.servers[which].begin(task)
        with suppress(OSError):
            _reached(task.port)

    def stop(self, which: int) -> ChildEnd:
        """Ends a server; returns its end."""
        self._stops[which].touch()
        return self.servers[which].ended()

    def new_stop(self) -> str:
        """A file that ends a server when it is there."""
        return str(self.root / f"stop-{self.rng.randrange(1 << 40)}")

    def hold_again(self) -> None:
        """Another holder in the place of one that has nothing left to fetch."""
        self.holder.close()
        shutil.rmtree(self.root / "held", ignore_errors=True)
        self.hold_any()

    def restart_part(self) -> None:
        """The rank's process is started again; it knows nothing of what it wrote."""
        old = self.holder
        old.close()
        share = old.share if isinstance(old, MemoryHolder) else None
        self.holder = MemoryHolder(
            self.source, self.template.seed, self.clock, version=None, share=share
        )

    def end(self) -> None:
        self.holder.close()
        for end in self.ends:
            end()
        shutil.rmtree(self.root)

    def mend(self) -> Callable[[], None]:
        """Mends a damaged store, in one of the two ways."""
        return self.rng.choice([self.restore, self.republish])

    def publish_with(self, publisher: Publisher) -> None:
        (index,) = self.expect_published(1)
        self.newest = publisher.publish(tensors(states(self.template.seed)[index])).version

    def expect_published(self, count: int) -> tuple[int, ...]:
        """The next states get the numbers that a publisher would give them; returns the states."""
        # A draft that a full disk cut short is no version.
        names = [path.name for path in self.store.iterdir()]
        if self.latest_file.is_file():
            # A deleted version's number is not used again.
            names.append(self.latest_file.read_text(errors="replace").strip())
        refs = refs_in(names)
        first = max((ref.version for ref in refs), default=0) + 1
        indices = tuple((self._next_state + i) % COUNT for i in range(count))
        self.truth |= dict(zip(range(first, first + count), indices, strict=True))
        self._next_state += count
        return indices

    # Checks.

    def has_a_way(self) -> bool:
        """Whether the untouched directories lead the holder to the newest version.

        Judged from the files alone: a full checkpoint or the held version, and every delta
        from there on.
        """
        if not _are_same(self.latest_file, self.pristine / LATEST_FILE):
            return False
        held = {claim.version for claim in self.holder.claims()}
        fulls = {1} if self._is_untouched(1, Kind.WEIGHT) else set()
        fulls |= {v for v in range(1, self.newest + 1) if self._is_untouched(v, Kind.ANCHOR)}
        return any(
            all(self._is_untouched(v, Kind.WEIGHT) for v in range(start + 1, self.newest + 1))
            for start in held | fulls
        )

    def _is_untouched(self, version: int, kind: Kind) -> bool:
        name = VersionRef(kind, WeightVersion(version)).directory
        before, now = self.pristine / name, self.store / name
        if not before.is_dir() or now.is_symlink() or not now.is_dir():
            return False
        files = {path.name for path in before.iterdir()}
        return files == {path.name for path in now.iterdir()} and all(
            _are_same(before / file, now / file) for file in files
        )

    def attempt(self) -> str | None:
        """The holder tries once; returns its refusal. Any other exception is a crash."""
        self.last_refusal = None
        try:
            self.holder.attempt()
        except RoseMuxError as refusal:
            self.last_refusal = f"{type(refusal).__name__}: {refusal}"
        finally:
            self.look()
        return self.last_refusal

    def look(self) -> None:
        """Notes every claim of a state that is not the one published under that version."""
        for claim in self.holder.claims():
            try:
                contents = self.holder.contents()
            except (SafetensorError, OSError) as error:
                self.wrong.append(f"claims version {claim.version} and holds no weights: {error}")
            else:
                self.judge(claim, contents)

    def judge(self, claim: Claim, contents: Mapping[str, bytes]) -> None:
        """Checks that the claimed version was published, and that the contents are its state."""
        index = self.truth.get(claim.version)
        if index is None or hashes(self.template.seed)[index] != claim.state_hash:
            self.wrong.append(f"claims version {claim.version}, {claim.state_hash}")
        elif others := self._others(index, contents):
            if others <= {name for name in self.forged_delta if self._is_cut(name, contents)}:
                self.has_unseen = True
            else:
                self.wrong.append(f"claims version {claim.version} and holds other bits")

    def recovered(self) -> bool:
        """Whether the holder reaches the newest version by itself now."""
        for _ in range(_ATTEMPTS):
            self.attempt()
            if self._at_newest():
                return True
        return False

    def _at_newest(self) -> bool:
        return {claim.version for claim in self.holder.claims()} == {self.newest} and (
            not self._others(self.truth[self.newest], self.holder.contents())
        )

    def _others(self, index: int, found: Mapping[str, bytes]) -> set[str]:
        """Tensors that are not those of a state: missing, added, or of other bits."""
        state = self.holder.part(states(self.template.seed)[index])
        return {
            name
            for name in state.keys() | found.keys()
            if name not in state or found.get(name) != state[name].tobytes()
        }

    def _is_cut(self, name: str, found: Mapping[str, bytes]) -> bool:
        return len(found.get(name, b"")) < LAYOUT[name].size_bytes


def shards(directory: Path) -> list[Path]:
    """The files of tensors of a version, which may be broken, links or directories."""
    return sorted(directory.glob("*.safetensors"))


def _are_same(one: Path, other: Path) -> bool:
    if any(path.is_symlink() or not path.is_file() for path in (one, other)):
        return False
    return one.read_bytes() == other.read_bytes()


def _reached(port: int) -> None:
    """Returns once a server listens; raises OSError after too long without one."""
    clock = MonotonicClock()
    until_s = clock.now() + _LISTENS_WITHIN_S
    while True:
        try:
            create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            if clock.now() > until_s:
                raise
            time.sleep(0.002)
        else:
            return
