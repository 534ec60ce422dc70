"""Leases of serving accelerators: the supply of each group, their headroom and their cost.

A slot serves one job at a time and gives it production's remainder: its headroom, from 0 to 1 of an
accelerator. The allotment stands in for a gateway that gives leases by demand.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor
from typing import Final
from zlib import crc32

import numpy as np

from harvester.contracts.ids import GroupId
from scheduler.model import Pool
from scheduler.rollmux.forecast.compiled import Records
from scheduler.sim.rollmux.workload import NODE_TYPES

SLOTS_RATIO: Final = 0.5
"""Serving accelerators beside a group, by its rollout accelerators."""
ACTIVATION_S: Final = 5.0
SYNC_S: Final = 20.0
RECOMPUTED_S: Final = 3.0
"""W1's migration; RollPacker reports at most this for moving by recomputing."""
TAIL_TOKENS: Final = 51 * 12_100
"""Open at a tail's beginning: a fifth of 256 responses, at RollMux's mean of the longest."""
KV_BYTES_PER_TOKEN: Final = 147_456
"""KV bytes of one token in an 8B model in bf16: 36 layers, 8 KV heads of 128."""
LINK_BYTES_PER_S: Final = 25e9
"""ROSE's 200 Gb/s between clusters."""
NEVER: Final[tuple[float, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """Cost of using a leased slot."""

    activation_s: float
    """Time from a sleeping policy to a serving one, in s."""
    sync_s: float
    """Time from a version's publication until every slot holds it, in s; a slot sleeps
    meanwhile."""
    kept_s: float
    """Time to move a tail with its KV, in s."""
    recomputed_s: float
    """Time to move a tail without its KV, which prefills its tokens again, in s."""
    accelerators: int
    """Accelerators of one rollout node."""

    @property
    def move_s(self) -> float:
        """A tail moves with its KV or without, whichever is cheaper."""
        return min(self.kept_s, self.recomputed_s)


def kv_kept_s(tokens: int, *, bytes_per_token: int, link_bytes_per_s: float) -> float:
    """Seconds to move the KV of `tokens` tokens over a link."""
    return tokens * bytes_per_token / link_bytes_per_s


W1_TERMS: Final = LeaseTerms(
    activation_s=ACTIVATION_S,
    sync_s=SYNC_S,
    kept_s=kv_kept_s(
        TAIL_TOKENS, bytes_per_token=KV_BYTES_PER_TOKEN, link_bytes_per_s=LINK_BYTES_PER_S
    ),
    recomputed_s=RECOMPUTED_S,
    accelerators=NODE_TYPES[Pool.ROLLOUT].accelerators,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSupply:
    given_s: Records
    """Accelerator seconds that a slot gave by the end of each second."""
    turns_s: tuple[float, ...] = NEVER
    """Times at which all leases are revoked and given back, in turn, in s."""
    slots_ratio: float = SLOTS_RATIO
    terms: LeaseTerms = W1_TERMS
    seed: int = 0

    def slots(self, nodes: int) -> int:
        """Number of slots for a group of `nodes` rollout nodes."""
        return int(self.slots_ratio * self.terms.accelerators * nodes)

    def offset_s(self, group: GroupId) -> float:
        """Second of the record at which this group's time begins."""
        rng = np.random.Generator(np.random.PCG64([self.seed, crc32(group.encode())]))
        return 3600.0 + float(rng.uniform(0.0, len(self.given_s) - 1))

    def in_force(self, *, now: float) -> bool:
        return bisect_right(self.turns_s, now) % 2 == 0


class HeadroomRecord:
    """A slot's headroom over time, repeated from its start when it ends."""

    def __init__(self, given_s: Iterable[float]) -> None:
        """`given_s` are the accelerator seconds given by the end of each second, from 0 on."""
        self._given_s = [float(each) for each in given_s]
        self._seconds = len(self._given_s) - 1

    def given_until(self, t_s: float) -> float:
        """Accelerator seconds that a slot gave from 0 to `t_s`."""
        second = floor(t_s)
        before = self._by_second(second)
        return before + (t_s - second) * (self._by_second(second + 1) - before)

    def given(self, from_s: float, until_s: float) -> float:
        return self.given_until(until_s) - self.given_until(from_s)

    def takes_s(self, left_s: float, *, from_s: float, own: float, leased: float) -> float:
        """Seconds until `left_s` are done at speed `own` plus `leased` times the headroom; may be
        inf."""
        if left_s <= 0.0:
            return 0.0
        a_lap_s = own * self._seconds + leased * self._given_s[-1]
        if a_lap_s <= 0.0:
            return float("inf")
        gave_s, first = self.given_until(from_s), floor(from_s)

        def done_s(second: int) -> float:
            return own * (second - from_s) + leased * (self._by_second(second) - gave_s)

        most_s = self._seconds * (1.0 + left_s / a_lap_s)
        if own > 0.0:
            most_s = min(most_s, left_s / own)
        last = first + 2 + int(most_s)
        end = bisect_left(range(first + 1, last), left_s, key=done_s) + first + 1
        at_s = max(from_s, end - 1.0)
        did_s = done_s(end - 1) if end - 1 > from_s else 0.0
        speed = own + leased * (self._by_second(end) - self._by_second(end - 1))
        return at_s - from_s + (left_s - did_s) / speed

    def _by_second(self, second: int) -> float:
        laps, within = divmod(second, self._seconds)
        return laps * self._given_s[-1] + self._given_s[within]


def allotted(slots: int, *, tails: Sequence[int], bulks: Sequence[int]) -> tuple[int, ...]:
    """Slots of each tail, by how many it needs, then of each bulk: the rest, by its nodes."""
    found = []
    for needed in tails:
        found.append(min(slots, needed))
        slots -= found[-1]
    nodes = sum(bulks)
    return (*found, *(slots * each // nodes for each in bulks))
