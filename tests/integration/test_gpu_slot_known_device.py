"""The measurement of blocking on devices with known answers: whole turns, and none at all.

Only the device is fake: processes, pages, gates, logs and figures are the real ones.
"""

import asyncio
import os
from contextlib import suppress
from dataclasses import replace as with_fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.gpu_slot.engines.children import engine
from benchmarks.gpu_slot.engines.orders import EngineSetting
from benchmarks.gpu_slot.sharing.pair import REHEARSED, Sharing
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.page import PageDirectory

pytestmark = pytest.mark.timeout(200)
_STEP_MS = 20.0


Found = dict[str, Any]


@pytest.fixture(scope="module")
def measured() -> dict[str, Found]:
    """Figures by device. All are measured side by side: their steps wait and need no core. Once
    more where other tests had the cores meanwhile: a wrong law is wrong twice."""
    found = asyncio.run(_all_measured())
    if found["short turns"]["blocking"]["law"]["blocking_ratio"] < 0.75:
        found = asyncio.run(_all_measured())
    return found


async def _all_measured() -> dict[str, Found]:
    with TemporaryDirectory(prefix="rosemux-", dir="/dev/shm") as root:
        kinds = {
            "whole turns": f"turns:{Path(root, 'turns')}",
            "short turns": f"short_turns:{Path(root, 'short_turns')}",
            "apart": "apart",
        }
        async with asyncio.TaskGroup() as group:
            tasks = {
                name: group.create_task(_measured(kind, Path(root, name)))
                for name, kind in kinds.items()
            }
        return {name: task.result() for name, task in tasks.items()}


async def _measured(kind: str, directory: Path) -> Found:
    directory.mkdir()
    pages = PageDirectory.create(directory / "slot-0")
    found: Found = {}
    shared = EngineSetting(
        kind=kind, tiny=True, pages=str(pages.path), isolation=IsolationBackend.NONE
    )
    sizes = with_fields(
        REHEARSED, openings=0, arrivals_s=9.0, arrivals_per_s=7.0, slice_s=1.5, requests_per_s=4.0
    )
    async with (
        engine(replace(shared, production=sizes.production), {}) as production,
        engine(replace(shared, guest=sizes.guest), {}) as guest,
    ):
        for child in (production, guest):
            _put_first(child.process.pid)
        await Sharing(production, guest, pages, sizes, found.__setitem__).measure({})
    return found


def _put_first(pid: int) -> None:
    """Has a process run as soon as its wait is over, where we may: the device's answer is known for
    steps that end in time, and a busy machine's other work would end them milliseconds late."""
    with suppress(PermissionError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(1))


def test_a_device_of_whole_turns_blocks_for_the_rest_of_a_step(
    measured: dict[str, Found],
) -> None:
    found = measured["whole turns"]
    law, form = found["blocking"]["law"], found["blocking"]["forms"]["prefill_8"]
    assert law["count"] >= 30
    assert law["blocking_ratio"] == pytest.approx(1.0, abs=0.15)
    assert law["preemption_ms"] == pytest.approx(0.0, abs=2.5)
    assert form["over_overlap"]["p50"] > 0.8
    # An arrival waits for the one step that runs, and none is launched behind it.
    assert found["arrivals"]["to_silence_ms"]["p90"] < _STEP_MS + 6.0
    assert found["arms"]["ungated"]["over_alone"]["step"]["mean"] > 1.4


def test_a_device_of_short_turns_gives_both_half(measured: dict[str, Found]) -> None:
    found = measured["short turns"]
    law, form = found["blocking"]["law"], found["blocking"]["forms"]["prefill_8"]
    assert law["count"] >= 30
    assert law["blocking_ratio"] == pytest.approx(1.0, abs=0.25)
    assert form["over_overlap"]["p50"] == pytest.approx(0.5, abs=0.15)


def test_a_device_that_runs_both_at_once_blocks_for_nothing(measured: dict[str, Found]) -> None:
    found = measured["apart"]
    assert found["blocking"]["law"]["count"] >= 30
    assert found["blocking"]["law"]["blocking_ratio"] == pytest.approx(0.0, abs=0.15)
    assert found["arms"]["ungated"]["over_alone"]["step"]["p50"] == pytest.approx(1.0, abs=0.1)
