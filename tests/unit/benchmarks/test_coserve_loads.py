"""Loads unseen by production, and the readings while they last."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from benchmarks.coserve import side_by_side
from benchmarks.coserve.arms import Arm, Setting
from benchmarks.coserve.closed_gate import ClosedWindow, share_figures
from benchmarks.coserve.opening import opening_figures, watch_openings
from benchmarks.coserve.restart import OutageSteps
from benchmarks.coserve.rounds import Runner
from benchmarks.coserve.side_by_side import SideBySide, compared
from benchmarks.coserve.surge import TIMES, surge
from benchmarks.coserve.unseen import (
    CONTEXT_TOKENS,
    KV_TOKENS,
    LONG_PROMPT_TOKENS,
    crowd,
    long_prompt,
)
from benchmarks.testbed.core_time import account, used
from benchmarks.testbed.excerpt import Excerpt
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.trace import Arrival
from coserve.vllm.pulse_reporter import PULSE_TTL_NS
from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.page import Grant, GrantMode, Guest, PageReader, Pulse, Reading

SEEN = ProductionRequest(
    arm="a", block=0, due_s=0.0, input_tokens=8, output_tokens=2, ttft_s=0.1, itl_s=(), failed=False
)
DIED_NS = 50_000_000_000


def excerpt() -> Excerpt:
    """Two requests a second."""
    arrivals = tuple(
        Arrival(index=n, t_s=0.5 * n, input_tokens=100, output_tokens=8) for n in range(20)
    )
    return Excerpt(trace="t", arrivals=arrivals, duration_s=10.0, start_s=0.0)


def seen(alone_s: Sequence[float | None], beside_s: Sequence[float | None]) -> side_by_side.Seen:
    def of(ttft_s: Sequence[float | None]) -> list[ProductionRequest]:
        return [
            msgspec.structs.replace(SEEN, ttft_s=each, failed=each is None, trace_index=place)
            for place, each in enumerate(ttft_s)
        ]

    return {Arm.ALONE: of(alone_s), Arm.ROSEMUX: of(beside_s)}


def test_the_long_prompt_comes_amid_the_usual_load() -> None:
    load = long_prompt(excerpt())
    (long,) = [one for one in load if one.input_tokens == LONG_PROMPT_TOKENS]
    assert long.input_tokens + long.output_tokens <= CONTEXT_TOKENS
    assert [one.t_s for one in load] == sorted(one.t_s for one in load)
    assert load[0].t_s < long.t_s < load[-1].t_s
    assert len({one.index for one in load}) == len(load) == 21


def test_the_crowd_asks_for_all_of_the_kv_and_each_of_it_fits() -> None:
    crowded = [one for one in crowd(excerpt()) if one.input_tokens > 100]
    assert sum(one.input_tokens for one in crowded) >= KV_TOKENS
    assert max(one.input_tokens + one.output_tokens for one in crowded) < CONTEXT_TOKENS
    assert len({one.index for one in crowded}) == len(crowded)


def test_a_surge_is_ten_times_the_mean_within_a_second() -> None:
    load = surge([*excerpt().until(100.0)], rate=2.0)
    assert len(load) == TIMES * 2.0
    assert max(one.t_s for one in load) < 1.0


def test_ratios_are_over_alone_and_what_failed_counts_in_both_arms() -> None:
    found = compared(seen([0.1, 0.1, None], [0.12, 0.12, 0.12]))
    assert found["ttft_p50_ratio"] == pytest.approx(1.2)
    assert (found["requests"], found["failed"]) == (6, 1)
    assert found["ttft_p50_interval"] is None, "one trial says nothing of the next"
    last = compared(seen([0.1, 0.3], [0.1, 0.6]), lambda request: request.trace_index == 1)
    assert last["ttft_p50_ratio"] == pytest.approx(2.0)
    assert last["requests"] == 4, "the load is counted whole"


def test_trials_and_not_requests_are_the_unit_of_an_interval() -> None:
    """The guest cost nothing in one of two trials and doubled the TTFT in the other."""
    trials = [seen([0.1] * 20, [each] * 20) for each in (0.1, 0.2)]
    both: side_by_side.Seen = {
        arm: [
            msgspec.structs.replace(request, block=turn)
            for turn, trial in enumerate(trials)
            for request in trial[arm]
        ]
        for arm in (Arm.ALONE, Arm.ROSEMUX)
    }
    found = compared(both)
    low, high = found["ttft_mean_interval"]
    assert found["ttft_mean_ratio"] == pytest.approx(1.5)
    assert low < 1.0 < 2.0 < high
    assert found["ttft_p50_interval"] is None, "two such trials do not bound it"


@dataclass
class FakeClient:
    """Every request has its first token at once."""

    record: Any = None
    timeout_s: float = 0.0

    async def replay(
        self, arrivals: Sequence[Arrival], *, arm: str, block: int, start_s: float
    ) -> None:
        await asyncio.sleep(0.01)
        for _ in arrivals:
            self.record(msgspec.structs.replace(SEEN, arm=arm, block=block, due_s=start_s))


@dataclass
class FakeRunner:
    client: FakeClient = field(default_factory=FakeClient)
    clock: MonotonicClock = field(default_factory=MonotonicClock)
    rollouts: list[bool] = field(default_factory=list)

    @asynccontextmanager
    async def arranged(self, setting: Setting) -> AsyncIterator[None]:
        self.rollouts.append(setting.rollouts)
        yield

    def pulse(self) -> Pulse:
        return Pulse(kv_usage_ratio=0.7)


async def test_alone_and_beside_rollouts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_BEFORE_S", 0.0)
    fake = FakeRunner()
    load = SideBySide(cast(Runner, fake), 2)
    found = await load.run("load", excerpt().arrivals)
    assert fake.rollouts == [False, True, True, False]
    assert {arm: len(requests) for arm, requests in found.items()} == {
        Arm.ALONE: 40,
        Arm.ROSEMUX: 40,
    }
    assert load.kv_usage_ratio == 0.7
    prompts = {(r.arm, r.block) for requests in found.values() for r in requests}
    assert len(prompts) == 4, "nobody finds another's prefix cached"


async def test_a_warm_up_trial_runs_alone_and_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_by_side, "_BEFORE_S", 0.0)
    fake = FakeRunner()
    found = await SideBySide(cast(Runner, fake), 1, warmed_up=True).run("load", excerpt().arrivals)
    assert fake.rollouts == [False, False, True]
    assert [len(requests) for requests in found.values()] == [20, 20]


def guest(steps: int, *, end_ns: int = 0) -> Guest:
    return Guest(steps_launched=steps, last_step_end_ns=end_ns)


def test_steps_within_the_ttl_are_no_fault_and_the_last_of_them_is_reported() -> None:
    watch = OutageSteps(DIED_NS)
    watch.saw(guest(5, end_ns=DIED_NS - 1), now_ns=DIED_NS + 1)
    watch.saw(guest(9, end_ns=DIED_NS + 400_000_000), now_ns=DIED_NS + 420_000_000)
    watch.saw(guest(10, end_ns=DIED_NS + 510_000_000), now_ns=DIED_NS + PULSE_TTL_NS + 20_000_000)
    assert watch.figures() == {"last_step_ms": pytest.approx(510.0), "steps_after_ttl": 0}


def test_a_step_after_the_ttl_is_seen() -> None:
    watch = OutageSteps(DIED_NS)
    for later_ns, steps in ((1, 5), (2 * PULSE_TTL_NS, 6), (3 * PULSE_TTL_NS, 8)):
        watch.saw(guest(steps, end_ns=DIED_NS + later_ns), now_ns=DIED_NS + later_ns)
    assert watch.figures()["steps_after_ttl"] == 2


def test_a_guest_that_stood_still_has_no_last_step() -> None:
    watch = OutageSteps(DIED_NS)
    watch.saw(guest(5, end_ns=DIED_NS - 10**9), now_ns=DIED_NS + 10**9)
    assert watch.figures() == {"last_step_ms": 0.0, "steps_after_ttl": 0}


class FakeProcess:
    def __init__(self, pid: int, name: str) -> None:
        self.pid, self._name = pid, name

    def name(self) -> str:
        return self._name


def threads(proc: Path, pid: int, spent_ns: dict[int, int]) -> None:
    for thread, spent in spent_ns.items():
        task = proc / str(pid) / "task" / str(thread)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{spent} 17 3\n")
        (task / "comm").write_text("loop\n" if thread >= 70 else "main\n")


def test_the_core_share_is_of_every_thread_also_of_one_that_began_meanwhile(
    tmp_path: Path,
) -> None:
    processes = [FakeProcess(7, "worker"), FakeProcess(8, "core"), FakeProcess(9, "gone")]
    threads(tmp_path, 7, {7: 1_000_000_000, 70: 500_000_000})
    threads(tmp_path, 8, {8: 0})
    before = account(cast(Any, processes), proc=tmp_path)
    threads(tmp_path, 7, {7: 1_100_000_000, 71: 100_000_000})
    after = account(cast(Any, processes), proc=tmp_path)
    assert used(before, after) == {
        "worker: main": pytest.approx(0.1),
        "worker: loop": pytest.approx(0.1),
        "core: main": 0.0,
    }


@dataclass
class FakePages:
    """Contents of both pages at each look: the stamp of an open grant, and the guest's steps of 4
    ms, which end 10 ms after one another."""

    looks: list[tuple[int | None, int]]
    place: int = 0

    def read(self) -> Reading[Grant]:
        self.place += 1
        stamp_ms = self.looks[self.place - 1][0]
        mode = GrantMode.CLOSED if stamp_ms is None else GrantMode.OPEN
        return Reading(Grant(epoch=1, mode=mode), None, (stamp_ms or 0) * 1_000_000)

    def now(self) -> float:
        """A second a look."""
        return float(self.place)

    def guest(self) -> Guest:
        steps = self.looks[self.place - 1][1]
        return Guest(steps_finished=steps, last_step_s=0.004, last_step_end_ns=steps * 10_000_000)


@pytest.mark.parametrize(
    ("looks", "found_ms"),
    [
        ([(None, 5), (None, 5), (55, 5), (55, 6), (55, 7), (None, 8)], [1.0]),
        ([(None, 5), (55, 5), (55, 5), (156, 5), (156, 6)], [1.0]),
        ([(None, 5), (55, 6), (None, 6), (None, 7), (75, 8)], [1.0, 1.0]),
        ([(None, 5), (55, 5), (55, 7)], []),
        ([(55, 5), (55, 6)], []),
    ],
    ids=["once", "renewed_grant", "twice", "first_step_missed", "open_from_the_start"],
)
async def test_an_opening_lasts_from_the_grant_s_stamp_to_the_first_step(
    looks: list[tuple[int | None, int]], found_ms: list[float]
) -> None:
    pages = FakePages(looks)
    found = await watch_openings(
        cast(PageReader[Grant], pages), pages.guest, seconds=len(looks), clock=cast(Clock, pages)
    )
    assert [1e3 * each for each in found] == pytest.approx(found_ms)
    assert opening_figures(found)["opening"]["openings"] == len(found_ms)


def test_the_share_is_that_of_all_windows_together() -> None:
    windows = [
        ClosedWindow(10.0, {"worker": 0.1, "core": 0.0}),
        ClosedWindow(10.0, {"worker": 0.2, "core": 0.1}),
    ]
    found = share_figures(windows)
    assert found["closed_gate_core_share"] == pytest.approx(0.02)
    assert found["closed_gate"]["by_thread"] == {
        "core": pytest.approx(0.005),
        "worker": pytest.approx(0.015),
    }
    assert found["closed_gate"]["share_max"] == pytest.approx(0.03)
