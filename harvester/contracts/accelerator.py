"""State of one accelerator, as NVML or dcgm-exporter report it and as interlocks judge it."""

import msgspec


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    power_watts: float | None = None
    """Power draw; in this and every later field None means not reported, as NaN does."""
    temperature_celsius: float | None = None
    xid: float | None = None
    """Last Xid error of the driver; 0 without one."""
