"""The node of a soak: folders, the shipped files for them, and the command of each part.

Only a machine's own settings are replaced: paths, ports, users, model, sizes. Folders below `out`
outlive a piece; pages are in shared memory, and the agent's state is on a small disk of its own.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.production_model import STEP_TOKENS, write_production_checkpoint
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineCommand, EngineSpec
from deploy.check_expressions import DEPLOY
from examples.grpo.model import PolicyModel, PolicyShape, write_checkpoint
from harvester.platform.whole_file import write_whole
from tests.integration.test_shipped_path import make_directories, redirected
from tests.soak.parts import AGENT, DEDICATED, GATEWAY, GUEST, JOB, PRODUCTION, SLOT

POLICY_CONTEXT_TOKENS = 4096
PRODUCTION_CONTEXT_TOKENS = 2048
SHAPE = PolicyShape(
    hidden=128, intermediate=256, layers=2, heads=2, kv_heads=2,
    context_tokens=POLICY_CONTEXT_TOKENS,
)  # fmt: skip
DEDICATED_TURNS = 2
"""Turns at once on the dedicated engine: fewer than the job has, so that it leases the slot."""
SERVING_CORE, ROLLOUT_CORE = 0, 1
"""Production and guest share the first; all others are on the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCommand:
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    url: str = ""
    health: str = "/health"
    core: int = ROLLOUT_CORE
    nice: int = 0
    restart_s: float = 1.0
    """`RestartSec` of its unit; production and dedicated engines have none of ours."""
    only_on_failure: bool = False
    """`Restart=on-failure`: an end with status 0 is meant."""


class SoakNode:
    """Raises ConfigError where a part's requirement is not met."""

    def __init__(self, out: Path, root: Path) -> None:
        """`root`: of this piece, with the pages."""
        self.out, self.root = out, root
        ports = free_ports(5)
        self.ports = dict(zip((PRODUCTION, GUEST, DEDICATED, AGENT, GATEWAY), ports, strict=True))
        self.weights = out / "weights"
        self.agent_state = root / "state"
        self.gateway_state = out / "gateway"
        for folder in (self.weights, self.gateway_state, self.agent_state):
            folder.mkdir(parents=True, exist_ok=True)
        make_directories(root)
        (root / "weights").symlink_to(self.weights)
        state = PolicyModel(SHAPE, seed=1).bfloat16().state_dict()
        write_checkpoint(root / "models/policy", SHAPE, state)
        write_production_checkpoint(
            root / "models" / PRODUCTION, context_tokens=PRODUCTION_CONTEXT_TOKENS
        )
        shipped = redirected(root, (self.ports[AGENT], self.ports[GUEST])).read_text()
        # As install.md says once one has looked long enough.
        self.agent_yaml = shipped.replace("mode: observe ", "mode: harvest ")
        self.write_agent_file(self.agent_yaml)
        self._write_gateway_file()

    @property
    def agent_file(self) -> Path:
        return self.root / "agent.yaml"

    @property
    def gateway_file(self) -> Path:
        return self.root / "gateway.yaml"

    @property
    def page_root(self) -> Path:
        return self.root / "run/rosemux"

    @property
    def pages(self) -> Path:
        return self.page_root / SLOT

    @property
    def store(self) -> Path:
        return self.weights / JOB

    @property
    def policy_weights(self) -> Path:
        return self.root / "models/policy/model.safetensors"

    def url(self, part: str) -> str:
        return f"http://127.0.0.1:{self.ports[part]}"

    def write_agent_file(self, text: str) -> None:
        write_whole(self.agent_file, text)

    def _write_gateway_file(self) -> None:
        text = (DEPLOY.parent / "examples/gateway.yaml").read_text()
        for shipped, here in (
            ("port: 8300", f"port: {self.ports[GATEWAY]}"),
            ("http://127.0.0.1:8002", self.url(DEDICATED)),
            ("concurrency: 32", f"concurrency: {DEDICATED_TURNS}"),
            ("http://127.0.0.1:9711", self.url(AGENT)),
            ("/var/lib/rosemux-gateway", str(self.gateway_state)),
        ):
            assert shipped in text, shipped
            text = text.replace(shipped, here)
        self.gateway_file.write_text(text)

    def commands(self) -> dict[str, PartCommand]:
        cli = (sys.executable, "-m", "harvester.cli")
        agent = (*cli, "agent", "--config", str(self.agent_file))
        guest = (*cli, "guest", "--config", str(self.agent_file), "--slot", SLOT)
        gateway = (*cli, "gateway", "--config", str(self.gateway_file))
        production = launch.production(self._production(), pages=self.pages)
        rollout = launch.dedicated(self._dedicated(), weights=self.weights)
        return {
            PRODUCTION: self._engine(PRODUCTION, production, core=SERVING_CORE),
            # Below the others of its core: agent, gateway and clients have cores of their own
            # where engines are on accelerators.
            DEDICATED: replace(self._engine(DEDICATED, rollout, core=ROLLOUT_CORE), nice=10),
            AGENT: PartCommand(arguments=agent, url=self.url(AGENT), health="/healthz"),
            GATEWAY: PartCommand(arguments=gateway, url=self.url(GATEWAY), health="/healthz"),
            GUEST: PartCommand(
                arguments=guest,
                url=self.url(GUEST),
                core=SERVING_CORE,
                restart_s=10.0,
                only_on_failure=True,
            ),
        }

    def _engine(self, part: str, command: EngineCommand, *, core: int) -> PartCommand:
        return PartCommand(
            arguments=command.arguments,
            environment=command.environment,
            url=self.url(part),
            core=core,
        )

    def _production(self) -> EngineSpec:
        return EngineSpec(
            name=PRODUCTION,
            model=self.root / "models" / PRODUCTION,
            port=self.ports[PRODUCTION],
            max_model_len=PRODUCTION_CONTEXT_TOKENS,
            max_num_seqs=16,
            vllm=capabilities(installed_vllm_version()),
            extra_arguments=(
                *("--load-format", "dummy"),
                *("--max-num-batched-tokens", str(STEP_TOKENS)),
            ),
        )

    def _dedicated(self) -> EngineSpec:
        return EngineSpec(
            name="policy",
            model=self.root / "models/policy",
            port=self.ports[DEDICATED],
            max_model_len=POLICY_CONTEXT_TOKENS,
            max_num_seqs=16,
            vllm=capabilities(installed_vllm_version()),
        )
