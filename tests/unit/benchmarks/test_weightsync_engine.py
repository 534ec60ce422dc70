"""Synthetic steps of the engine that follows them, how that engine is made on each hardware, and
what stays of a run that does not come to its end."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.testbed.hardware import HardwareKind
from benchmarks.weightsync import engine
from benchmarks.weightsync.engine import FORMS, measure
from benchmarks.weightsync.engine_arms import (
    Times,
    _changed,
    _result,
    first_state,
    next_state,
)
from harvester.contracts.errors import Exhausted, Unsupported

TINY = {
    **FORMS[HardwareKind.CPU].model,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_every_kind_of_hardware_has_a_form_and_the_cpu_s_is_as_before() -> None:
    assert set(FORMS) == set(HardwareKind)
    assert FORMS[HardwareKind.CPU].model["hidden_size"] == 768
    assert not FORMS[HardwareKind.CPU].arguments
    assert FORMS[HardwareKind.REHEARSAL] == FORMS[HardwareKind.CPU]


def test_a_gpu_s_engine_takes_a_part_of_it_and_no_setting_of_cpus() -> None:
    form = FORMS[HardwareKind.GPU]
    assert form.device == "cuda"
    assert 0.0 < form.arguments["gpu_memory_utilization"] < 0.5
    assert not [name for name in form.environment if name.startswith("VLLM_CPU")]
    assert form.model["num_attention_heads"] % form.model["num_key_value_heads"] == 0


def test_a_step_changes_about_one_value_in_a_hundred_and_stays_on_the_host() -> None:
    generator = torch.Generator("cpu").manual_seed(1)
    state = first_state(TINY, generator)
    following = next_state(state, generator)
    elements = sum(tensor.numel() for tensor in state.values())
    assert 0.001 < _changed(state, following) / elements < 0.1
    assert _changed(state, state) == 0
    assert {(t.device.type, t.dtype) for t in following.values()} == {("cpu", torch.bfloat16)}


def test_a_vllm_without_a_path_of_its_own_leaves_its_figure_out() -> None:
    times = Times(stage=[1.0], ours=[2.0], pause=[3.0], unstaged=[4.0])
    result = _result(times, params=10, changed_ratio=0.01)
    assert result["native_ms"] is None
    assert result["pause_ms"] == 3.0
    assert "native" not in result["spread_ms"]


def test_times_before_the_first_repetition_are_null() -> None:
    result = _result(Times(), params=10, changed_ratio=0.0)
    assert (result["repetitions"], result["pause_ms"], result["spread_ms"]) == (0, None, {})


FAKE = """
import pathlib, sys, time
root, repetitions = pathlib.Path(sys.argv[1]), int(sys.argv[2])
kept = pathlib.Path(__file__).with_name("kept")
for done in range({made}):
    new = root / "new"
    new.write_text('{{"repetitions": %d}}' % done)
    new.replace(root / "result.json")
    while not kept.exists() or kept.read_text() != str(done):
        time.sleep(0.01)
print("the last words", file=sys.stderr, flush=True)
{end}
"""


def followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, made: int, end: str
) -> tuple[list[int], dict[str, Any] | Exception]:
    """Repetitions as they were kept, and the end of it. The engine waits for each to be kept."""
    (folder / "fake_engine.py").write_text(FAKE.format(made=made, end=end))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    kept: list[int] = []

    def keep(found: dict[str, Any]) -> None:
        kept.append(found["repetitions"])
        (folder / "kept").write_text(str(kept[-1]))

    try:
        found = measure(
            repetitions=2,
            logs=folder / "logs",
            keep=keep,
            within_s=60.0,
            module="fake_engine",
        )
    except (Exhausted, Unsupported) as error:
        return kept, error
    return kept, found


def test_each_repetition_is_kept_and_printed_as_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, found = followed(tmp_path, monkeypatch, made=3, end="")
    assert kept == [0, 1, 2]
    assert found == {"repetitions": 2}
    said = capsys.readouterr().err
    assert "the engine is up" in said
    assert "1 of 2 repetitions" in said


def test_an_engine_that_fails_says_its_last_words_and_loses_no_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, error = followed(tmp_path, monkeypatch, made=2, end="sys.exit(3)")
    assert isinstance(error, Unsupported)
    assert "ended with 3: the last words" in str(error)
    assert kept[-1] == 1


def test_an_engine_that_hangs_is_ended_with_a_plain_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HangsClock:
        """An hour passes once the engine has said its last."""

        def now(self) -> float:
            logs = (tmp_path / "logs").glob("*")
            return 3600.0 * any("the last words" in log.read_text() for log in logs)

    monkeypatch.setattr(engine, "MonotonicClock", HangsClock)
    kept, error = followed(tmp_path, monkeypatch, made=2, end="time.sleep(600)")
    assert isinstance(error, Exhausted)
    assert "1 of 2 repetitions are measured and kept" in str(error)
    assert "the last words" in str(error)
    assert kept[-1] == 1
