"""Environment variables by which a stock vLLM process learns that it belongs to a slot.

Three are required; a fourth names the pages' other users, and a fifth a guest's isolation. Without
them every hook of RoseMux in this process does nothing, so a vLLM that merely has RoseMux installed
beside it behaves as stock. Imports for guests alone stay in functions: production's image may have
the observer without them (deploy/observer).
"""

import multiprocessing
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from harvester.contracts.errors import ConfigError
from harvester.contracts.page import PageDirectory
from harvester.contracts.page.directory import DIRECTORY_VARIABLE, pulse_page
from harvester.contracts.page.owners import OWN_USER, PageOwners, environment_owners
from harvester.contracts.stock_fallback import GUEST_ROLE, ROLE_VARIABLE

if TYPE_CHECKING:
    from coserve.law.work_gate import WorkGate
    from harvester.contracts.isolation import IsolationBackend

ENGINE_VARIABLE = "ROSEMUX_ENGINE"
ISOLATION_VARIABLE = "ROSEMUX_ISOLATION"
"""A guest's `IsolationBackend`; None if the variable is unset."""
SLOT_VARIABLE = "ROSEMUX_SLOT"
"""A guest's slot, which it names to gateways."""


class Role(StrEnum):
    PRODUCTION = "production"
    GUEST = GUEST_ROLE


@dataclass(frozen=True, slots=True)
class SlotEnvironment:
    role: Role
    engine: str
    directory: Path
    isolation: "IsolationBackend | None" = None
    owners: PageOwners = OWN_USER

    @property
    def process(self) -> int:
        """Index of this API-server process; vLLM names its children `ApiServer_<i>`."""
        found = re.search(r"ApiServer_(\d+)", multiprocessing.current_process().name)
        return int(found[1]) if found else 0


def slot_environment() -> SlotEnvironment | None:
    """The slot's environment; None outside a slot.

    Raises ConfigError for a half-set or wrong environment.
    """
    role = os.environ.get(ROLE_VARIABLE)
    if not role:
        return None
    if role not in tuple(Role):
        raise ConfigError(f"{ROLE_VARIABLE}={role!r}: use {' or '.join(Role)}")
    directory = os.environ.get(DIRECTORY_VARIABLE)
    # After a reboot production may start before the agent has made the directory: it does not wait.
    if not directory or (role == Role.GUEST and not Path(directory).is_dir()):
        raise ConfigError(f"{DIRECTORY_VARIABLE}={directory!r}: name the slot's page directory")
    engine = os.environ.get(ENGINE_VARIABLE, role)
    try:
        pulse_page(engine, 0)
    except ConfigError as error:
        raise ConfigError(f"{ENGINE_VARIABLE}: {error}") from error
    return SlotEnvironment(Role(role), engine, Path(directory), _isolation(), environment_owners())


def work_gate(*, on_host: bool = False) -> "WorkGate":
    """The work gate of this process's slot; see WorkGate. Raises ConfigError outside a slot."""
    from coserve.law.work_gate import WorkGate

    environment = slot_environment()
    if environment is None:
        raise ConfigError("this process belongs to no slot")
    return WorkGate(PageDirectory(environment.directory, environment.owners), on_host=on_host)


def _isolation() -> "IsolationBackend | None":
    name = os.environ.get(ISOLATION_VARIABLE)
    if not name:
        return None
    from harvester.contracts.isolation import IsolationBackend
    from harvester.platform.mps import PIPE_VARIABLE

    if name not in tuple(IsolationBackend):
        raise ConfigError(f"{ISOLATION_VARIABLE}={name!r}: use {', '.join(IsolationBackend)}")
    backend = IsolationBackend(name)
    if backend is IsolationBackend.MPS and not os.environ.get(PIPE_VARIABLE):
        raise ConfigError(
            f"{ISOLATION_VARIABLE}=mps without {PIPE_VARIABLE}: name the daemon's pipe directory, "
            "else CUDA starts without it and without a warning"
        )
    return backend
