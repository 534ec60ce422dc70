"""GPU readings through a stand-in of NVIDIA's bindings."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harvester.agent.node import NodeAgent
from harvester.cli import main
from harvester.cli.root import EXIT_SETTINGS
from harvester.config import AgentConfig
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted
from harvester.platform.nvml import Nvml


class FakeNvml(ModuleType):
    """The calls of nvidia-ml-py 12 that are used, on GPUs by number."""

    class NVMLError(Exception):
        def __init__(self, value: object) -> None:
            super().__init__(value)
            self.value = value

    NVML_ERROR_TIMEOUT = 10

    NVML_TEMPERATURE_GPU = 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - NVIDIA's name

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.gpus = [{"power": 300_000, "temperature": 60}, {"power": 310_000, "temperature": 61}]
        self.events: list[SimpleNamespace] = []
        self.unfit: set[str] = set()
        self.lost: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml"):
            return lambda *arguments: self._call(name, *arguments)
        raise AttributeError(name)

    def _call(self, name: str, *arguments: Any) -> Any:
        if name in self.unfit or (arguments and arguments[0] in self.lost):
            raise self.NVMLError(name)
        match name:
            case "nvmlDeviceGetCount":
                return len(self.gpus)
            case "nvmlDeviceGetHandleByIndex":
                return arguments[0]
            case "nvmlDeviceGetUUID":
                return f"GPU-{arguments[0]}".encode()
            case "nvmlDeviceGetPowerUsage":
                return self.gpus[arguments[0]]["power"]
            case "nvmlDeviceGetTemperature":
                return self.gpus[arguments[0]]["temperature"]
            case "nvmlEventSetWait_v2":
                if not self.events:
                    raise self.NVMLError(self.NVML_ERROR_TIMEOUT)
                return self.events.pop(0)
        return None


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_reads_watts_degrees_and_xids_that_stay(nvml: FakeNvml) -> None:
    reader = Nvml()
    first, _ = reader.read()
    assert (first.uuid, first.power_watts, first.temperature_celsius, first.xid) == (
        *("GPU-0", 300.0, 60.0),
        0,
    )
    nvml.events.append(SimpleNamespace(device=1, eventData=79))
    assert [gpu.xid for gpu in reader.read()] == [0, 79]
    assert [gpu.xid for gpu in reader.read()] == [0, 79]


def test_a_value_that_a_gpu_does_not_report_is_none(nvml: FakeNvml) -> None:
    nvml.unfit = {"nvmlDeviceGetPowerUsage", "nvmlDeviceRegisterEvents"}
    gpu, _ = Nvml().read()
    assert (gpu.power_watts, gpu.temperature_celsius, gpu.xid) == (None, 60.0, None)


def test_without_its_events_a_gpu_is_not_known_to_have_no_error(nvml: FakeNvml) -> None:
    reader = Nvml()
    nvml.events.append(SimpleNamespace(device=1, eventData=79))
    reader.read()
    nvml.unfit = {"nvmlEventSetWait_v2"}
    assert [gpu.xid for gpu in reader.read()] == [None, 79]
    nvml.unfit = set()
    assert [gpu.xid for gpu in reader.read()] == [None, 79], "what came meanwhile is lost"


def test_a_gpu_that_is_lost_later_is_no_reading(nvml: FakeNvml) -> None:
    reader = Nvml()
    nvml.lost = {1}
    with pytest.raises(Exhausted, match="GPU-1"):
        reader.read()


@pytest.mark.parametrize(
    ("module", "unfit", "says"),
    [(False, "", "install nvidia-ml-py"), (True, "nvmlInit", "no driver"), (True, "", "good")],
)
def test_a_check_of_the_configuration_opens_the_source(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nvml: FakeNvml,
    tmp_path: Path,
    module: bool,
    unfit: str,
    says: str,
) -> None:
    nvml.unfit = {unfit}
    if not module:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    file = tmp_path / "agent.yaml"
    file.write_text("slots: [{name: slot0}]\ninterlocks: {accelerators: {source: nvml}}\n")
    status: object = 0
    try:
        main(["agent", "--config", str(file), "--check-config"])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert says in said.out + said.err
    assert status == (0 if says == "good" else EXIT_SETTINGS)


def test_without_the_library_or_a_driver_the_agent_does_not_start(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, tmp_path: Any
) -> None:
    nvml.unfit = {"nvmlInit"}
    with pytest.raises(ConfigError, match="no driver"):
        Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    config = AgentConfig.model_validate(
        {
            "page_root": tmp_path / "pages",
            "state_dir": tmp_path / "state",
            "slots": [{"name": "slot0"}],
            "interlocks": {"accelerators": {"source": "nvml"}},
        }
    )
    with pytest.raises(ConfigError, match="install nvidia-ml-py"):
        NodeAgent(config, clock=MonotonicClock(), version="1")
