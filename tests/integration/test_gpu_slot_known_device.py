"""The measurement of blocking on devices with known answers: whole turns, and none at all.

Only the device is fake: processes, pages, gates, logs and figures are the real ones.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace as with_fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.gpu_slot.engines.children import engine
from benchmarks.gpu_slot.engines.orders import EngineSetting
from benchmarks.gpu_slot.sharing.pair import REHEARSED, Sharing
from coserve.guest.isolation import IsolationBackend
from harvester.contracts.page import PageDirectory

_STEP_MS = 20.0


@pytest.fixture
def pages() -> Iterator[PageDirectory]:
    with TemporaryDirectory(prefix="rosemux-", dir="/dev/shm") as root:
        yield PageDirectory.create(Path(root, "slot-0"))


def _measured(kind: str, pages: PageDirectory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    shared = EngineSetting(
        kind=kind, tiny=True, pages=str(pages.path), isolation=IsolationBackend.NONE
    )
    sizes = with_fields(
        REHEARSED, openings=0, arrivals_s=9.0, arrivals_per_s=7.0, slice_s=1.5, requests_per_s=4.0
    )

    async def measure() -> None:
        async with (
            engine(replace(shared, production=sizes.production), {}) as production,
            engine(replace(shared, guest=sizes.guest), {}) as guest,
        ):
            sharing = Sharing(production, guest, pages, sizes, found.__setitem__)
            await sharing.measure({})

    asyncio.run(measure())
    return found


@pytest.mark.timeout(200)
def test_a_device_of_whole_turns_blocks_for_the_rest_of_a_step(
    tmp_path: Path, pages: PageDirectory
) -> None:
    found = _measured(f"turns:{tmp_path / 'turns'}", pages)
    law, form = found["blocking"]["law"], found["blocking"]["forms"]["prefill_8"]
    assert law["count"] >= 30
    assert law["blocking_ratio"] == pytest.approx(1.0, abs=0.15)
    assert law["preemption_ms"] == pytest.approx(0.0, abs=2.5)
    assert form["over_overlap"]["p50"] > 0.8
    # An arrival waits for the one step that runs, and none is launched behind it.
    assert found["arrivals"]["to_silence_ms"]["p90"] < _STEP_MS + 6.0
    assert found["arms"]["ungated"]["over_alone"]["step"]["mean"] > 1.4


@pytest.mark.timeout(200)
def test_a_device_of_short_turns_gives_both_half(tmp_path: Path, pages: PageDirectory) -> None:
    found = _measured(f"short_turns:{tmp_path / 'turns'}", pages)
    law, form = found["blocking"]["law"], found["blocking"]["forms"]["prefill_8"]
    assert law["count"] >= 30
    assert law["blocking_ratio"] == pytest.approx(1.0, abs=0.25)
    assert form["over_overlap"]["p50"] == pytest.approx(0.5, abs=0.15)


@pytest.mark.timeout(200)
def test_a_device_that_runs_both_at_once_blocks_for_nothing(pages: PageDirectory) -> None:
    found = _measured("apart", pages)
    assert found["blocking"]["law"]["count"] >= 30
    assert found["blocking"]["law"]["blocking_ratio"] == pytest.approx(0.0, abs=0.15)
    assert found["arms"]["ungated"]["over_alone"]["step"]["p50"] == pytest.approx(1.0, abs=0.1)
