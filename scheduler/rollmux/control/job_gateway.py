"""A job's gateway, as its phases use it: the job's two switches there, and guests that serve it.

Calls block, and each may be repeated. Switches expire unless they are renewed: a process that dies
leaves nothing behind.
"""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
from pydantic import ValidationError

from harvester.contracts.errors import UNDECODABLE, ConfigError, Exhausted, PeerProtocolError, Stale
from harvester.contracts.ids import JobId
from harvester.contracts.wire.gateway_status import GatewayEngine, GatewayFleet
from harvester.platform.blocking_peer import BlockingPeer
from harvester.platform.tls import NO_CREDENTIALS, Credentials
from scheduler.model import EngineKind
from scheduler.rollmux.permits.leased_tail import EngineSwitches

ANSWER_S: Final = 2.0
ACTIVATE_S: Final = 150.0
"""Every dedicated engine loads the job's weights meanwhile."""
REPLY_MAX_BYTES: Final = 16 << 20
_log = logging.getLogger(__name__)
_SERVING: Final = "serving"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAccess:
    """Address of a job's gateway, and credentials for it."""

    url: str
    """`https://` off loopback."""
    token_file: Path | None = None
    """Holds the tenant's bearer token, where the gateway asks for one."""
    ca_file: Path | None = None
    """Certificates to trust besides the system's."""
    cert_file: Path | None = None
    """Client certificate for a gateway that requires one."""
    key_file: Path | None = None
    """Private key of `cert_file`."""

    def of(self, job: JobId) -> "JobGateway":
        """The job's gateway. Raises ConfigError for an invalid URL or credential file."""
        files = {name: value for name, value in asdict(self).items() if name != "url"}
        try:
            return JobGateway(self.url, job, Credentials(**files))
        except (ConfigError, ValidationError) as error:
            raise ConfigError(f"gateway {self.url}: {error}") from error


class GatewayView(GatewayFleet, frozen=True):
    """A gateway's status, with what a job's phases read in it."""

    def guest_serves(self, job: JobId) -> bool:
        return self.active_job == job and any(each.state == _SERVING for each in self._guests)

    @property
    def guest_busy(self) -> bool:
        return any(each.open_turns for each in self._guests)

    @property
    def _guests(self) -> tuple[GatewayEngine, ...]:
        return tuple(each for each in self.engines.values() if each.kind == EngineKind.GUEST)

    def tokens(self, job: JobId) -> dict[EngineKind, int]:
        """Number of tokens generated so far, by kind of engine."""
        tokens = self.jobs[job].tokens if job in self.jobs else {}
        return {kind: tokens[kind] for kind in EngineKind if kind in tokens}


class JobGateway:
    """Calls raise Exhausted without an answer, PeerProtocolError if refused."""

    def __init__(self, url: str, job: JobId, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._peer = BlockingPeer.at(url, credentials, name="gateway")
        self.url = url
        self.job = job

    def view(self) -> GatewayView:
        body = self._peer.answer("/v1/status", timeout_s=ANSWER_S, most_bytes=REPLY_MAX_BYTES)
        try:
            return msgspec.json.decode(body, type=GatewayView)
        except UNDECODABLE as error:
            raise PeerProtocolError(f"status of gateway {self.url}: {error}") from error

    def switch_off(self) -> None:
        """Turns both switches off before the first permit. Raises ConfigError on refusal."""
        try:
            self.switch(EngineSwitches(dedicated=False, harvesting=False), for_s=0.0)
        except PeerProtocolError as error:
            raise ConfigError(f"job {self.job}: {error}") from error
        except (Exhausted, Stale) as error:
            _log.warning("job %s: %s", self.job, error)

    def activate(self) -> None:
        """The engines serve this job on return. Raises Stale while it has published nothing."""
        self._post("activate", None, timeout_s=ACTIVATE_S)

    def switch(self, switches: EngineSwitches, *, for_s: float) -> None:
        """Sets switches for `for_s`. Dedicated engines first: another job gets them soon."""
        for name, on in switches._asdict().items():
            body = {"enabled": True, "for_s": for_s} if on else {"enabled": False}
            self._post(name, body, timeout_s=ANSWER_S)

    def _post(self, what: str, body: object, *, timeout_s: float) -> None:
        path, data = f"/v1/jobs/{quote(self.job, safe='')}/{what}", msgspec.json.encode(body)
        self._peer.answer(path, data, timeout_s=timeout_s, most_bytes=REPLY_MAX_BYTES)
