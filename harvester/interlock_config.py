"""Configuration of the interlocks, and the words for orders to stop in a configuration file."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from pydantic import BeforeValidator, Field, field_validator, model_validator

from harvester.contracts.wire.stops import KUEUE_WORDS, StopOrder, order_of
from harvester.platform.tls import Credentials
from harvester.platform.yaml_file import FrozenSettings
from harvester.policy.interlocks import AcceleratorLimits, AlertMatcher


def _stop_order(word: Any) -> Any:
    # YAML may read Kueue's `None` and our `none` as strings; an empty value is no order.
    if isinstance(word, str) and order_of(word) is None:
        known = ", ".join([*StopOrder, *KUEUE_WORDS])
        raise ValueError(f"{word!r} is no order; use one of {known}")
    return order_of(word) if isinstance(word, str) else word


StopWord = Annotated[StopOrder, BeforeValidator(_stop_order)]
"""An order, by our word or Kueue's."""


class AlertConfig(FrozenSettings):
    """Alerts of one name, and with these labels."""

    name: str = Field(min_length=1, max_length=256)
    labels: dict[str, str] = Field(default={}, max_length=32)


class AlertsConfig(Credentials):
    """No admission while one of these alerts fires, or while that is not known."""

    url: str
    server: Literal["prometheus", "alertmanager"] = "prometheus"
    """Prometheus says whether a rule exists and is evaluated; Alertmanager heeds silences."""
    alerts: tuple[AlertConfig, ...] = Field(min_length=1, max_length=64)
    """A plain string is the alert's `name`."""
    watchdog: str = Field(default="", max_length=256)
    """An alert that always fires while alerts are raised at all; "" expects none. Alertmanager
    needs it, because it forgets the alerts of a Prometheus that is away."""
    order: StopWord = StopOrder.HOLD
    period_s: float = Field(default=5.0, ge=1.0, le=300.0)
    timeout_s: float = Field(default=2.0, ge=0.1, le=60.0)
    quiet_s: float = Field(default=60.0, ge=1.0, le=86400.0)
    """Time without the alert after which its order ends."""

    @field_validator("alerts", mode="before")
    @classmethod
    def _from_names(cls, given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return given
        return [{"name": each} if isinstance(each, str) else each for each in given]

    @model_validator(mode="after")
    def _usable(self) -> "AlertsConfig":
        if fault := _unfit_url(self.url) or self.exposed_at(self.url):
            raise ValueError(fault)
        if self.order is StopOrder.NONE:
            raise ValueError("order: use hold or drain for alerts")
        if self.server == "alertmanager" and not self.watchdog:
            raise ValueError(
                "watchdog: Alertmanager needs one: cut off from Prometheus it shows no alert either"
            )
        return self

    @property
    def matchers(self) -> tuple[AlertMatcher, ...]:
        return tuple(AlertMatcher(name=each.name, labels=each.labels) for each in self.alerts)


class AcceleratorsConfig(Credentials):
    """No admission beside an accelerator that is too hot, draws too much or has an Xid error."""

    source: Literal["nvml", "dcgm-exporter", "none"] = "none"
    url: str = ""
    """dcgm-exporter's metrics page."""
    power_watts_max: float | None = Field(default=None, gt=0, le=1e5)
    """Power limit in W; None: power is not checked. The temperature limit works alike."""
    temperature_celsius_max: float | None = Field(default=None, gt=0, le=200)
    xid: bool = True
    """Check for Xid errors."""
    xids_ignored: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = Field(
        default=(), max_length=64
    )
    """Xid errors that are an application's own, e.g. 13, 31, 43 and 45."""
    order: StopWord = StopOrder.DRAIN
    """Order while a limit is exceeded; missing data gives `hold`."""
    period_s: float = Field(default=5.0, ge=1.0, le=300.0)
    timeout_s: float = Field(default=2.0, ge=0.1, le=60.0)
    quiet_s: float = Field(default=60.0, ge=1.0, le=86400.0)

    @model_validator(mode="after")
    def _usable(self) -> "AcceleratorsConfig":
        if (self.source == "dcgm-exporter") != bool(self.url):
            raise ValueError("url: goes with source dcgm-exporter, which needs it")
        if self.url and (fault := _unfit_url(self.url) or self.exposed_at(self.url)):
            raise ValueError(fault)
        if self.order is StopOrder.NONE:
            raise ValueError("order: use hold or drain for accelerators")
        return self

    @property
    def limits(self) -> AcceleratorLimits:
        return msgspec.convert(self, AcceleratorLimits, from_attributes=True)


class InterlocksConfig(FrozenSettings):
    """Conditions of yours under which the agent stops lending by itself."""

    alerts: AlertsConfig | None = None
    accelerators: AcceleratorsConfig = AcceleratorsConfig()


def _unfit_url(url: str) -> str:
    page = urlsplit(url)
    # urlsplit's `port` raises ValueError by itself for a malformed port.
    if page.scheme not in ("http", "https") or not page.hostname or page.port == 0:
        return "url: use http://HOST:PORT"
    if "@" in page.netloc:
        # Reasons of stops name the URL, in the log, the audit and the metrics.
        return "url: no user or password in it; use token_file or a client certificate"
    return ""
