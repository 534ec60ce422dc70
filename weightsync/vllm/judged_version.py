"""A prepared version between the sums that a rank gave of it and its load.

Holds the verdict of all ranks, and counts what became of cut tensors.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from harvester.contracts.errors import Corrupt
from weightsync.receive.rank_sums import RankSums, SumVerdict
from weightsync.receive.staged import Staged

T = TypeVar("T")


class JudgedVersion(Generic[T]):
    """`offer` or `fail`, then `judge`, while the version is staged and again before it is loaded;
    then `taken`. A rank that is not asked only ever takes."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._prepared: T | None = None
        self._fault: Exception | None = None
        self._verdict: SumVerdict | None = None
        self._verified, self._unseen, self._refused = 0, 0, 0

    def clear(self) -> None:
        self._key = self._prepared = self._fault = self._verdict = None

    def offer(self, key: Hashable, prepared: T) -> None:
        """Keep the preparation of which the sums are given."""
        self.clear()
        self._key, self._prepared = key, prepared

    def fail(self, error: Exception) -> RankSums:
        """Keep why the version cannot be prepared."""
        self.clear()
        self._fault = error
        return RankSums(fault=f"{type(error).__name__}: {error}")

    def judge(self, verdict: SumVerdict) -> None:
        self._verdict = verdict

    def kept(self, key: Hashable) -> T | None:
        """The preparation of `key` of which sums were given."""
        return self._prepared if self._key == key else None

    @property
    def refusal(self) -> str:
        """Why the kept preparation is not the trainer's version; empty as far as it is."""
        return self._verdict.refusal if self._verdict is not None and self._verdict.wrong else ""

    def taken(self, key: Hashable) -> tuple[T | None, SumVerdict | None]:
        """The preparation that was judged, if it is of `key`, and the verdict. Raises the rank's
        own fault, or Corrupt if the verdict is against it."""
        kept, prepared, fault, verdict = self._key, self._prepared, self._fault, self._verdict
        self.clear()
        if verdict is not None and verdict.refusal:
            self._refused += bool(verdict.wrong)
            raise fault or Corrupt(verdict.refusal)
        is_judged = kept == key and prepared is not None and verdict is not None
        return (prepared, verdict) if is_judged else (None, None)

    def loaded(self, staged: Staged, verdict: SumVerdict | None, *, was_whole: bool) -> None:
        """Count the cut tensors of a version in force. `was_whole`: it was read whole, and compared
        with the published digests before the rank cut it."""
        cut = len({staged.parts.boxes[name].tensor for name in staged.parts.partial})
        if was_whole:
            self._verified, self._unseen = cut, 0
        elif verdict is not None:
            self._verified, self._unseen = verdict.verified, verdict.unseen
        else:
            self._verified, self._unseen = 0, cut

    def report(self) -> dict[str, int]:
        """Cut tensors of the loaded version, by whether they are known to be the trainer's, and
        the versions that ranks refused together."""
        return {"verified": self._verified, "unseen": self._unseen, "refused": self._refused}
