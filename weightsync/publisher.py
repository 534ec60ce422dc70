"""Publishing: a state dict becomes the next version of a store.

    publisher = Publisher("/weights/job-a")
    published = publisher.publish(model.state_dict())

The store is a directory, or a URL of an object store (`s3://bucket/weights/job-a`). A sharded
trainer does the same on every rank, with `rank=` and `ranks=`: each rank writes its own slices and
none gathers. The publisher compares with its own copy of the last published state, never with a
trainer's list of changes, and updates that copy only after the new version is in the store.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError, RoseMuxError
from harvester.contracts.ids import WeightVersion
from harvester.contracts.wire.rollouts import AnnounceState
from weightsync.encoding.codec import Encoding, warm_up
from weightsync.layout.adapter import Adapter
from weightsync.layout.names import Kind, VersionRef
from weightsync.publish.agreement import (
    Anchored,
    PublishOrder,
    PublishResult,
    SkippedEntries,
    WrittenShare,
)
from weightsync.publish.last_published import LastPublished, MappedFile
from weightsync.publish.ranks import RankExchange, RanksByFiles, SingleRank
from weightsync.publish.settings import (
    AnnounceSettings,
    ExchangeSettings,
    VersionSettings,
    WorkSettings,
    check_rank,
)
from weightsync.publish.share import RankShare
from weightsync.publish.skip_deltas import SkipDeltaWriter
from weightsync.publish.store_writer import Draft, WritableStore, store_name, writable_store
from weightsync.publish.trainer_state import PublishedState, TrainerState
from weightsync.publish.version_writer import VersionWriter
from weightsync.transport.directory import local_path

if TYPE_CHECKING:
    from weightsync.publish.announcer import Announcer

_LOG = logging.getLogger(__name__)
ANNOUNCE_S = 10.0
_SILENT_S = 3.0
"""Wait for compiled loops before a log line says so: they are loaded in less time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Result of one publish; the same on every rank."""

    version: WeightVersion
    state_hash: str
    bytes_sent: int
    """Bytes that a receiver at the previous version reads."""
    bytes_dense: int
    """Size of all tensors."""
    bytes_anchor: int
    """Size of the anchor beside it, which a single rank has only begun; 0 if none was due or, among
    several ranks, none fitted."""
    is_full: bool
    seconds: float
    anchor_fault: str = ""
    """Why the newest anchor was not written, with its version's number. It is due again."""


class Publisher(AbstractContextManager["Publisher"]):
    """Owns one store, together with the publishers of the other ranks. Not thread-safe.

    `store`: a directory or URL. `adapter`: the store holds LoRA adapters of that base. `announce`:
    the job's URL at each gateway (`http://127.0.0.1:8300/v1/jobs/job-a`), or settings with a token;
    rank 0 tells it of every version, in the background. Rarer settings are the records below.
    """

    Versions, Work = VersionSettings, WorkSettings
    Exchange, Announce = ExchangeSettings, AnnounceSettings

    def __init__(
        self,
        store: Path | str | WritableStore,
        *,
        rank: int = 0,
        ranks: int = 1,
        adapter: Adapter | None = None,
        announce: str | Sequence[str] | AnnounceSettings = (),
        versions: VersionSettings = VersionSettings(),
        work: WorkSettings = WorkSettings(),
        exchange: ExchangeSettings = ExchangeSettings(),
    ) -> None:
        check_rank(rank, ranks)
        _check_records(adapter, versions, work, exchange)
        self._versions = versions
        self._clock = work.clock
        self._store = writable_store(store, spool_dir=work.spool_dir)
        self._adapter = adapter
        if not isinstance(announce, AnnounceSettings):
            announce = AnnounceSettings(announce)
        announces = announce.urls and rank == 0
        self._announcer = _announcer(store, announce, work.clock) if announces else None
        self._steps = 0
        self._closed = False
        self._lead: VersionWriter | None = None
        ranks_dir = _ranks_dir(self._store, ranks, exchange)
        self._pool = ThreadPoolExecutor(work.threads, thread_name_prefix="weight-publish")
        self._anchors = ThreadPoolExecutor(1, thread_name_prefix="weight-anchor")
        self._anchor: Future[Anchored] | None = None
        """An anchor in the making, which has the copy and the store's writer to itself."""
        self._compiling: Future[None] | None = None
        with ExitStack() as undo:
            if rank == 0:
                self._lead = self._taken_over(undo)
            self._copy = self._opened_copy(work.spool_dir, rank)
            undo.callback(self._copy.close)
            self._warm_up()
            self._skips = (
                SkipDeltaWriter(self._store, self._lead, work)
                if self._lead and versions.skip_deltas and versions.encoding is Encoding.ROSEMUX
                else None
            )
            self._ranks: SingleRank | RanksByFiles = SingleRank()
            if ranks_dir is not None:
                # Only now, since rank 0 clears an earlier trainer's messages.
                timeout_s, clock = exchange.rank_timeout_s, work.clock
                self._ranks = RanksByFiles(
                    ranks_dir, rank=rank, ranks=ranks, timeout_s=timeout_s, clock=clock
                )
            undo.pop_all()
        self._share = RankShare(
            self._copy,
            versions.encoding,
            work,
            rank=rank,
            pool=self._pool,
            # Other systems read the other encodings, and every rank holds all of an adapter.
            sums=versions.encoding.is_ours and adapter is None,
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the store's lock. Waits before that for an unfinished anchor, for loops that are
        being compiled (for the next process), and at most 10 s for the last announcement."""
        self._closed = True
        with ExitStack() as last_first:
            writer = self._lead.writer if self._lead else None
            for part in (writer, self._ranks, self._copy):
                if part is not None:
                    last_first.callback(part.close)
            last_first.callback(self._pool.shutdown)
            if self._skips is not None:
                last_first.callback(self._skips.close)
            last_first.callback(self._anchors.shutdown)
            last_first.callback(self._await_anchor)
            if self._announcer is not None:
                self._announcer.close(ANNOUNCE_S)
            self._await_compiled()

    def announced(self, timeout_s: float) -> AnnounceState:
        """State of the newest version once all gateways have it or refuse it, or after this time.

        `served`: every dedicated engine serves it. `announced, not active`, also true: a gateway
        has it and its engines serve another job, until this one is activated. Empty, so false: a
        gateway has not confirmed it yet, or refuses it; `announce_faults` says which and why.
        """
        return AnnounceState.SERVED if self._announcer is None else self._announcer.wait(timeout_s)

    @property
    def announce_faults(self) -> dict[str, str]:
        """Why gateways do not have the newest version, in the words of each or of the connection,
        by the job's URL there."""
        return {} if self._announcer is None else {**self._announcer.faults}

    def publish(self, state: PublishedState, *, step: int | None = None) -> Published:
        """Write the next version; returns when it is durable and LATEST names it.

        A due anchor is written after that, beside the trainer's next step, and the next publish
        waits for it; several ranks write it before they return. Every rank calls `publish`, each
        with its own part of the model; `step` is the trainer's, without it publishes are counted.
        Parts of two steps are never mixed. Raises Unsupported for tensors that it cannot publish
        and Exhausted if the disk or the quota is full or a rank is too late; the store and this
        publisher are then unchanged.
        """
        if self._closed:
            raise ConfigError("this publisher is closed: make another one of the store")
        with suppress(TypeError):  # The next line refuses floats.
            step = None if step is None else index(step)
        if step is not None and not (isinstance(step, int) and step >= 0):
            raise ConfigError(f"step {step!r}: give the trainer's step number")
        started = self._clock.now()
        self._steps += 1
        try:
            published = self._agreed(state, self._steps if step is None else step, started)
        except Exception:
            # Raised only now: the other ranks are told first and have stopped writing.
            if self._lead is not None:
                self._lead.writer.sweep()
            raise
        if published.is_full:
            self._warm_up()
        if self._announcer is not None:
            self._announcer.announce(published.version, published.state_hash)
        # An anchor in the making has the store's writer, and the quota's last room.
        if self._anchor is None:
            if self._skips is not None:
                self._skips.published(published.version)
            if self._lead is not None:
                self._lead.prune()
        return published

    def _await_anchor(self) -> str:
        """Wait for the anchor in the making; returns why it was not written, if so."""
        if self._anchor is None:
            return ""
        wait([self._anchor])
        done, self._anchor = self._anchor, None
        return done.result().fault

    def _warm_up(self) -> None:
        """Compile for the model's element types while the trainer makes the first change."""
        widths = {spec.width_bytes for spec in self._copy.contents.layout.values()}
        if widths and self._versions.encoding.is_ours:
            self._compiling = self._pool.submit(warm_up, widths)

    def _await_compiled(self) -> None:
        """Errors of the compiler are raised where the loops are called first."""
        if self._compiling is not None and wait([self._compiling], _SILENT_S).not_done:
            _LOG.warning("waiting for loops that are being compiled, once for each machine")
            wait([self._compiling])

    def _agreed(self, given: PublishedState, step: int, started: float) -> Published:
        fault = self._await_anchor()
        with self._ranks.exchange(step) as talk:
            alone = isinstance(self._ranks, SingleRank)
            state = TrainerState(
                given,
                is_adapter=self._adapter is not None,
                finds_ties=alone,
                check_finite=self._versions.check_finite,
            )
            reports = talk.gather(self._share.report(state))
            order = talk.tell(self._lead.order(reports) if self._lead else None, PublishOrder)
            outcome = self._published(talk, state, order)
            if alone and outcome.anchor_directory:
                self._anchor = self._anchors.submit(self._anchored, talk, order, outcome)
                anchored = Anchored(outcome.bytes_dense)
            else:
                # Several ranks hear of each other only within a publish.
                anchored = self._anchored(talk, order, outcome)
        return Published(
            version=WeightVersion(order.version),
            state_hash=outcome.state_hash,
            bytes_sent=outcome.bytes_sent,
            bytes_dense=outcome.bytes_dense,
            bytes_anchor=anchored.bytes_anchor,
            is_full=not order.base,
            seconds=self._clock.now() - started,
            anchor_fault=anchored.fault or fault,
        )

    def _published(
        self, talk: RankExchange, state: TrainerState, order: PublishOrder
    ) -> PublishResult:
        with closing(self._store.draft(order.directory)) as draft:
            written = self._written(talk, state, order, draft)
            everything = talk.gather(written)
            done = self._lead.commit(order, everything) if self._lead else None
            outcome = talk.tell(done, PublishResult)
            self._share.advance(order, outcome, written, draft)
        return outcome

    def _written(
        self, talk: RankExchange, state: TrainerState, order: PublishOrder, draft: Draft
    ) -> WrittenShare:
        if order.base:
            self._await_compiled()
            return self._share.write_delta(draft, state)
        held = talk.gather(self._share.take(state))
        skipped = talk.tell(self._lead.settle(held) if self._lead else None, SkippedEntries)
        self._copy.skip(skipped.by_rank[self._ranks.rank])
        return self._share.write_full(draft)

    def _anchored(
        self, talk: RankExchange, order: PublishOrder, outcome: PublishResult
    ) -> Anchored:
        """Write an anchor if one is due. A failed anchor is due again with the next version, since
        this version is already published."""
        if not outcome.anchor_directory:
            return Anchored(0)
        try:
            with closing(self._store.draft(outcome.anchor_directory)) as draft:
                written = self._share.write_anchor(draft)
        except Exception as error:
            written = WrittenShare([], {}, fault=str(error) or repr(error))
        try:
            everything = talk.gather(written)
        except RoseMuxError as error:
            # A rank is gone; the next publish names it.
            everything = [WrittenShare([], {}, fault=str(error))]
        anchored = self._lead.commit_anchor(order, outcome, everything) if self._lead else None
        if anchored and anchored.fault:
            _LOG.warning("%s", anchored.fault)
        try:
            return talk.tell(anchored, Anchored)
        except RoseMuxError:
            return anchored or Anchored(0)

    def _taken_over(self, undo: ExitStack) -> VersionWriter:
        """The writer of the store, which `undo` closes; raises ConfigError if another system or
        publisher writes it."""
        found = self._store.reader()
        if found.writer is not None:
            raise ConfigError(f"{found} is written by {found.writer}: publish elsewhere")
        writer = self._store.writer()
        undo.callback(writer.close)
        return VersionWriter(writer, self._versions, self._adapter)

    def _opened_copy(self, copy_dir: Path | None, rank: int) -> LastPublished:
        """An empty copy, or an earlier process's copy of exactly the store's newest version."""
        if copy_dir is None:
            return LastPublished(None)
        copy = LastPublished(MappedFile(copy_dir, rank=rank))
        store = self._store.reader()
        try:
            latest = store.latest()
            manifest = store.manifest(VersionRef(Kind.WEIGHT, latest)) if latest else None
        except RoseMuxError:
            manifest = None
        record = self._adapter.record() if self._adapter else None
        if manifest is None or manifest.state_hash is None or manifest.adapter != record:
            copy.forget()
        else:
            copy.adopt(manifest.version, manifest.state_hash, self._pool)
        return copy


def _check_records(adapter: object, versions: object, work: object, exchange: object) -> None:
    if not isinstance(adapter, Adapter | None):
        raise ConfigError(f"adapter {adapter!r}: use Adapter(base, config)")
    for name, given, kind in (
        ("versions", versions, VersionSettings),
        ("work", work, WorkSettings),
        ("exchange", exchange, ExchangeSettings),
    ):
        if not isinstance(given, kind):
            raise ConfigError(f"{name}: use Publisher.{name.capitalize()}(...), not {given!r}")


def _announcer(
    store: Path | str | WritableStore, gateways: AnnounceSettings, clock: Clock
) -> "Announcer":
    from harvester.platform.tls import Credentials
    from weightsync.publish.announcer import Announcer

    if not isinstance(store, Path | str):
        raise ConfigError("announce: give the store as a path or URL, which names it to engines")
    files = {"token_file": gateways.token_file, "ca_file": gateways.ca_file}
    credentials = Credentials.model_validate(files)
    return Announcer(gateways.urls, store=store_name(store), credentials=credentials, clock=clock)


def _ranks_dir(store: WritableStore, ranks: int, exchange: ExchangeSettings) -> Path | None:
    """The directory in which several ranks agree; None for a single one."""
    where = store.ranks_dir if exchange.ranks_dir is None else local_path(exchange.ranks_dir)
    if ranks > 1 and where is None:
        raise ConfigError(
            "ranks agree through files, which an object store has not: give `ranks_dir` of "
            "`ExchangeSettings`, a directory that every rank reaches"
        )
    return where if ranks > 1 else None
