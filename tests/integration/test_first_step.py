"""A real engine whose first step a tight grant limits to a few tokens."""

from pathlib import Path

import pytest

from tests.integration.forked_program import output_of

pytestmark = pytest.mark.engine

# A process of its own: the fault that this test is about kills the process that meets it.
GENERATE = """
import sys

import vllm
from transformers import Qwen2Config, Qwen2ForCausalLM

if __name__ == "__main__":
    folder = sys.argv[1]
    config = Qwen2Config(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    engine = vllm.LLM(
        folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=128,
    )
    sampling = vllm.SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": [7]}], sampling, use_tqdm=False)
    print("tokens", len(output.outputs[0].token_ids))
"""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def test_an_engine_survives_a_first_step_of_one_token(tmp_path: Path) -> None:
    command = ("-c", GENERATE, str(tmp_path / "model"))
    assert "tokens 6" in output_of(*command, log=tmp_path / "child.log", env=ENVIRONMENT)
