"""Copied examples work: configurations load, requests are accepted, flags are the shipped ones."""

import importlib.util
import inspect
import re
import shlex
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from coserve.guest.isolation import IDLE_CLASS
from coserve.vllm import launch
from coserve.vllm.capabilities import SUPPORTED
from coserve.vllm.launch import EngineSpec
from harvester.config_file import load_agent_config
from harvester.contracts.errors import ConfigError
from harvester.platform.tls import Credentials
from harvester.policy.settings import AUTO, Mode
from scheduler.gateway.requests import decode_generate
from scheduler.gateway.settings import load_settings
from scheduler.rollmux.plan.drafting import draft
from scheduler.rollmux.plan.jobs_file import read_jobs
from weightsync.publish.settings import WorkSettings
from weightsync.publisher import Published, Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver


@pytest.fixture
def example(repository: Path) -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, repository / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_agent_s_configuration_loads_and_begins_with_observing(repository: Path) -> None:
    config = load_agent_config(repository / "examples/agent.yaml", environment={})

    assert config.mode is Mode.OBSERVE
    assert config.slots[0].policy.blocking_ratio == AUTO


@pytest.mark.parametrize("name", ["examples/agent.yaml", "deploy/systemd/agent.yaml"])
def test_the_guest_s_settings_are_there_and_what_is_commented_out_loads(
    name: str, repository: Path, tmp_path: Path
) -> None:
    text = (repository / name).read_text()
    plain = load_agent_config(repository / name, environment={}).slots[0]
    assert plain.guest is not None
    assert (plain.mps, plain.kvcached, plain.guest.isolation) == (None, None, None)
    said = tmp_path / "agent.yaml"
    said.write_text(
        re.sub(r"(?m)^( *)# (mps|gpus|isolation|active_th\w+|sleeps): ", r"\1\2: ", text)
    )
    guest = load_agent_config(said, environment={}).slots[0].guest
    assert guest is not None
    assert guest.isolation == (None if text == said.read_text() else "mps")


def test_the_gateway_s_configuration_loads_and_meets_the_agent_s(repository: Path) -> None:
    gateway = load_settings(repository / "examples/gateway.yaml")
    agent = load_agent_config(repository / "examples/agent.yaml", environment={})

    assert [each.url for each in gateway.agents] == [f"http://{agent.http.host}:{agent.http.port}"]
    assert gateway.jobs[0].tenant in agent.tenants


def test_the_gateway_of_several_machines_sends_no_token_in_the_clear(
    repository: Path, tmp_path: Path
) -> None:
    text = (repository / "examples/machines.yaml").read_text()
    settings = load_settings(repository / "examples/machines.yaml")
    assert settings.tls is not None
    assert settings.agents[0].guests == Credentials(
        token_file=settings.engines[0].token_file, ca_file=settings.engines[0].ca_file
    )
    said = tmp_path / "machines.yaml"
    said.write_text(re.sub(r"(?m)^( *)# ?( *(?:- )?\w+: ?\S*|renderers:)", r"\1\2", text))
    mutual = load_settings(said)
    assert (mutual.renderers[0].url, mutual.engines[0].key_file) == (
        "https://192.0.2.22:8443",
        Path("/etc/rosemux/client.key"),
    )
    said.write_text(text.replace("url: https://192.0.2.20", "url: http://192.0.2.20"))
    with pytest.raises(ConfigError, match=r"engines\.0.*rosemux engine-proxy"):
        load_settings(said)


def test_the_jobs_are_placed_for_less_than_nodes_of_their_own(repository: Path) -> None:
    plan = draft(read_jobs(repository / "examples/jobs.yaml"))

    assert not plan.unplaced
    assert plan.price_per_hour < plan.dedicated_per_hour


def test_the_sharded_form_is_one_version_of_all_ranks(
    example: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    publish = example("publish")
    weight = torch.arange(8.0).reshape(4, 2)

    def published_by(rank: int) -> Published:
        work = WorkSettings(copy_dir=tmp_path / "copies")
        with Publisher(tmp_path / "job-a", rank=rank, ranks=2, work=work) as publisher:
            part = publish.rows_of(weight[2 * rank : 2 * rank + 2], rank, (4, 2))
            return publisher.publish([("weight", part)], step=1)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(published_by, range(2))

    assert first.version == second.version == 1
    held = {"weight": torch.zeros(4, 2)}
    Receiver(tmp_path / "job-a").sync(None, first.version, TensorTarget(held))
    assert torch.equal(held["weight"], weight)


def test_a_rank_s_publisher_knows_its_place(
    example: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    publish = example("publish")
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)

    class AskedPublisher(Publisher):
        def __init__(self, _: str, **given: Any) -> None:
            asked.update(given)

    monkeypatch.setattr(publish, "Publisher", AskedPublisher)

    publish.sharded_publisher(str(tmp_path))

    assert (asked["rank"], asked["ranks"]) == (1, 4)
    assert asked.keys() <= inspect.signature(Publisher).parameters.keys()


def test_the_block_of_the_first_five_minutes_is_of_files_flags_and_options_that_exist(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (repository / "examples/README.md").read_text()
    (block,) = re.findall(r"(?s)```bash\n(.*?)```", readme)
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    made, configured = re.findall(r"(?s)<<'END'\n(.*?)^END$", block, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("out/trial").mkdir(parents=True)
    exec(made, {})
    Path("out/trial/gateway.yaml").write_text(configured)
    settings = load_settings(Path("out/trial/gateway.yaml"))

    words = shlex.split(block)
    given = dict(pairwise(words))
    page = (repository / "docs/weights.md").read_text().partition("## In the engine\n")[2]
    (dedicated,) = re.findall(r"(?s)    ROSEMUX_WEIGHT_ROOT=.*?\n\n", page)
    for command in (given, dict(pairwise(shlex.split(dedicated)))):
        assert (command["--host"], command["--port"]) == ("127.0.0.1", "8002")
    assert settings.engines[0].url == f"http://{given['--host']}:{given['--port']}"
    assert decode_generate(given["-d"].rstrip(";").encode()).token_ids
    assert Path(given["--checkpoint"]).is_file()
    for script in ("publish", "rollout"):
        (line,) = re.findall(rf"(?m)^python examples/{script}\.py (.*)$", block)
        source = (repository / f"examples/{script}.py").read_text()
        assert all(f'"{option}"' in source for option in re.findall(r"--[\w-]+", line))
    assert f"--job {settings.jobs[0].id} " in block

    spec = EngineSpec(
        name="e",
        model=Path(given["--model"]),
        port=8002,
        max_model_len=512,
        max_num_seqs=16,
        vllm=SUPPORTED["0.32.0"],
    )
    started = dict(pairwise(launch.dedicated(spec, weights=Path("w")).arguments))
    ours = [flag for flag in started if flag.startswith("--") and flag in given]
    assert {"--middleware", "--weight-transfer-config", "--enable-scale-out"} <= {*ours}
    assert {"--load-format", "--logprobs-mode", "--no-enable-chunked-prefill"} <= {*ours}
    for flag in {*ours} - {"--port", "--dtype"}:
        assert started[flag] == given[flag] or started[flag].startswith("--"), flag


def test_the_guest_is_started_as_the_project_starts_it(repository: Path, tmp_path: Path) -> None:
    script = (repository / "examples/guest.sh").read_text()
    words = shlex.split(script, comments=True)
    given = dict(pairwise(words))
    variables = dict(word.split("=", 1) for word in words if word[:1].isupper() and "=" in word)
    spec = EngineSpec(
        name="guest",
        model=tmp_path,
        port=8001,
        max_model_len=512,
        max_num_seqs=16,
        vllm=SUPPORTED["0.32.0"],
    )
    pages, weights = Path("/run/rosemux/slot0"), Path("/srv/weights")
    command = launch.guest(spec, pages=pages, weights=weights, isolation=IDLE_CLASS)
    plain = launch.dedicated(spec, weights=Path("/srv/weights"))
    production = launch.production(spec, pages=tmp_path)
    started = dict(pairwise(command.arguments))
    ours = [flag for flag in started if flag.startswith("--") and flag not in production.arguments]

    assert "--scheduler-cls" in ours
    for flag in (*ours, "--middleware", "--host", "--port"):
        assert flag in given, flag
        if not started[flag].startswith("--"):
            assert given[flag] == started[flag], flag
    assert {name: command.environment[name] for name in variables} == variables
    assert command.environment.keys() - plain.environment.keys() <= variables.keys()
    assert words[words.index("chrt") + 1] == "--idle"
