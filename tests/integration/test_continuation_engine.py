"""Real vLLM in one process: output that a request brings counts as the engine's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

CHILD = """
import json, sys
from pathlib import Path
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from benchmarks.migration.model import write_model

model = Path(sys.argv[1])
write_model(model, texts=[Path("README.md").read_text()], context_tokens=256, seed=3)
engine = LLM(
    model=str(model), dtype="float32", max_model_len=256, enforce_eager=True, max_num_seqs=4
)
prompt = {"prompt_token_ids": [1, 70, 80, 90]}


def made(**sampling):
    usual = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    if "regex" in sampling:
        usual["ignore_eos"] = False
        sampling["structured_outputs"] = StructuredOutputsParams(regex=sampling.pop("regex"))
    params = SamplingParams(**(usual | sampling))
    out = engine.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    return [list(out.token_ids), out.text, out.finish_reason, out.stop_reason]


plain = made()
settings = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "stop": {"stop": [plain[1][len(plain[1]) // 2 :][:6]]},
    "regex": {"regex": "([a-z]{2,5}-){2,8}[0-9]"},
}
found = {}
for name, sampling in settings.items():
    still = made(**sampling)
    cut = len(still[0]) // 2
    brought = {"extra_args": {"rosemux_emitted_tokens": still[0][:cut]}}
    found[name] = made(**sampling, **brought) == still
refused = []
for emitted in ([1 << 30], ["x"], "x", [5] * 24, [5] * 300):
    try:
        made(extra_args={"rosemux_emitted_tokens": emitted})
    except ValueError as error:
        refused.append("rosemux_emitted_tokens" in str(error))
print("FOUND", json.dumps({"same": found, "refused": refused, "still serves": made() == plain}))
"""


def child(tmp_path: Path, **variables: str) -> str:
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": str(Path.cwd()),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "model")],
        env=os.environ | settings | variables,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if "FOUND" in line]
    assert lines, done.stderr[-3000:]
    return lines[-1]


def test_a_rollout_engine_goes_on_from_output_and_refuses_what_it_could_not_bear(
    tmp_path: Path,
) -> None:
    told = child(tmp_path, ROSEMUX_WEIGHT_ROOT=str(tmp_path))
    assert '"same": {"presence": true, "frequency": true, "stop": true, "regex": true}' in told
    assert '"refused": [true, true, true, true, true], "still serves": true' in told
