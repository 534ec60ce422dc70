"""What sharing a GPU through MPS changes in what a slot may grant. It is told, and asks nothing."""

from harvester.contracts.page.records import Guest
from harvester.contracts.process import ProcessId
from harvester.policy.sample import MpsReading

MPS = "mps"
"""Of a guest's `isolation`."""


def server_fault(mps: MpsReading | None) -> str:
    """Why nothing may run on this slot until an operator has looked; "" where it may."""
    if mps is None or not mps.server_fault:
        return ""
    return "MPS: the server that production and guest share has a fault"


def lacks_consent(mps: MpsReading | None, guest: Guest | None) -> bool:
    """The guest was started under MPS, and the slot's configuration does not say so."""
    return mps is None and guest is not None and guest.isolation == MPS


def blocking_ratio(
    configured: float, mps: MpsReading | None, guest: tuple[ProcessId, ...]
) -> float:
    """What is configured for MPS holds while both are seen on one server: CUDA starts a client
    without a daemon silently, and then the two take turns on the GPU."""
    return configured if mps is None or mps.shared_by(guest) else 1.0
