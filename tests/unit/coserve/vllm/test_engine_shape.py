"""An engine's shape line, from configurations with vLLM's fields."""

from types import SimpleNamespace
from typing import Any

import pytest

from coserve.vllm import pulse_reporter as module
from coserve.vllm.pulse_reporter import shape_line
from harvester.contracts.page import MOST_SHAPE_CHARACTERS


def config(**changes: Any) -> Any:
    text = SimpleNamespace(num_hidden_layers=48, hidden_size=5120)
    model = SimpleNamespace(
        architecture="Qwen2ForCausalLM",
        hf_text_config=text,
        quantization=None,
        dtype="torch.bfloat16",
    )
    for name, value in changes.items():
        setattr(model, name, value)
    parallel = SimpleNamespace(tensor_parallel_size=4, pipeline_parallel_size=1)
    return SimpleNamespace(model_config=model, parallel_config=parallel)


@pytest.fixture(autouse=True)
def on_one_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_accelerator", lambda: "NVIDIA H100 80GB HBM3")


def test_model_parallelism_and_accelerator_make_a_shape() -> None:
    said = "Qwen2ForCausalLM 48x5120 bfloat16 tp4 pp1 on NVIDIA H100 80GB HBM3"
    assert shape_line(config()) == said


def test_another_quantization_is_another_shape() -> None:
    assert "48x5120 fp8 tp4" in shape_line(config(quantization="fp8"))


def test_a_field_that_upstream_dropped_is_left_out_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = config()
    del odd.model_config.hf_text_config
    assert shape_line(odd) == "tp4 pp1 on NVIDIA H100 80GB HBM3"

    def broken() -> str:
        raise RuntimeError("no driver")

    monkeypatch.setattr(module, "_accelerator", broken)
    assert shape_line(SimpleNamespace()) == ""


def test_a_long_name_fits_into_the_page() -> None:
    assert len(shape_line(config(architecture="X" * 500))) == MOST_SHAPE_CHARACTERS
