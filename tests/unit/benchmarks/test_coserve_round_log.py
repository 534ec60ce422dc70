"""A run in pieces: rounds that count, and pieces that are refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.coserve.arms import ESSENTIAL, Arm
from benchmarks.coserve.round_log import Plan, RoundLog, RunSettings
from benchmarks.coserve.rounds import ArmSlice
from benchmarks.testbed.excerpt import TokenScale
from benchmarks.testbed.origin import Origin, origin
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import ServiceLevel
from harvester.contracts.errors import ConfigError

SETTINGS = RunSettings(trace="t", seed=1, slice_s=10.0, rounds=4, arms=ESSENTIAL)
HERE = Origin(
    processor="a",
    cores=2,
    memory_gib=8,
    kernel="6",
    accelerator="",
    vllm="0.32.0",
    commit="c0ffee",
)
PLAN = Plan(sizes=TokenScale(), rate=5.0, level=ServiceLevel(ttft_s=0.1, itl_s=0.05))
SLICE = ArmSlice(
    arm=Arm.ROSEMUX,
    round=0,
    seconds=10.0,
    guest_tokens=5,
    guest_steps=2,
    production_busy_s=None,
    production_core_s=1.0,
    idle_s=3.0,
    guest_core_s=None,
    step_work_s=1e-4,
    steps_met={0: 3, 1: 2},
)
REQUEST = ProductionRequest(
    arm="rosemux",
    block=0,
    due_s=1.0,
    input_tokens=8,
    output_tokens=2,
    ttft_s=0.1,
    itl_s=(0.01,),
    failed=False,
)


def log_in(folder: Path, **changes: Any) -> RoundLog:
    asked = {name: changes.pop(name) for name in tuple(changes) if hasattr(SETTINGS, name)}
    return RoundLog(
        folder / "x.rounds.jsonl",
        msgspec.structs.replace(SETTINGS, **asked),
        msgspec.structs.replace(HERE, **changes),
    )


def first_piece(folder: Path, *, rounds: int = 2) -> RoundLog:
    log = log_in(folder)
    log.begin(PLAN)
    for number in range(rounds):
        log.add([msgspec.structs.replace(SLICE, round=number)], [REQUEST])
    return log


def test_a_resumed_run_has_all_rounds_and_the_load_and_slo_of_the_first_piece(
    tmp_path: Path,
) -> None:
    before = first_piece(tmp_path)
    log = log_in(tmp_path)
    log.resume()
    assert log.plan == PLAN
    assert (log.slices, log.requests) == (before.slices, before.requests)
    log.begin(PLAN)
    log.add([msgspec.structs.replace(SLICE, round=2)], [REQUEST])
    again = log_in(tmp_path)
    again.resume()
    assert [each.number for each in again.rounds] == [0, 1, 2]
    assert len(again.pieces) == 2


def test_a_resumed_run_goes_on_with_the_proof_that_its_slot_began(tmp_path: Path) -> None:
    log = log_in(tmp_path, proven=True)
    log.begin(PLAN)
    log.prove(SLICE, [REQUEST])
    again = log_in(tmp_path, proven=True)
    again.resume()
    assert again.proving == log.proving
    assert (again.rounds, again.slices, again.requests) == ([], [], [])


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "other"},
        {"processor": "another"},
        {"kernel": "7"},
        {"vllm": "0.33.0"},
        {"seed": 2},
        {"slice_s": 20.0},
        {"arms": (Arm.ALONE, Arm.ROSEMUX)},
        {"slo_ms": (100.0, 50.0)},
        {"busy_share": 0.7},
        {"trace": "another"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_pieces_of_unlike_machines_commits_or_questions_are_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    first_piece(tmp_path)
    with pytest.raises(ConfigError, match=f"rounds of {next(iter(changes))} .* another --json"):
        log_in(tmp_path, **changes).resume()


def test_a_round_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    log = first_piece(tmp_path)
    whole = log.file.read_bytes()
    log.file.write_bytes(whole[:-40])
    resumed = log_in(tmp_path)
    resumed.resume()
    assert [each.number for each in resumed.rounds] == [0]
    resumed.add([msgspec.structs.replace(SLICE, round=1)], [REQUEST])
    assert log.file.read_bytes() == whole


def test_the_agent_s_state_goes_on_with_the_rounds_and_ends_with_them(tmp_path: Path) -> None:
    state = first_piece(tmp_path).agent_state
    state.mkdir()
    resumed = log_in(tmp_path)
    resumed.resume()
    resumed.begin(PLAN)
    assert state.is_dir()
    assert resumed.agent_state == state
    first_piece(tmp_path)
    assert not state.exists()


def test_without_resume_a_run_begins_anew(tmp_path: Path) -> None:
    first_piece(tmp_path)
    log = first_piece(tmp_path, rounds=1)
    resumed = log_in(tmp_path)
    resumed.resume()
    assert resumed.requests == log.requests
    assert not resumed.is_complete


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.resume()
    assert log.plan is None
    log.file.write_text("requests,tokens\n")
    with pytest.raises(ConfigError, match="holds no rounds"):
        log.resume()


def test_a_machine_is_itself_from_one_piece_to_the_next() -> None:
    assert origin() == origin()
    assert origin().cores > 0
