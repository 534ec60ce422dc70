"""The agent's configuration: flags over environment over file over defaults.

A file is YAML. A variable is `ROSEMUX_AGENT_` and the field's path in capitals with `__` for a dot,
such as `ROSEMUX_AGENT_HTTP__PORT`. Every mistake is a ConfigError that names the field and, if the
value came from the file, its line. Valid but odd values (a variable over the file, an experiment,
an SLO that dashboards cannot count) are notes, to be logged.
"""

import grp
import os
import re
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from harvester.contracts.errors import ConfigError, NotYet
from harvester.contracts.ids import NAME_PATTERN
from harvester.contracts.page.directory import LAUNCH_DIRECTORY
from harvester.contracts.page.owners import PageOwners, uids
from harvester.contracts.wire.stops import StopOrder
from harvester.interlock_config import InterlocksConfig, StopWord
from harvester.platform.bearer import is_loopback, read_tokens
from harvester.platform.mps import DEFAULT_CONTROL, MpsControl
from harvester.platform.tls import ServerTls, open_to_network
from harvester.platform.yaml_file import (
    Where,
    named,
    parse_fields,
    parse_value,
    read_text,
    validated,
)
from harvester.policy.bounds import Range, beyond, slo_warnings
from harvester.policy.settings import Mode, SlotSettings, more_careful

ENVIRONMENT_PREFIX = "ROSEMUX_AGENT_"
_Name = Annotated[str, Field(pattern=NAME_PATTERN)]
_Account = (
    Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
    | Annotated[str, Field(min_length=1, max_length=64)]
)
"""A user or a group, by number or name."""
_LEASE_TTL_S = Range(1.0, 300.0, "s", "a holder that falls silent keeps the slot for as long")
_SERVICE_LINK = re.compile(
    r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
_LINKED = re.compile(r"(tcp|udp|sctp)://")
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class HttpConfig(_Model):
    """Address and token of the agent's HTTP server: leases, health and metrics."""

    host: str = "127.0.0.1"
    """A host off loopback requires a token file."""
    port: int = Field(default=9711, ge=0, le=65535)
    """0 takes a free port and prints it."""
    token_file: Path | None = None
    """Tokens, one a line, of which callers send one as `Authorization: Bearer ...`."""
    operator_token_file: Path | None = None
    """Tokens that may also stop and resume; without it those of `token_file` may. A gateway's token
    then lifts only what gateways ordered."""
    tls: ServerTls | None = None
    """Required off loopback, unless `plain_http` says otherwise."""
    plain_http: bool = False
    """Consent to listen off loopback without TLS: a proxy or mesh in front has it."""

    @model_validator(mode="after")
    def _safe_off_loopback(self) -> "HttpConfig":
        if self.operator_token_file is not None and self.token_file is None:
            raise ValueError("operator_token_file: needs a token_file for the other callers")
        if fault := open_to_network(self.host, self.token_file, self.tls, self.plain_http):
            raise ValueError(fault)
        return self


class MpsConfig(_Model):
    """Consent to NVIDIA's Multi-Process Service: one daemon and server for production and guest.

    It shares their fate: a fault of the guest ends production as well.
    """

    pipe_directory: Path
    """The daemon's CUDA_MPS_PIPE_DIRECTORY; production must have been started with it too."""
    control: str = Field(default=DEFAULT_CONTROL, min_length=1)
    look_s: float = Field(default=5.0, ge=0.1, le=600)
    """Seconds between two questions to the daemon for its clients."""
    timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Seconds without a reply after which the daemon counts as absent."""

    @property
    def daemon(self) -> MpsControl:
        return MpsControl(self.pipe_directory, self.control, self.timeout_s)

    @field_validator("pipe_directory")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError("pipe_directory must be an absolute path")
        return path


class KvcachedConfig(_Model):
    """Consent level `memory`: kvcached in production too, so that KV is shared page by page."""

    production: tuple[str, ...] = Field(min_length=1, max_length=32)
    """KVCACHED_IPC_NAME of each production engine on the slot."""
    guest: str
    """KVCACHED_IPC_NAME of the guest."""
    total_bytes: int = Field(gt=0, le=1 << 50)
    """KV that all may map together on one GPU; production's other memory is not included."""

    @model_validator(mode="after")
    def _segment_names(self) -> "KvcachedConfig":
        names = (*self.production, self.guest)
        for name in names:
            # kvcached itself puts `-` in the place of every other character.
            if not _SEGMENT.fullmatch(name):
                raise ValueError(f"{name!r}: use 1 to 64 letters, digits, '_' and '-'")
        if len(set(names)) != len(names):
            raise ValueError("every engine needs a KVCACHED_IPC_NAME of its own")
        return self


_ON_LOOPBACK = (
    "the guest listens on 127.0.0.1 alone, since its development routes let any caller change its "
    "weights; serve it to others with `rosemux engine-proxy`, at the slot's offered_url"
)
_NEEDED = "RoseMux sets it, and a guest without it is not held back; leave it out"
OWN_FLAGS = {
    "host": _ON_LOOPBACK,
    "uds": _ON_LOOPBACK,
    "port": "set the port of the slot's engine_url",
    "config": "a file could name any flag; write its flags here",
    "model": "set guest.model",
    "max-model-len": "set guest.context_tokens",
    "max-num-seqs": "set the slot's concurrency",
    "kv-cache-memory-bytes": "set guest.kv_cache_bytes",
    "gpu-memory-utilization": "set guest.kv_cache_bytes",
    "scheduler-cls": _NEEDED,
    "worker-extension-cls": _NEEDED,
    "weight-transfer-config": _NEEDED,
}
"""Flags of vLLM that a guest's `arguments` may not have, and the remedy."""


class GuestConfig(_Model):
    """The guest engine that `rosemux guest` starts on the slot. The agent reads none of it."""

    model: Path
    """Directory of the model's configuration and tokenizer; weights come from the store."""
    weights: Path
    """Directory of the weight stores."""
    context_tokens: int = Field(gt=0, le=1 << 30)
    """Longest turn, prompt and answer together."""
    kv_cache_bytes: int = Field(gt=0, le=1 << 50)
    """KV cache on each GPU, or, on a CPU, in whole GiB. Fixed, never profiled from free memory."""
    gpus: tuple[str, ...] = Field(default=(), max_length=64)
    """UUIDs of the slot's GPUs; optional if the machine has at most one."""
    isolation: Literal["idle-group", "idle", "time-slicing", "mps", "none"] | None = None
    """Defaults to the best backend that needs no consent. `mps` also needs the slot's `mps`."""
    active_thread_percentage: float = Field(default=100.0, gt=0, le=100)
    """Under MPS: largest share of a GPU's multiprocessors that the guest may use."""
    sleeps: bool = False
    """Move the weights to pinned host memory of the same size while the guest sleeps."""
    eager: bool = False
    """Without CUDA graphs: slower steps, less memory."""
    arguments: tuple[str, ...] = Field(default=(), max_length=256)
    """More flags of vLLM, placed after RoseMux's own; those of `OWN_FLAGS` are refused."""

    @field_validator("arguments")
    @classmethod
    def _not_our_own(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for argument in arguments:
            if argument.startswith("--"):
                # vLLM takes `_` for `-`, any unambiguous beginning, and fields behind a dot.
                flag = re.split("[=.]", argument[2:].replace("_", "-"), maxsplit=1)[0]
                for own, remedy in OWN_FLAGS.items():
                    if own.startswith(flag):
                        raise ValueError(f"{argument}: {remedy}")
        return arguments


class OwnersConfig(_Model):
    """Users, by name or number, whose pages are believed: each kind may write its own kind of page
    only. A kind without users defaults to the agent's own user. Root is always believed."""

    agent: tuple[_Account, ...] = Field(default=(), max_length=8)
    """Users whose grants engines believe; an agent that runs as another user refuses to start."""
    production: tuple[_Account, ...] = Field(default=(), max_length=32)
    guest: tuple[_Account, ...] = Field(default=(), max_length=32)


class SlotConfig(_Model):
    """One production engine replica and the guest beside it."""

    name: _Name
    pages: Path | None = None
    """Page directory; by default the slot's name under `page_root`."""
    pulses: tuple[_Name, ...] = Field(default=(), max_length=32)
    """Pulse files that must be fresh, besides those present, at least one, and one for each API
    server that an engine announces."""
    owners: OwnersConfig | None = None
    """Replaces the node's owners if this slot's engines run as other users."""
    engine_url: str = ""
    """Base URL of the guest on this machine; lease holders use it too, unless there is another."""
    offered_url: str = ""
    """Base URL at which lease holders on other machines reach the guest: its engine proxy's."""
    model: str = ""
    service: str = Field(default="", max_length=256)
    """Service whose error budget the slot shares with all slots of this name, on any node; by
    default `model`, without one the slot's own name."""
    concurrency: int = Field(default=16, ge=1, le=1 << 16)
    kv_tokens: int = Field(default=0, ge=0, le=1 << 40)
    memory_group: Path | None = None
    """Directory of the control group that production and guest share: its limit is their budget."""
    kvcached: KvcachedConfig | None = None
    """Consent level `memory` on a GPU; excludes `memory_group`."""
    metrics_url: str | None = None
    """vLLM's /metrics. Consent level `metrics`: the slot is observed and never opened."""
    mps: MpsConfig | None = None
    """Consent level `mps`. Without it a guest that runs under MPS gets no grant."""
    guest: GuestConfig | None = None
    """Used by `rosemux guest` only; a guest may also be started by other means."""
    stop: StopWord = StopOrder.NONE
    """As the node's `stop`, for this slot."""
    policy: SlotSettings = SlotSettings()

    @model_validator(mode="after")
    def _one_kind_of_memory(self) -> "SlotConfig":
        if self.kvcached is not None and self.memory_group is not None:
            raise ValueError("memory_group is for CPU guests, kvcached for GPU guests: give one")
        return self

    @model_validator(mode="after")
    def _guest_within_reach(self) -> "SlotConfig":
        for field in ("engine_url", "offered_url"):
            url = urlsplit(getattr(self, field))
            if getattr(self, field) and not (url.scheme in ("http", "https") and url.hostname):
                raise ValueError(f"{field}: use http://HOST:PORT")
        host = urlsplit(self.engine_url).hostname
        if self.guest is not None and host is not None and not is_loopback(host):
            raise ValueError(
                f"engine_url: {host} is not served, as `rosemux guest` listens on 127.0.0.1 alone: "
                f"write http://127.0.0.1:PORT, and the URL of its `rosemux engine-proxy` (which "
                "may listen on that address) as offered_url"
            )
        return self

    @field_validator("metrics_url")
    @classmethod
    def _page_of_metrics(cls, url: str | None) -> str | None:
        if url is not None:
            page = urlsplit(url)
            # urlsplit's `port` raises ValueError by itself for a malformed port.
            if page.scheme not in ("http", "https") or not page.hostname or page.port == 0:
                raise ValueError("use http://HOST:PORT/metrics")
        return url

    @field_validator("pulses")
    @classmethod
    def _in_order(cls, pulses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(pulses))


class AgentConfig(_Model):
    """One node."""

    node: _Name = "node-0"
    mode: Mode = Mode.OBSERVE
    """off, observe (decide and journal, grant nothing) or harvest."""
    page_root: Path = Path("/dev/shm/rosemux")
    """Must be owned by the agent's user or root."""
    owners: OwnersConfig = OwnersConfig()
    """Users of agent, production and guest, if they differ."""
    page_group: _Account | None = None
    """Group of those users, by name or number: its members may put pages into a slot's directory,
    and others cannot enter it. Default: the agent's user alone."""
    state_dir: Path = Path("/var/lib/rosemux")
    """Directory of the audit, the journals and the state files."""
    journal_max_bytes: int = Field(default=64 << 20, ge=1 << 16, le=1 << 40)
    """Bound on disk for each slot's journal, in bytes."""
    audit_max_bytes: int = Field(default=256 << 20, ge=1 << 20, le=1 << 40)
    """Bound on disk for the node's audit, in bytes."""
    audit_max_days: float = Field(default=90.0, ge=1, le=3650)
    """Days after which an audit's file is removed."""
    kill_switch_file: Path | None = None
    """`hold` or `drain`; by default `kill` under `page_root`. Anything but `hold` drains."""
    stop: StopWord = StopOrder.NONE
    """none, hold or drain (Kueue's None, Hold, HoldAndDrain): the order that this file gives."""
    stop_file: Path | None = None
    """`hold` or `drain`, and a reason; by default `stop` under `page_root`. Any other word
    drains."""
    lease_ttl_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    tenants: tuple[str, ...] = ()
    """Tenants that get a metric label of their own; all others share `other`."""
    unsafe_experiments: bool = False
    """Admit settings beyond the ranges that protect production: another project's law, no law at
    all, a longer grant. For measurements on machines without production traffic."""
    http: HttpConfig = HttpConfig()
    interlocks: InterlocksConfig = InterlocksConfig()
    slots: tuple[SlotConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct_slots(self) -> "AgentConfig":
        names = [slot.name for slot in self.slots]
        if len(set(names)) != len(names):
            raise ValueError("slots: every name may appear once")
        if len({self.pages_of(slot) for slot in self.slots}) != len(names):
            raise ValueError("slots: every slot needs pages of its own")
        own = {self.kill_switch, self.stop_path, self.page_root / LAUNCH_DIRECTORY}
        if taken := [slot.name for slot in self.slots if self.pages_of(slot) in own]:
            raise ValueError(f"slots: {taken[0]}: its pages are the agent's own: rename the slot")
        return self

    @property
    def kill_switch(self) -> Path:
        return self.kill_switch_file or self.page_root / "kill"

    @property
    def audit_file(self) -> Path:
        """Current file of the node's audit; a slot's files have other endings."""
        return self.state_dir / "audit.jsonl"

    @property
    def stop_path(self) -> Path:
        return self.stop_file or self.page_root / "stop"

    def pages_of(self, slot: SlotConfig) -> Path:
        return slot.pages or self.page_root / slot.name

    def file_of(self, slot: SlotConfig, kind: str) -> Path:
        """A slot's file in `state_dir`: `journal`, `state`, `lease`, `lifted` or `release`."""
        return self.state_dir / f"{slot.name}.{kind}"

    def slot_named(self, name: str | None) -> SlotConfig:
        """The slot of a command's `--slot`; None: the only one. Raises ConfigError."""
        names = [slot.name for slot in self.slots]
        if name is None and len(names) > 1:
            raise ConfigError(f"--slot: choose one of {', '.join(names)}")
        if name is not None and name not in names:
            raise ConfigError(f"--slot {name}: the file has {', '.join(names)}")
        return next(slot for slot in self.slots if name in {None, slot.name})

    def owners_of(self, slot: SlotConfig) -> PageOwners:
        """Uids that may write each kind of page. Raises ConfigError if a user is unknown here, or
        if pages of several users lack a `page_group`.
        """
        named = slot.owners or self.owners
        agent, production, guest = (
            uids(getattr(named, kind), what=kind) for kind in ("agent", "production", "guest")
        )
        own = agent or frozenset((os.geteuid(),))
        if slot.metrics_url is not None and production:
            production |= own  # The agent itself writes what the scrape says.
        if (production | guest) - own - {0} and self.page_group is None:
            raise ConfigError(
                "page_group: name a group of the users in owners, so that they can put their pages "
                "into the slots' directories and no other user can"
            )
        return PageOwners(agent=agent, production=production, guest=guest)

    @property
    def page_gid(self) -> int | None:
        """Group id of `page_group`, None without one. Raises NotYet for an unknown group."""
        group = self.page_group
        if isinstance(group, str) and not group.isdecimal():
            try:
                return grp.getgrnam(group).gr_gid
            except KeyError:
                raise NotYet(
                    f"page_group: there is no group {group!r} here; make it, or give its number"
                ) from None
        return None if group is None else int(group)

    def check_here(self) -> None:
        """Raises ConfigError if this machine lacks a user, the group or a file of `http`."""
        _ = self.page_gid
        for slot in self.slots:
            self.owners_of(slot)
        for path in filter(None, (self.http.token_file, self.http.operator_token_file)):
            read_tokens(path)
        if self.http.tls is not None:
            self.http.tls.context()
        self.interlocks.accelerators.check()
        if self.interlocks.alerts is not None:
            self.interlocks.alerts.check()

    def settings_of(self, slot: SlotConfig) -> SlotSettings:
        return replace(slot.policy, mode=more_careful(self.mode, slot.policy.mode))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    config: AgentConfig
    notes: tuple[str, ...] = ()
    """Warnings about a configuration that is valid."""


def load_agent_config(
    path: Path | None,
    *,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AgentConfig:
    """`read_agent_config` without its notes."""
    return read_agent_config(path, flags=flags, environment=environment).config


def read_agent_config(
    path: Path | None,
    *,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """`flags` maps dotted field paths to values. Raises ConfigError."""
    text = "" if path is None else read_text(path)
    in_file = parse_fields(text, path)
    values = dict(in_file)
    notes = []
    for name, value in sorted((os.environ if environment is None else environment).items()):
        if name.startswith(ENVIRONMENT_PREFIX) and not _is_service_link(name, value):
            where = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            given, was = _parse_variable(name, value), _in(in_file, where)
            _put(values, where, given, origin=name)
            if was not in (_ABSENT, given):
                notes.append(f"variable {name} gives {given} over {was} in {path}")
    for dotted, value in (flags or {}).items():
        _put(values, dotted.split("."), value, origin=f"flag {dotted}")
    config = validated(AgentConfig, values, text, path)

    def say(found: Iterator[tuple[Where, str]]) -> list[str]:
        return [named(where, note, text, path) for where, note in found]

    mistakes, unsafe = say(_booleans(values, config, ())), say(_unsafe(config))
    if unsafe and not config.unsafe_experiments:
        mistakes += [*unsafe, "only experiments go beyond (unsafe_experiments)"]
    if mistakes:
        raise ConfigError("; ".join(mistakes))
    if config.unsafe_experiments:
        notes += [f"unsafe_experiments: {note}" for note in unsafe or ["nothing needs it"]]
    return LoadedConfig(config=config, notes=(*notes, *say(_odd_slos(config))))


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes put it there, for a Service that is named `rosemux-agent` or begins so."""
    return "__" not in name and bool(
        _SERVICE_LINK.search(name) or (name.endswith("_PORT") and _LINKED.match(value))
    )


def _unsafe(config: AgentConfig) -> Iterator[tuple[Where, str]]:
    """Path and fault of each setting that only an experiment may have."""
    if fault := _LEASE_TTL_S.fault(config.lease_ttl_s):
        yield ("lease_ttl_s",), fault
    for number, slot in enumerate(config.slots):
        for path, fault in beyond(slot.policy):
            yield ("slots", number, "policy", *path), fault


def _odd_slos(config: AgentConfig) -> Iterator[tuple[Where, str]]:
    for number, slot in enumerate(config.slots):
        policy = slot.policy
        for name, note in slo_warnings(ttft_slo_s=policy.ttft_slo_s, itl_slo_s=policy.itl_slo_s):
            yield ("slots", number, "policy", name), note


def _booleans(given: Any, taken: Any, where: Where) -> Iterator[tuple[Where, str]]:
    """Paths at which `true` or `false` was given and taken for the number 1 or 0."""
    if isinstance(given, dict):
        for name, value in given.items():
            yield from _booleans(value, getattr(taken, name, None), (*where, name))
    elif isinstance(given, list) and isinstance(taken, tuple):
        for number, (value, kept) in enumerate(zip(given, taken, strict=False)):
            yield from _booleans(value, kept, (*where, number))
    elif isinstance(given, bool) and not isinstance(taken, bool) and taken is not None:
        yield where, f"{str(given).lower()} is no number"


_ABSENT = object()


def _in(values: Any, where: list[str]) -> Any:
    """Value at a field's path, or _ABSENT."""
    for step in where:
        if isinstance(values, list) and step.isdigit() and int(step) < len(values):
            values = values[int(step)]
        elif isinstance(values, dict) and step in values:
            values = values[step]
        else:
            return _ABSENT
    return values


def _parse_variable(name: str, value: str) -> Any:
    try:
        return parse_value(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not a YAML value") from error


def _put(values: dict[str, Any], where: list[str], value: Any, *, origin: str) -> None:
    node: Any = values
    for position, step in enumerate(where):
        last = position == len(where) - 1
        key: Any = int(step) if isinstance(node, list) and step.isdigit() else step
        if isinstance(node, list) and not (isinstance(key, int) and key < len(node)):
            raise ConfigError(f"{origin}: {step!r} is not an item of the list")
        if not isinstance(node, dict | list):
            raise ConfigError(f"{origin}: {'.'.join(where[:position])} has no fields")
        if last:
            node[key] = value
        else:
            # A copy: YAML's aliases make one mapping stand in several places.
            child = node.get(key, {}) if isinstance(node, dict) else node[key]
            node[key] = copy(child)
            node = node[key]
