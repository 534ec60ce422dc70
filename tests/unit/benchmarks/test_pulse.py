import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.pulse import __main__ as pulse
from benchmarks.pulse.figures import ARMS, Figures, PulseArm
from benchmarks.testbed.bursts import Bursts, generated_trace
from benchmarks.testbed.gpu_hardware import GpuHardware
from benchmarks.testbed.hardware import CpuHardware, Hardware
from benchmarks.testbed.memory_split import GpuMemory
from benchmarks.testbed.parts import Parts
from benchmarks.testbed.production_request import ProductionRequest
from coserve.guest.gpus import ComputeMode, Gpu
from coserve.vllm.launch import EngineCommand


def requests_of(arm: PulseArm, *, slower: float, failed: bool = False) -> list[ProductionRequest]:
    return [
        ProductionRequest(
            arm=arm,
            block=turn,
            due_s=0.0,
            input_tokens=10,
            output_tokens=3,
            ttft_s=slower * (0.05 + 1e-4 * index),
            itl_s=(slower * (0.010 + 1e-5 * index),),
            failed=failed,
            trace_index=index,
        )
        for turn in range(2)
        for index in range(40)
    ]


def test_the_cost_of_the_pulse_stands_beside_the_noise_floor() -> None:
    figures = Figures()
    for arm, slower in zip(ARMS, (1.0, 1.1, 1.02, 0.99), strict=True):
        figures.requests += requests_of(arm, slower=slower)
        figures.closed[arm] = [10.0 / slower, 20.0 / slower, 30.0 / slower]
        figures.core_s[arm] = [{"api: loop": slower, "api: beat": 0.0, "core: main": 0.6}] * 3
    result = figures.result()
    assert result["requests"] == dict.fromkeys(ARMS, 80)
    for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
        assert result["pulse"][name]["ratio"] == pytest.approx(1.1)
        assert result["twin"][name]["ratio"] == pytest.approx(0.99)
    for name in ("ttft", "itl"):
        low, high = result["pulse"][f"{name}_p50"]["interval"]
        assert 1.05 < low <= 1.1 + 1e-9
        assert 1.1 - 1e-9 <= high < 1.15
        assert result["pulse"][f"{name}_p99"]["interval"] is None, "80 requests do not bound it"
    assert result["pulse"]["throughput"]["ratio"] == pytest.approx(1 / 1.1)
    assert result["metrics"]["ttft_p50"]["ratio"] == pytest.approx(1.02)
    assert result["pulse"]["core_time"]["ratio"] == pytest.approx(1.7 / 1.6)
    assert result["core_ms_per_request"][PulseArm.PULSE] == pytest.approx(
        {"api": 1e3 * 3.3 / 80, "core": 1e3 * 1.8 / 80}
    )
    assert result["twin"]["throughput"]["range"] == pytest.approx((1 / 0.99, 1 / 0.99))


def test_a_slow_round_of_the_machine_is_one_observation() -> None:
    figures = Figures()
    figures.requests += requests_of(PulseArm.STOCK, slower=1.0)
    first = requests_of(PulseArm.PULSE, slower=2.0)[:40]
    second = requests_of(PulseArm.PULSE, slower=1.0)[40:]
    figures.requests += first + second
    low, high = figures.result()["pulse"]["ttft_mean"]["interval"]
    assert low < 1.0 < 2.0 < high


def test_an_arm_that_is_left_out_has_no_figure_and_harms_no_other() -> None:
    figures = Figures()
    for arm in (PulseArm.STOCK, PulseArm.PULSE):
        figures.requests += requests_of(arm, slower=1.0)
        figures.closed[arm] = [10.0]
    result = figures.result()
    assert result["pulse"]["throughput"]["ratio"] == 1.0
    assert result["metrics"]["throughput"] == {"ratio": None, "range": None}


def test_failures_are_counted_and_unmeasured_figures_are_null() -> None:
    figures = Figures()
    figures.requests += requests_of(PulseArm.STOCK, slower=1.0, failed=True)
    result = figures.result()
    assert result["failed"] == 80
    assert result["pulse"]["ttft_p50"] == {"ratio": None, "interval": None}
    assert result["pulse"]["throughput"] == {"ratio": None, "range": None}
    assert result["core_ms_per_request"][PulseArm.PULSE] == {}


@dataclass
class StartedParts:
    """Takes engines' commands and starts nothing."""

    paths: Any
    commands: dict[str, EngineCommand] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)

    def engine(self, name: str, command: EngineCommand, _: Mapping[str, str]) -> None:
        self.commands[name] = command
        self.running[name] = SimpleNamespace(tree=list)
        self.order.append(f"{name} starts")

    async def answers(self, name: str, url: str, on_progress: object) -> None:
        self.order.append(f"{name} answers")


def started(hardware: Hardware, folder: Path, monkeypatch: pytest.MonkeyPatch) -> StartedParts:
    monkeypatch.setattr(pulse, "installed_vllm_version", lambda: "0.26.0")
    (folder / "pages").mkdir()
    parts = StartedParts(SimpleNamespace(run=folder, pages=folder / "pages", cache=folder / "c"))
    trace = generated_trace(Bursts(), duration_s=60.0, seed=1)
    bench = pulse.PulseBench(cast(Parts, parts), trace, rounds=1, seed=1, hardware=hardware)
    asyncio.run(bench._start({"stock": 1, "pulse": 2, "twin": 3}))
    return parts


def flag(command: EngineCommand, name: str) -> str:
    return command.arguments[command.arguments.index(name) + 1]


def test_three_servers_of_a_gpu_start_one_after_another_and_fit_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = GpuMemory(total_bytes=140 << 30, free_bytes=139 << 30)
    hardware = GpuHardware(Gpu("GPU-1", ComputeMode.DEFAULT), memory)
    parts = started(hardware, tmp_path, monkeypatch)
    names = ("stock", "pulse", "twin")
    assert parts.order == [f"{name} {does}" for name in names for does in ("starts", "answers")]
    ratios = [float(flag(parts.commands[name], "--gpu-memory-utilization")) for name in names]
    assert sum(ratios) == pytest.approx(0.9)
    sizes = hardware.pulse_sizes
    for command in parts.commands.values():
        assert int(flag(command, "--max-model-len")) >= sizes.input_max + sizes.output_max
    arguments = [set(parts.commands[name].arguments) for name in ("pulse", "stock")]
    assert "coserve.vllm.middleware.PulseMiddleware" in arguments[0] - arguments[1]


def test_three_servers_of_a_cpu_start_together_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = started(CpuHardware(), tmp_path, monkeypatch)
    assert parts.order[:3] == ["stock starts", "pulse starts", "twin starts"]
    for command in parts.commands.values():
        assert flag(command, "--max-model-len") == "2048"
        assert flag(command, "--max-num-batched-tokens") == "512"


@asynccontextmanager
async def nothing_beside(*_: object, **__: object) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("observed", "arms"), [(False, ARMS), (True, (PulseArm.STOCK, PulseArm.PULSE, PulseArm.TWIN))]
)
def test_each_round_is_kept_before_the_next_one_begins(
    observed: bool, arms: tuple[PulseArm, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = SimpleNamespace(logs=tmp_path / "x.run" / "logs", pages=tmp_path)
    parts = StartedParts(paths, running=dict.fromkeys(("stock", "pulse", "twin")))
    parts.running = {name: SimpleNamespace(tree=list) for name in parts.running}
    trace = generated_trace(Bursts(), duration_s=3600.0, seed=1)
    bench = pulse.PulseBench(cast(Parts, parts), trace, rounds=2, seed=1, observed=observed)
    kept_at_replays: list[int] = []
    file = tmp_path / "x.run" / "parts.json"

    async def replay(_: object, *, arm: PulseArm, block: int, start_s: float) -> None:
        kept_at_replays.append(json.loads(file.read_text())["rounds"])
        bench.figures.requests += requests_of(arm, slower=1.0)

    async def closed(*_: object) -> int:
        return 40

    monkeypatch.setattr(pulse.PulseBench, "_closed", closed)
    monkeypatch.setattr(pulse, "_SETTLE_S", 0.0)
    monkeypatch.setattr(pulse, "_SCRAPES_S", 0.0)
    monkeypatch.setattr(pulse, "scraped", nothing_beside)
    monkeypatch.setattr(pulse, "observed", nothing_beside)
    client = SimpleNamespace(replay=replay, url="")
    bench.clients = cast(Any, dict.fromkeys(parts.running, client))
    asyncio.run(bench._rounds())
    assert kept_at_replays == [0] * len(arms) + [1] * len(arms)
    kept = json.loads(file.read_text())
    assert kept["rounds"] == 2
    assert {arm for arm, count in kept["requests"].items() if count} == {*arms}
