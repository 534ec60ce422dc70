"""Real vLLM in one process: output that a request brings counts as the engine's own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.forked_program import output_of

pytestmark = pytest.mark.engine

CHILD = """
import json, sys
from pathlib import Path
from vllm import LLM, SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.sampling_params import StructuredOutputsParams
from benchmarks.migration.model import END_THINK_ID, REASONING, THINK_ID, write_model

model = Path(sys.argv[1])
write_model(model, texts=[Path("README.md").read_text()], context_tokens=256, seed=3)
engine = LLM(
    model=str(model), dtype="float32", max_model_len=256, enforce_eager=True, max_num_seqs=32,
    reasoning_parser="deepseek_r1", reasoning_config=ReasoningConfig(**REASONING),
)
PLAIN = [1, 70, 80, 90, THINK_ID, END_THINK_ID]
THINKING = PLAIN[:-1]


def made(brought, prompt=PLAIN, **sampling):
    usual = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    if regex := sampling.pop("regex", None):
        usual["ignore_eos"] = False
    every = []
    for emitted in brought:
        own = {"extra_args": {"rosemux_emitted_tokens": emitted}} if emitted else {}
        if regex:
            own["structured_outputs"] = StructuredOutputsParams(regex=regex)
        every.append(SamplingParams(**(usual | sampling | own)))
    made = engine.generate([{"prompt_token_ids": prompt}] * len(every), every, use_tqdm=False)
    outs = [one.outputs[0] for one in made]
    return [[list(out.token_ids), out.text, out.finish_reason, out.stop_reason] for out in outs]


(plain,) = made([[]])
text = plain[1]
settings = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "stop": {"stop": [text[len(text) // 2 :][:6]]},
    "regex": {"regex": "([a-z]{2,5}-){2,8}[0-9]"},
    "split characters": {"regex": "[äöü€]{12}", "max_tokens": 48},
    "stop at split characters": {"regex": "(äü€){4}", "stop": ["€äü€ä"], "max_tokens": 48},
    "thinking": {"prompt": THINKING, "thinking_token_budget": 5},
    "no thinking": {"prompt": THINKING, "thinking_token_budget": 0, "frequency_penalty": 0.5},
    "grammar after thinking": {
        "prompt": THINKING, "thinking_token_budget": 4, "regex": "([a-z]{2,3}-){1,3}[0-9]",
        "max_tokens": 48,
    },
}
found, ends = {}, {}
for name, sampling in settings.items():
    (still,) = made([[]], **sampling)
    cuts = range(1, len(still[0]))
    moved = made([still[0][:cut] for cut in cuts], **sampling)
    found[name] = [cut for cut, one in zip(cuts, moved) if one != still]
    ends[name] = [still[1], *still[2:]]
refused = []
for emitted in ([1 << 30], ["x"], "x", [5] * 24, [5] * 300):
    try:
        made([emitted])
    except ValueError as error:
        refused.append("rosemux_emitted_tokens" in str(error))
found = {"differing cuts": found, "refused": refused, "still serves": made([[]]) == [plain]}
print("FOUND", json.dumps(found | {"ends": ends}))
"""


def child(tmp_path: Path, **variables: str) -> dict[str, Any]:
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": str(Path.cwd()),
    }
    said = output_of(
        *("-c", CHILD, str(tmp_path / "model")),
        log=tmp_path / "child.log",
        env=settings | variables,
    )
    lines = [line for line in said.splitlines() if "FOUND" in line]
    found: dict[str, Any] = json.loads(lines[-1].partition("FOUND ")[2])
    return found


def test_a_rollout_engine_goes_on_at_any_token_and_refuses_what_it_could_not_bear(
    tmp_path: Path,
) -> None:
    told = child(tmp_path, ROSEMUX_WEIGHT_ROOT=str(tmp_path))
    assert {name: cuts for name, cuts in told["differing cuts"].items() if cuts} == {}
    assert told["refused"] == [True] * 5
    assert told["still serves"]
    # The settings did what they were chosen for.
    ends = told["ends"]
    assert ends["stop"][1] == "stop"
    assert ends["stop at split characters"] == ["äü", "stop", "€äü€ä"]
    assert re.fullmatch("[äöü€]{12}", ends["split characters"][0])
    assert "Enough." in ends["thinking"][0]
    assert ends["no thinking"][0].startswith("Enough.")
    assert re.search(r"Enough\.</think>([a-z]{2,3}-){1,3}[0-9]$", ends["grammar after thinking"][0])
