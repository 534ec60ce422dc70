"""Power, temperature and Xid errors of NVIDIA's GPUs through its management library, read-only.

The bindings (package nvidia-ml-py, module pynvml) are imported on first use. Xid errors come as
events: one is known from the start of the watch, and stays known until the process ends.
"""

import importlib
from contextlib import suppress
from typing import Any

from harvester.contracts.accelerator import Accelerator
from harvester.contracts.errors import ConfigError, Exhausted

_MODULE = "pynvml"
_EVENTS_MAX = 64


class Nvml:
    """Calls may block on a sick driver: make them in a thread."""

    def __init__(self) -> None:
        """Raises ConfigError without the library or a driver."""
        try:
            self._nvml: Any = importlib.import_module(_MODULE)
        except ImportError as error:
            raise ConfigError(
                f"source nvml needs the module {_MODULE}: install nvidia-ml-py, or use "
                "dcgm-exporter"
            ) from error
        self._fault: type[Exception] = self._nvml.NVMLError
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
            self._uuids = [_text(self._nvml.nvmlDeviceGetUUID(each)) for each in self._handles]
        except self._fault as error:
            raise ConfigError(f"source nvml finds no driver: {error}") from error
        self._xids: dict[str, int] = {}
        self._unread = False
        """Whether events may have been missed."""
        self._events = self._register()

    def read(self) -> tuple[Accelerator, ...]:
        """Raises Exhausted where the driver does not answer for a GPU at all."""
        self._take_events()
        return tuple(map(self._read, self._handles, self._uuids))

    def _read(self, handle: Any, uuid: str) -> Accelerator:
        nvml, power, temperature = self._nvml, None, None
        try:
            _text(nvml.nvmlDeviceGetUUID(handle))
        except self._fault as error:
            raise Exhausted(f"{uuid}: {error}") from error
        with suppress(self._fault):
            power = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        with suppress(self._fault):
            temperature = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return Accelerator(
            uuid=uuid,
            power_watts=power,
            temperature_celsius=temperature,
            xid=None if self._unread and not self._xids.get(uuid) else self._xids.get(uuid),
        )

    def _register(self) -> Any:
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        for handle, uuid in zip(self._handles, self._uuids, strict=True):
            with suppress(self._fault):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                self._xids[uuid] = 0
        return events

    def _take_events(self) -> None:
        """Takes all due events; NVML raises a time-out without one. After any other fault every
        GPU's error state is unknown."""
        try:
            for _ in range(_EVENTS_MAX):
                event = self._nvml.nvmlEventSetWait_v2(self._events, 1)
                uuid = _text(self._nvml.nvmlDeviceGetUUID(event.device))
                self._xids[uuid] = int(event.eventData)
        except self._fault as error:
            code = getattr(error, "value", None)
            self._unread = self._unread or code != self._nvml.NVML_ERROR_TIMEOUT


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
