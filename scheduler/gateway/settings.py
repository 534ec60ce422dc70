"""The gateway's settings: one YAML or JSON file, checked whole before anything starts."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import NAME_PATTERN
from harvester.platform.bearer import is_loopback
from harvester.platform.yaml_file import explained, parse_fields, read_text
from scheduler.gateway.policy.capacity import CapacityConfig
from scheduler.gateway.policy.routing_events import RoutingConfig
from scheduler.gateway.policy.versions_events import VersionsConfig
from scheduler.model import EngineKind

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Url = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\-_\[\]:]+$")]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineSettings(_Settings):
    """One rollout engine. Guests are found through their agents; an entry here adds to an offer."""

    id: Name
    url: Url = "http://127.0.0.1:8000"
    kind: EngineKind = EngineKind.DEDICATED
    slot: Name | None = None
    """The slot of a guest, as its agent offers it."""
    concurrency: int = Field(default=32, ge=1, le=4096)
    """Turns at once."""
    numerics: str = Field(default="", max_length=256)
    """Key of all inputs of its log-probabilities (version, dtype, …); empty asks the engine."""

    @model_validator(mode="after")
    def _guest_has_slot(self) -> "EngineSettings":
        if (self.kind is EngineKind.GUEST) != (self.slot is not None):
            raise ValueError("a guest needs 'slot', a dedicated engine must not have it")
        return self


class AgentSettings(_Settings):
    """One node agent whose slots may be leased."""

    id: Name
    url: Url
    token_file: Path | None = None
    """Bearer token to send."""


class GatewayJobSettings(_Settings):
    id: Name
    tenant: Name = "default"
    harvesting: bool = True
    """Whether the job may lease slots; can be switched while running."""
    adapter: Name | None = None
    """The job's store holds LoRA adapters; engines serve its newest under this name."""
    active: bool = False
    """Served from the start; otherwise the first publish of any job or an activation decides."""


class Timeouts(_Settings):
    connect_s: Seconds = 2.0
    stall_s: Seconds = 2.0
    """A dedicated engine that sends no token for this long, and for three times as long as such
    engines usually take to a first one, loses the turn, if another has room. The bound doubles with
    each engine that the turn leaves so without a token, also for guests."""
    guest_stall_s: Seconds = 6.0
    """The stall limit of a guest, whose gate may be closed for good reasons."""
    guest_tail_stall_s: Seconds = 1.0
    """The stall limit of a guest while no turn waits for a place: the step's end waits for this
    turn."""
    silence_s: Seconds = 60.0
    """Longest silence of an engine under a turn, even if no other engine has room."""
    queue_s: Seconds = 60.0
    """A turn that no engine could serve for this long is refused. While engines serve its job it
    waits as long as its client does: a synchronous step asks for its whole batch at once."""
    stuck_s: Seconds = 600.0
    """A turn without a token for this long, over all attempts, ends with its tokens so far."""
    rejoin_s: Seconds = 2.0
    """Time that a turn goes on after its client has gone, and that its end is kept: the client may
    ask again under the same id."""
    update_s: Seconds = 120.0
    """Time limit of one engine's version switch."""
    publish_s: Seconds = 120.0
    """A publish waits this long for the dedicated engines."""
    health_s: Seconds = 1.0
    """Period of health checks of one engine."""
    render_s: Seconds = 60.0
    """Time limit of one call of a renderer."""
    agent_s: Seconds = 2.0
    """Time limit of one call of an agent."""

    def moved_after_s(self, kind: EngineKind, *, tail: bool) -> float:
        """The silence after which a turn leaves an engine of this kind if another has room, in
        s."""
        if kind is EngineKind.DEDICATED:
            return self.stall_s
        return self.guest_tail_stall_s if tail else self.guest_stall_s


class GatewaySettings(_Settings):
    host: str = "127.0.0.1"
    port: int = Field(default=8300, ge=0, le=65535)
    """Port; 0 takes a free one, which the line 'listening on' reports."""
    token_file: Path | None = None
    """YAML map of tenant to bearer token; needed off loopback."""
    engines: tuple[EngineSettings, ...] = ()
    agents: tuple[AgentSettings, ...] = ()
    renderers: tuple[Url, ...] = ()
    """Processes that render text for OpenAI's routes (`vllm launch render`), in the order in which
    they are asked; without any, the dedicated engines render."""
    jobs: tuple[GatewayJobSettings, ...] = Field(min_length=1)
    state_file: Path | None = None
    """SQLite file of durable facts; none keeps them in memory."""
    journal_dir: Path | None = None
    """Directory of recorded decisions; None records nothing."""
    journal_max_bytes: int = Field(default=64 << 20, ge=1 << 16)
    max_body_bytes: int = Field(default=16 << 20, ge=1 << 10)
    max_attempts: int = Field(default=8, ge=1)
    """Engines that may die under one turn before it ends as lost."""
    capacity_period_s: Seconds = 1.0
    timeouts: Timeouts = Timeouts()
    routing: dict[str, Any] = {}
    """Fields of RoutingConfig."""
    capacity: dict[str, Any] = {}
    """Fields of CapacityConfig."""
    versions: dict[str, Any] = {}
    """Fields of VersionsConfig."""

    @model_validator(mode="after")
    def _consistent(self) -> "GatewaySettings":
        for what, names in (
            ("engine", [engine.id for engine in self.engines]),
            ("agent", [agent.id for agent in self.agents]),
            ("job", [job.id for job in self.jobs]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]} is listed twice")
        if sum(job.active for job in self.jobs) > 1:
            raise ValueError("only one job can be active")
        if not self.engines and not self.agents:
            raise ValueError("list at least one engine or one agent")
        for kind, given in (
            (RoutingConfig, self.routing),
            (CapacityConfig, self.capacity),
            (VersionsConfig, self.versions),
        ):
            msgspec.convert(given, kind)
        return self


def load_settings(path: Path) -> GatewaySettings:
    """Raises ConfigError, naming each field that is wrong with its line."""
    text = read_text(path)
    try:
        settings = GatewaySettings.model_validate(parse_fields(text, path))
    except ValidationError as error:
        raise ConfigError(explained(error, text, path)) from error
    if settings.token_file is None and not is_loopback(settings.host):
        raise ConfigError(
            f"{path}: host {settings.host} is not loopback; "
            "set token_file to a YAML map of tenant to token, or listen on 127.0.0.1"
        )
    return settings
