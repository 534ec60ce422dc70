"""Rules for grants on a GPU shared through MPS. Pure functions of the readings they are given."""

from harvester.contracts.page.records import Guest
from harvester.contracts.process import ProcessId
from harvester.policy.sample import MpsReading

MPS = "mps"
"""Value of a guest's `isolation` under MPS."""


def server_fault(mps: MpsReading | None) -> str:
    """Why the slot must stay closed until an operator has looked; "" without a server fault."""
    if mps is None or not mps.server_fault:
        return ""
    return "MPS: the server that production and guest share has a fault"


def lacks_consent(mps: MpsReading | None, guest: Guest | None) -> bool:
    """Whether the guest runs under MPS without consent in the slot's configuration."""
    return mps is None and guest is not None and guest.isolation == MPS


def blocking_ratio(
    configured: float, mps: MpsReading | None, guest: tuple[ProcessId, ...]
) -> float:
    """The configured ratio if guest and production share an MPS server, else 1.0: CUDA silently
    starts a client without a daemon, and then the two take turns on the GPU."""
    return configured if mps is None or mps.shared_by(guest) else 1.0
