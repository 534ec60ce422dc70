"""The gateway's settings: one YAML or JSON file, checked whole before anything starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from pydantic import AfterValidator, Field, GetCoreSchemaHandler, model_validator
from pydantic_core.core_schema import no_info_after_validator_function

from harvester.contracts.ids import NAME_PATTERN, unknown_field
from harvester.contracts.wire.rollouts import OnInterrupt
from harvester.platform.tenants import OBSERVER, OPERATOR
from harvester.platform.tls import NO_CREDENTIALS, Credentials, ServerTls, open_to_network
from harvester.platform.yaml_file import FrozenSettings, parse_fields, read_text, validated
from scheduler.gateway.policy.answered_turns import AnswerBounds
from scheduler.gateway.policy.capacity import CapacityConfig
from scheduler.gateway.policy.routing_events import RoutingConfig
from scheduler.gateway.policy.versions_events import VersionsConfig
from scheduler.gateway.requests import MAX_NUMERICS_CHARS, MAX_PIN_WAIT_S
from scheduler.model import EngineKind

Name = Annotated[str, Field(pattern=NAME_PATTERN)]


def _with_a_port(url: str) -> str:
    """Raises ValueError where it cannot be one."""
    urlsplit(url).port  # noqa: B018 - read for its check
    return url


Url = Annotated[
    str, Field(pattern=r"^https?://[A-Za-z0-9.\-_\[\]:]+$"), AfterValidator(_with_a_port)
]
Seconds = Annotated[float, Field(gt=0, le=86400)]
GUEST_ID_PREFIX = "guest."
"""A guest without an entry of its own in `engines` has this and its slot's name as its id."""
_FOLLOWED = ("answers", "max_open_bytes", "routing")
"""Fields that a running gateway takes over as they are: tenants' shares, queue and answers."""


@dataclass(frozen=True, slots=True)
class _FieldsOf:
    """The fields of a policy's configuration, in the JSON schema too."""

    kind: type[msgspec.Struct]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        found: dict[str, Any]
        (found,) = msgspec.json.schema_components((self.kind,))[1].values()
        return found

    def _check(self, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            if name not in self.kind.__struct_fields__:
                raise ValueError(f"{name}: {unknown_field(name, self.kind.__struct_fields__)}")
        msgspec.convert(given, self.kind)
        return given


class PeerSettings(Credentials):
    """A server that the gateway calls, with the files for it. They are read again when they change:
    certificates and tokens are rotated without a restart."""

    url: Url

    @model_validator(mode="after")
    def _token_stays_secret(self) -> "PeerSettings":
        if exposed := self.exposed_at(self.url):
            raise ValueError(exposed)
        return self


class EngineSettings(PeerSettings):
    """One rollout engine. Guests are found through their agents; an entry here adds to an offer,
    and its files are used at the offer's URL."""

    id: Name
    url: Url = "http://127.0.0.1:8000"
    kind: EngineKind = EngineKind.DEDICATED
    slot: Name | None = None
    """The slot of a guest, as its agent offers it; with several agents `AGENT.SLOT`."""
    concurrency: int = Field(default=32, ge=1, le=4096)
    """Turns at once."""
    numerics: str = Field(default="", max_length=MAX_NUMERICS_CHARS)
    """Key of all inputs of its log-probabilities (version, dtype, …); empty asks the engine."""

    @model_validator(mode="after")
    def _guest_has_slot(self) -> "EngineSettings":
        if (self.kind is EngineKind.GUEST) != (self.slot is not None):
            raise ValueError("a guest needs 'slot', a dedicated engine must not have it")
        return self


class AgentSettings(PeerSettings):
    """One node agent whose slots may be leased."""

    id: Name
    guests: Credentials = NO_CREDENTIALS
    """Files for the guests that it offers, unless an entry of `engines` has a guest's own."""


class RendererSettings(PeerSettings):
    @model_validator(mode="before")
    @classmethod
    def _from_url(cls, given: Any) -> Any:
        return {"url": given} if isinstance(given, str) else given


class GatewayJobSettings(FrozenSettings):
    id: Name
    tenant: Name = "default"
    harvesting: bool = True
    """Whether the job may lease slots; can be switched while running."""
    adapter: Name | None = None
    """The job's store holds LoRA adapters; engines serve its newest under this name."""
    stores: str | None = Field(default=None, min_length=1)
    """Names of the stores that it may publish, as a pattern (`job-a-*`), which other tenants may
    then not; `*`: any store under the engines' weight root, of other tenants too. Without it: all
    but those of other tenants, by the names of their jobs, their patterns and their publishes."""
    active: bool = False
    """Served from the start; otherwise the first publish of any job or an activation decides."""
    on_interrupt: OnInterrupt = OnInterrupt.CONTINUE
    """A turn that has tokens and loses its engine: `continue` elsewhere, or `return_partial`, which
    ends it at once as `abort` with the cause. A request's own value counts before this one."""


class Timeouts(FrozenSettings):
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
    pin_s: Annotated[float, Field(ge=0, le=MAX_PIN_WAIT_S)] = 60.0
    """A turn whose version pin no engine meets yet is deferred for this long, then refused (409);
    its own `wait_s` overrides this. 0 refuses at once."""
    stuck_s: Seconds = 600.0
    """A turn without a token for this long, over all attempts, ends with its tokens so far. Waits
    in which its job is paused, or has neither a permit nor a guest, are not counted."""
    rejoin_s: Seconds = 2.0
    """Time that a turn goes on after its client has gone, and that its end is kept: the client may
    ask again under the same id."""
    stage_s: Seconds = 300.0
    """A switch waits this long for dedicated engines that still prepare its version while they
    sample. Beyond it they prepare the rest while generation stands still, within `update_s`."""
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

    @property
    def shortest_silence_s(self) -> float:
        """Least silence of an engine that may move a turn, in s."""
        return min(self.stall_s, self.guest_stall_s, self.guest_tail_stall_s, self.silence_s)

    def moved_after_s(self, kind: EngineKind, *, tail: bool) -> float:
        """The silence after which a turn leaves an engine of this kind if another has room, in
        s."""
        if kind is EngineKind.DEDICATED:
            return self.stall_s
        return self.guest_tail_stall_s if tail else self.guest_stall_s


class AnswerSettings(FrozenSettings):
    """Whole answers that are kept, for clients that ask again because a connection broke."""

    keep_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """Time for which answers are kept after their clients have left; 0 keeps none."""
    turns: int = Field(default=4096, ge=1, le=1 << 20)
    """Largest number of kept turns. Beyond this bound, or the next one, the tenant that holds most
    loses its oldest answer."""
    size_bytes: int = Field(default=128 << 20, ge=1 << 10)
    """Memory of the kept turns, about."""


class GatewaySettings(FrozenSettings):
    host: str = "127.0.0.1"
    port: int = Field(default=8300, ge=0, le=65535)
    """Port; 0 takes a free one, which the line 'listening on' reports."""
    token_file: Path | None = None
    """YAML map of tenant to bearer token, or to several while one is replaced; read again when it
    changes. Needed off loopback, unless clients show certificates. `operator`: for all jobs;
    `observer`: reads status and metrics."""
    tls: ServerTls | None = None
    """The gateway's own TLS: cert_file, key_file, and client_ca_file for mutual TLS."""
    plain_http: bool = False
    """Consent to listen off loopback without TLS: a proxy or mesh in front has it."""
    engines: tuple[EngineSettings, ...] = ()
    agents: tuple[AgentSettings, ...] = ()
    renderers: tuple[RendererSettings, ...] = ()
    """Processes that render text for OpenAI's routes (`vllm launch render`), in the order in which
    they are asked; without any, the dedicated engines render. A URL alone stands for `url`."""
    jobs: tuple[GatewayJobSettings, ...] = Field(min_length=1)
    state_file: Path | None = None
    """SQLite file of durable facts; none keeps them in memory."""
    journal_dir: Path | None = None
    """Directory of recorded decisions; None records nothing."""
    journal_max_bytes: int = Field(default=64 << 20, ge=1 << 16)
    max_body_bytes: int = Field(default=16 << 20, ge=1 << 10)
    max_open_bytes: int = Field(default=1 << 30, ge=1 << 10)
    """Bodies of all requests that are served or held, together; more are refused before they are
    read. A tenant within its share, this over the number of tenants with open requests, is taken
    in any case. In memory a body of token ids takes up to eight times its bytes."""
    max_attempts: int = Field(default=8, ge=1)
    """Engines that may die under one turn before it ends as lost."""
    capacity_period_s: Seconds = 1.0
    timeouts: Timeouts = Timeouts()
    answers: AnswerSettings = AnswerSettings()
    routing: Annotated[dict[str, Any], _FieldsOf(RoutingConfig)] = Field(default={})
    """Fields of RoutingConfig."""
    capacity: Annotated[dict[str, Any], _FieldsOf(CapacityConfig)] = Field(default={})
    """Fields of CapacityConfig."""
    versions: Annotated[dict[str, Any], _FieldsOf(VersionsConfig)] = Field(default={})
    """Fields of VersionsConfig."""

    @model_validator(mode="after")
    def _consistent(self) -> "GatewaySettings":
        # A guest's address is its agent's to say.
        for what, names in (
            ("engine", [engine.id for engine in self.engines]),
            ("agent", [agent.id for agent in self.agents]),
            ("job", [job.id for job in self.jobs]),
            ("engine's url", [engine.url for engine in self.dedicated]),
            ("engine's slot", [engine.slot for engine in self.engines if engine.slot]),
            ("agent's url", [agent.url for agent in self.agents]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]} is listed twice")
        for engine in self.engines if self.agents else ():
            name = engine.id.removeprefix(GUEST_ID_PREFIX)
            # Agents name slots later: one of this name would put its guest in the engine's place.
            if name not in (engine.id, engine.slot):
                raise ValueError(
                    f"engine {engine.id} has the id of the guest on slot {name}: give the engine "
                    f"an id that does not begin with {GUEST_ID_PREFIX}"
                )
        if sum(job.active for job in self.jobs) > 1:
            raise ValueError("only one job can be active")
        if taken := {job.tenant for job in self.jobs} & {OPERATOR, OBSERVER}:
            raise ValueError(f"{min(taken)} is the name of a role; rename the tenant")
        if fault := open_to_network(self.host, self.token_file, self.tls, self.plain_http):
            raise ValueError(fault)
        if not self.engines and not self.agents:
            raise ValueError("list at least one engine or one agent")
        lease = msgspec.convert(self.capacity, CapacityConfig)
        renewed_s = lease.duration_s * lease.renew_ratio
        spare_s = lease.duration_s - renewed_s - lease.margin_s
        if self.agents and spare_s <= self.capacity_period_s:
            raise ValueError(
                f"capacity_period_s: a lease of {lease.duration_s:g} s is renewed after "
                f"{renewed_s:g} s and given up {lease.margin_s:g} s before its end: look more "
                f"often than every {spare_s:g} s, or raise capacity.duration_s"
            )
        prefixes = tuple(self.slot_prefix(agent.id) for agent in self.agents)
        for slot in (engine.slot for engine in self.engines):
            if prefixes and slot is not None and not slot.startswith(prefixes):
                raise ValueError(f"slot {slot}: with several agents it is AGENT.{slot}")
        return self

    @property
    def dedicated(self) -> tuple[EngineSettings, ...]:
        return tuple(each for each in self.engines if each.kind is EngineKind.DEDICATED)

    @property
    def routing_config(self) -> RoutingConfig:
        moved = {"moved_after_s": self.timeouts.guest_stall_s}
        return msgspec.convert(moved | self.routing, RoutingConfig)

    @property
    def answer_bounds(self) -> AnswerBounds:
        return AnswerBounds(**self.answers.model_dump())

    @property
    def versions_config(self) -> VersionsConfig:
        fewest = {"min_dedicated": int(bool(self.dedicated))}
        return msgspec.convert(fewest | self.versions, VersionsConfig)

    def slot_prefix(self, agent: str) -> str:
        """Prefix of the agent's slots' names, which equally installed nodes would share."""
        return f"{agent}." if len(self.agents) > 1 else ""

    def with_new(self, given: "GatewaySettings") -> "tuple[GatewaySettings, tuple[str, ...]]":
        """A running gateway's settings after a change, and the changed fields that need a restart.
        Bounds, and further agents beside several, need none."""
        followed = {name: getattr(given, name) for name in _FOLLOWED}
        fields = type(self).model_fields.keys() - followed.keys() - {"agents"}
        waiting = {name for name in fields if getattr(self, name) != getattr(given, name)}
        new = tuple(agent for agent in given.agents if agent not in self.agents)
        lost = any(agent not in given.agents for agent in self.agents)
        # An agent alone has its slots' names as they are, one of several has its own before them.
        if lost or (new and len(self.agents) < 2):
            waiting, new = waiting | {"agents"}, ()
        merged = self.model_copy(update={**followed, "agents": self.agents + new})
        return merged, tuple(sorted(waiting))

    def check_files(self) -> None:
        """Raises ConfigError if a file for TLS or a token to send cannot be used here."""
        if self.tls is not None:
            self.tls.context()
        guests = (agent.guests for agent in self.agents)
        for credentials in (*self.engines, *self.agents, *guests, *self.renderers):
            credentials.check()


def load_settings(path: Path) -> GatewaySettings:
    """Raises ConfigError, naming each field that is wrong with its line."""
    text = read_text(path)
    return validated(GatewaySettings, parse_fields(text, path), text, path)
