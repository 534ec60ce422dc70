"""Sleeping weights on the CPU's stand-in for a GPU's virtual memory, and their figures."""

import importlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.gpu_slot.decode_model import LLAMA_8B  # noqa: E402
from benchmarks.gpu_slot.device import CpuDevice  # noqa: E402
from benchmarks.gpu_slot.parts import PARTS  # noqa: E402
from benchmarks.gpu_slot.results import left_in, put_into  # noqa: E402
from benchmarks.gpu_slot.sleeping.figures import (  # noqa: E402
    MeasuredPass,
    pass_figures,
    production_figures,
    step_figures,
    steps_during,
)
from benchmarks.gpu_slot.sleeping.pieces import (  # noqa: E402
    Pass,
    SleepingPieces,
    even_sizes,
    tensor_sizes,
)
from benchmarks.gpu_slot.sleeping.production import (  # noqa: E402
    ProductionProcess,
    production,
    serve,
)
from benchmarks.gpu_slot.sleeping.virtual_memory import CpuVirtualMemory  # noqa: E402

MS = 1_000_000
PAGE = CpuVirtualMemory().granularity_bytes
SIZES = [PAGE, 3 * PAGE, 2 * PAGE]


@pytest.fixture
def memory() -> CpuVirtualMemory:
    return CpuVirtualMemory()


@pytest.fixture
def pieces(memory: CpuVirtualMemory) -> SleepingPieces:
    host = torch.zeros(sum(SIZES), dtype=torch.uint8)
    return SleepingPieces(memory, torch.device("cpu"), SIZES, host)


def test_weights_wake_with_what_they_held(pieces: SleepingPieces) -> None:
    assert pieces.damaged() == []
    asleep = pieces.fall_asleep()
    awake = pieces.wake(pause_ratio=0.5)
    assert pieces.damaged() == []
    assert asleep.size_bytes == awake.size_bytes == 6 * PAGE
    assert {name: len(taken) for name, taken in awake.calls.items()} == {
        "madvise_willneed": len(SIZES),
        "memmove": len(SIZES),
    }
    assert asleep.calls.keys() == {"memmove", "madvise_dontneed"}


def test_contents_spoiled_while_asleep_are_found(pieces: SleepingPieces) -> None:
    pieces.fall_asleep()
    pieces.host[PAGE + 17] ^= 1
    pieces.wake()
    assert pieces.damaged() == [1]


def test_two_words_that_change_places_are_found(pieces: SleepingPieces) -> None:
    pieces.fall_asleep()
    words = pieces.host.view(torch.int64)
    words[:2] = words[:2].flip(0)
    pieces.wake()
    assert pieces.damaged() == [0]


def test_memory_that_was_given_up_is_lost_until_it_is_copied_back(pieces: SleepingPieces) -> None:
    pieces.fall_asleep()
    pieces.remap()
    assert pieces.damaged() == [0, 1, 2]
    pieces.write_back()
    assert pieces.damaged() == []
    pieces.discard()
    with pytest.raises(ValueError, match="nothing behind"):
        pieces.damaged()
    with pytest.raises(KeyError):
        pieces.discard()


def test_host_memory_too_small_for_the_pieces_is_refused(memory: CpuVirtualMemory) -> None:
    with pytest.raises(ValueError, match="do not hold"):
        SleepingPieces(memory, torch.device("cpu"), SIZES, torch.zeros(PAGE, dtype=torch.uint8))


def test_pieces_of_an_8b_model_are_its_matrices() -> None:
    sizes = tensor_sizes(LLAMA_8B, granularity_bytes=2 << 20)
    assert len(sizes) == 2 + 4 * 32 + 1
    assert all(size % (2 << 20) == 0 for size in sizes)
    assert 0 <= sum(sizes) - 2 * LLAMA_8B.parameters < len(sizes) * (2 << 20)
    even = even_sizes(sum(sizes), piece_bytes=64 << 20, granularity_bytes=2 << 20)
    assert sum(even) == sum(sizes)
    assert set(even[:-1]) == {64 << 20}
    assert 0 < even[-1] <= 64 << 20
    assert even_sizes(128, piece_bytes=64, granularity_bytes=64) == [64, 64]


def _pass(began_ms: int, ended_ms: int, *, size_bytes: int = 0, **calls: list[float]) -> Pass:
    return Pass(began_ns=began_ms * MS, ended_ns=ended_ms * MS, size_bytes=size_bytes, calls=calls)


def test_steps_beside_a_pass_are_those_that_overlap_it() -> None:
    steps = [(0, 10 * MS), (10 * MS, 21 * MS), (21 * MS, 50 * MS), (50 * MS, 60 * MS)]
    assert steps_during(steps, 20 * MS, 30 * MS) == (11.0, 29.0)
    assert steps_during(steps, 10 * MS, 21 * MS) == (11.0,)
    assert steps_during([], 0, MS) == ()


def test_a_pass_has_seconds_rate_and_calls() -> None:
    figures = pass_figures(
        [
            _pass(0, 100, size_bytes=10**9, map=[0.001, 0.003]),
            _pass(200, 600, size_bytes=10**9, map=[0.002, 0.004]),
        ]
    )
    assert figures["seconds"] == pytest.approx(
        {"median": 0.25, "low": 0.1, "high": 0.4, "count": 2}
    )
    assert figures["gb_per_s"]["high"] == pytest.approx(10.0)
    assert figures["calls"]["map"]["per_pass"] == 2
    assert figures["calls"]["map"]["ms_per_pass"]["median"] == pytest.approx(5.0)
    assert figures["calls"]["map"]["ms_longest"] == pytest.approx(4.0)


def test_production_beside_a_pass_is_held_against_its_own_round() -> None:
    slow = MeasuredPass(_pass(0, 30), during_ms=(10.0, 30.0), alone_ms=(10.0, 10.0))
    same = MeasuredPass(_pass(0, 30), during_ms=(20.0,), alone_ms=(20.0, 20.0))
    figures = production_figures([slow, same])
    assert figures["mean_ratio"] == {"median": 1.5, "low": 1.0, "high": 2.0, "count": 2}
    assert figures["delay_ms_per_pass"] == {"median": 10.0, "low": 0.0, "high": 20.0, "count": 2}
    assert figures["step_ms"]["longest"] == 30.0
    assert (figures["step_ms"]["count"], figures["alone_step_ms"]["count"]) == (3, 4)


def test_a_percentile_is_of_all_steps_and_none_are_none() -> None:
    figures = step_figures([float(ms) for ms in range(101)])
    assert (figures["p50"], figures["p99"], figures["mean"]) == (50.0, 99.0, 50.0)
    assert step_figures([]) == {"count": 0}
    assert production_figures([])["mean_ratio"] == {"count": 0}


def test_production_steps_from_run_to_stop_and_ends_with_its_commands() -> None:
    commands, orders = os.pipe()
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        if taken == 3:
            os.write(orders, b"stop\n")
            os.close(orders)

    os.write(orders, b"run\n")
    answers = io.BytesIO()
    with os.fdopen(commands, "rb", buffering=0) as reading:
        serve(CpuDevice(), step, reading, answers)
    ready, running, steps = answers.getvalue().splitlines()
    assert (ready, running, taken) == (b"ready", b"running", 3)
    assert len(json.loads(steps)) == 3


def test_a_production_that_ends_is_named() -> None:
    with production("cpu", tiny=True) as beside:
        beside.wait_until_ready()
        beside.run()
        first = beside.stop()
        beside.run()
        second = beside.stop()
        assert all(start <= end for start, end in first + second)
        assert not first or not second or first[-1][1] <= second[0][0]
        beside._process.kill()
        with pytest.raises(RuntimeError, match="production ended with -9"):
            ProductionProcess(beside._process).wait_until_ready()


def test_the_part_runs_through_and_leaves_its_figures(tmp_path: Path) -> None:
    part = next(part for part in PARTS if part.name == "sleeping")
    importlib.import_module(part.module).measured(
        "cpu", tiny=True, put=put_into(tmp_path / "found.json")
    )
    found: dict[str, Any] = left_in(tmp_path / "found.json")
    layouts = {"tensors", "even_pieces"}
    assert found["rounds"] == 2
    assert found["spoiled_piece_found"] is True
    assert found["verified_passes"] == 2 * (3 + 4)
    assert found["alone"].keys() == found["beside_production"].keys() == layouts
    assert found["beside_production"]["even_pieces"].keys() >= {"awake", "awake_paced", "mapped"}
    awake = found["beside_production"]["even_pieces"]["awake"]
    assert awake["seconds"]["count"] == 2
    assert awake["seconds"]["low"] > 0
    assert found["setting"]["pieces"] == {"tensors": 11, "even_pieces": 16}
