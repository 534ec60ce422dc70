"""Synthetic steps of the engine that follows them, and how that engine is made on each hardware."""

import torch

from benchmarks.weightsync.engine import FORMS
from benchmarks.weightsync.engine_arms import (
    Times,
    _changed,
    _result,
    first_state,
    next_state,
)
from scheduler.demo.hardware import Kind

TINY = {
    **FORMS[Kind.CPU].model,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_every_kind_of_hardware_has_a_form_and_the_cpu_s_is_as_before() -> None:
    assert set(FORMS) == set(Kind)
    assert FORMS[Kind.CPU].model["hidden_size"] == 768
    assert not FORMS[Kind.CPU].arguments
    assert FORMS[Kind.REHEARSAL] == FORMS[Kind.CPU]


def test_a_gpu_s_engine_takes_a_part_of_it_and_no_setting_of_cpus() -> None:
    form = FORMS[Kind.GPU]
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
