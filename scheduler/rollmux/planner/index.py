"""Filters groups by room and memory, one row each, so that an arrival simulates few.

A row is a necessary condition only: memory may still refuse a job node by node, and so may
the forecast. Rows are brought up to date when their group changes, not when a belief does.
"""

from typing import Final

import numpy as np

from harvester.contracts.ids import GroupId, NodeId
from scheduler.model import Pool
from scheduler.rollmux.forecast.compiled import Records
from scheduler.rollmux.planner.group_table import GroupState, GroupTable

SHARE_MAX: Final = 1.03
"""Bound above 1, because shares are of learned means, and the forecast decides."""


class GroupIndex:
    def __init__(self, *, group_jobs: int) -> None:
        self._group_jobs = group_jobs
        self._row: dict[GroupId, int] = {}
        self._cells: list[GroupState | None] = []
        self._free: list[int] = []
        self._jobs = np.zeros(0, dtype=np.int64)
        self._shares = np.zeros((0, 2))
        self._load = np.zeros(0)
        self._bytes = np.zeros((0, 2), dtype=np.int64)

    def refresh(self, group: GroupState, table: GroupTable, shares: dict[NodeId, float]) -> None:
        """Brings the group's row up to date; `shares` of each of its nodes' time are taken."""
        if group.group not in table.groups or not group.pinned:
            self._drop(group)
            return
        row = self._row.get(group.group)
        if row is None:
            row = self._row[group.group] = self._new_row()
        self._cells[row] = group
        self._jobs[row] = len(group.pinned)
        load = 0.0
        for side, (pool, nodes) in enumerate(group.by_pool):
            self._shares[row, side] = min(shares[node] for node in nodes)
            self._bytes[row, side] = max(table.resident.free_bytes(node, pool) for node in nodes)
            load += sum(shares[node] for node in nodes) * table.types[pool].price_per_hour
        # Nodes may be free of charge.
        self._load[row] = load / (table.group_price_per_hour(group) or 1.0)

    def candidates(
        self,
        shares: tuple[float, float],
        host_bytes: int,
        *,
        pools: tuple[Pool, ...],
        most: int | None,
    ) -> list[GroupState]:
        """Groups with room in the given pools, the fullest first; all groups if `most` is None.

        The job takes `shares` of the time of one rollout and one training node.
        """
        fits = (self._jobs > 0) & (self._jobs < self._group_jobs)
        for pool in pools:
            side = 0 if pool is Pool.ROLLOUT else 1
            fits &= self._shares[:, side] + shares[side] <= SHARE_MAX
            fits &= self._bytes[:, side] >= host_bytes
        rows = np.flatnonzero(fits)
        order = rows[np.lexsort((rows, -self._load[rows]))][:most]
        return [group for row in order if (group := self._cells[row]) is not None]

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._cells.append(None)
        if len(self._cells) > self._jobs.size:
            size = max(64, 2 * self._jobs.size)
            self._jobs = _grown(self._jobs, size)
            self._shares = _grown(self._shares, size)
            self._bytes = _grown(self._bytes, size)
            self._load = _grown(self._load, size)
        return len(self._cells) - 1

    def _drop(self, group: GroupState) -> None:
        row = self._row.pop(group.group, None)
        if row is not None:
            self._jobs[row] = 0
            self._cells[row] = None
            self._free.append(row)


def _grown(array: Records, size: int) -> Records:
    grown = np.zeros((size, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
