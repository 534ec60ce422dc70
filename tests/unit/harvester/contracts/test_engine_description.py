"""Which engines can make tokens of one job."""

import pytest
from msgspec.structs import replace

from harvester.contracts.wire.engines import EngineDescription

LLAMA = EngineDescription(
    model="policy",
    architecture="LlamaForCausalLM",
    context_tokens=4096,
    vocabulary=512,
    dtype="bfloat16",
    logprobs_mode="processed_logprobs",
)


def replaced(**changes: object) -> EngineDescription:
    return replace(LLAMA, **changes)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits", "raw_logits"])
def test_only_processed_log_probabilities_are_those_of_the_policy(mode: str) -> None:
    assert "start it with --logprobs-mode processed_logprobs" in replaced(logprobs_mode=mode).fault
    assert LLAMA.fault == replaced(logprobs_mode="").fault == ""


@pytest.mark.parametrize(
    "changes", [{"architecture": "MambaForCausalLM"}, {"vocabulary": 513}], ids=str
)
def test_engines_that_compute_something_else_disagree_both_ways(changes) -> None:
    other = replaced(**changes)
    ((what, its),) = changes.items()
    assert other.disagreement(LLAMA) == f"{what} {its}, not {getattr(LLAMA, what)}"
    assert LLAMA.disagreement(other)


@pytest.mark.parametrize(
    "changes",
    [{"model": "guest"}, {"context_tokens": 512}, {"dtype": "float32"}, {"features": ("x",)}],
    ids=str,
)
def test_engines_may_differ_in_name_size_and_precision(changes) -> None:
    assert replaced(**changes).disagreement(LLAMA) == ""


def test_unknown_facts_agree() -> None:
    assert EngineDescription().disagreement(LLAMA) == ""
    assert LLAMA.disagreement(EngineDescription()) == ""
