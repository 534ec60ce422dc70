"""The agent's settings, and what follows from them on this machine. `config_file` reads them."""

import grp
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from harvester.contracts.errors import ConfigError, NotYet
from harvester.contracts.ids import NAME_PATTERN
from harvester.contracts.page.directory import LAUNCH_DIRECTORY
from harvester.contracts.page.owners import PageOwners, uids
from harvester.contracts.wire.stops import StopOrder
from harvester.guest_config import GuestConfig
from harvester.interlock_config import InterlocksConfig, StopWord
from harvester.platform.bearer import is_loopback, read_tokens
from harvester.platform.blocking_peer import http_address
from harvester.platform.mps import DEFAULT_CONTROL, MpsControl
from harvester.platform.nvml import Nvml
from harvester.platform.tls import Credentials, ServerTls, open_to_network
from harvester.platform.yaml_file import FrozenSettings
from harvester.policy.settings import Mode, SlotSettings, more_careful

_Name = Annotated[str, Field(pattern=NAME_PATTERN)]
_Account = (
    Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
    | Annotated[str, Field(min_length=1, max_length=64)]
)
"""A user or a group, by number or name."""
MAX_SLOTS = 256
"""Largest number in one file."""
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class HttpConfig(FrozenSettings):
    """Address and token of the agent's HTTP server: leases, health and metrics."""

    host: str = "127.0.0.1"
    """A host off loopback requires a token file."""
    port: int = Field(default=9711, ge=0, le=65535)
    """0 takes a free port and prints it."""
    token_file: Path | None = None
    """Tokens, one a line, of which callers send one as `Authorization: Bearer ...`."""
    operator_token_file: Path | None = None
    """Tokens that may also stop and resume; without this file, tokens of `token_file` may. With it,
    a gateway's token lifts only orders of gateways."""
    observer_token_file: Path | None = None
    """Tokens that read status and metrics, and do nothing else even if another file has them."""
    tls: ServerTls | None = None
    """Required off loopback, unless `plain_http` says otherwise."""
    plain_http: bool = False
    """Consent to listen off loopback without TLS: a proxy or mesh in front has it."""

    @model_validator(mode="after")
    def _safe_off_loopback(self) -> "HttpConfig":
        for role in ("operator_token_file", "observer_token_file"):
            if getattr(self, role) is not None and self.token_file is None:
                raise ValueError(f"{role}: needs a token_file for the other callers")
        if fault := open_to_network(self.host, self.token_file, self.tls, self.plain_http):
            raise ValueError(fault)
        return self

    @property
    def token_files(self) -> tuple[Path | None, ...]:
        """The files of gateways, operators and observers."""
        return self.token_file, self.operator_token_file, self.observer_token_file


class MpsConfig(FrozenSettings):
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


class KvcachedConfig(FrozenSettings):
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


class OwnersConfig(FrozenSettings):
    """Users, by name or number, whose pages are believed: each kind may write its own kind of page
    only. A kind without users defaults to the agent's own user. Root is always believed."""

    agent: tuple[_Account, ...] = Field(default=(), max_length=8)
    """Users whose grants engines believe; an agent that runs as another user refuses to start."""
    production: tuple[_Account, ...] = Field(default=(), max_length=32)
    guest: tuple[_Account, ...] = Field(default=(), max_length=32)


class SlotConfig(FrozenSettings):
    """One production engine replica and the guest beside it."""

    name: _Name
    pages: Path | None = None
    """Page directory; by default the slot's name under `page_root`."""
    pulses: tuple[_Name, ...] = Field(default=(), max_length=32)
    """Pulse files that must be fresh, besides all present files (at least one) and one for each API
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
    """The guest that `rosemux guest` starts, if it does. The agent itself reads `gpus` alone."""
    stop: StopWord = StopOrder.NONE
    """Like the node's `stop`, for this slot."""
    policy: SlotSettings = SlotSettings()

    @model_validator(mode="after")
    def _one_kind_of_memory(self) -> "SlotConfig":
        if self.kvcached is not None and self.memory_group is not None:
            raise ValueError("memory_group is for CPU guests, kvcached for GPU guests: give one")
        return self

    @model_validator(mode="after")
    def _guest_within_reach(self) -> "SlotConfig":
        for field in ("engine_url", "offered_url"):
            if (url := getattr(self, field)) and http_address(url) is None:
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
        # urlsplit's `port` raises ValueError by itself for a malformed port.
        if url is not None and (urlsplit(url).port == 0 or http_address(url) is None):
            raise ValueError("use a URL such as http://HOST:PORT/metrics")
        return url

    @field_validator("pulses")
    @classmethod
    def _in_order(cls, pulses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(pulses))


def values_of_one_slot(slot: SlotConfig) -> Iterator[tuple[str, str]]:
    """Fields and values that a slot shares with no other. A gate knows the production of its own
    page directory alone: on a GPU of two slots each guest would miss one production."""
    for field in ("engine_url", "offered_url", "memory_group"):
        if value := getattr(slot, field):
            yield field, str(value).rstrip("/").replace("//localhost:", "//127.0.0.1:")
    for uuid in slot.guest.gpus if slot.guest is not None else ():
        yield "guest.gpus", uuid
    for name in (*slot.kvcached.production, slot.kvcached.guest) if slot.kvcached else ():
        yield "kvcached", name


class AgentConfig(FrozenSettings):
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
    guests: Credentials | None = None
    """Files for guests' engine proxies, to ask a guest in another pod, at its slot's `offered_url`,
    what it serves. Without it only guests on this machine's loopback are asked."""
    slots: tuple[SlotConfig, ...] = Field(default=(), max_length=2 * MAX_SLOTS)
    slots_file: Path | None = None
    """File with more `slots`, read again when it changes: `rosemux discover` writes one. Root or
    the agent's user must own it, without rights to write for others."""

    @model_validator(mode="after")
    def _distinct_slots(self) -> "AgentConfig":
        if not self.slots and self.slots_file is None:
            raise ValueError("slots: give one, or a slots_file")
        names = [slot.name for slot in self.slots]
        if len(set(names)) != len(names):
            raise ValueError("slots: every name may appear once")
        if len({self.pages_of(slot) for slot in self.slots}) != len(names):
            raise ValueError("slots: every slot needs pages of its own")
        own = {self.kill_switch, self.stop_path, self.page_root / LAUNCH_DIRECTORY}
        if taken := [slot.name for slot in self.slots if self.pages_of(slot) in own]:
            raise ValueError(f"slots: {taken[0]}: its pages are the agent's own: rename the slot")
        first: dict[tuple[str, str], str] = {}
        for slot in self.slots:
            for field, value in values_of_one_slot(slot):
                if (other := first.setdefault((field, value), slot.name)) != slot.name:
                    both = f"slots {other} and {slot.name} both have {value}"
                    raise ValueError(f"slots: {field}: {both}: each slot needs its own")
        return self

    @model_validator(mode="after")
    def _guests_token_stays_secret(self) -> "AgentConfig":
        if self.guests is not None:
            for slot in self.slots:
                if slot.offered_url and (exposed := self.guests.exposed_at(slot.offered_url)):
                    raise ValueError(f"slots: {slot.name}: offered_url: {exposed}")
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
        if not names:
            raise ConfigError(f"{self.slots_file} has no slot yet")
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

    def check_users(self) -> None:
        """Raises ConfigError if this machine lacks a user or the group."""
        _ = self.page_gid
        for slot in self.slots:
            self.owners_of(slot)

    def check_here(self) -> None:
        """Raises ConfigError if this machine lacks a user, the group or a file of `http`."""
        self.check_users()
        for path in filter(None, self.http.token_files):
            read_tokens(path)
        if self.http.tls is not None:
            self.http.tls.context()
        self.interlocks.accelerators.check()
        if self.interlocks.alerts is not None:
            self.interlocks.alerts.check()
        if self.guests is not None:
            self.guests.check()

    def check_devices(self) -> None:
        """Raises ConfigError if the interlock's NVML or its driver is not here. A sick driver may
        block: not for an agent that is beating."""
        if self.interlocks.accelerators.source == "nvml":
            Nvml()

    def settings_of(self, slot: SlotConfig) -> SlotSettings:
        return replace(slot.policy, mode=more_careful(self.mode, slot.policy.mode))
