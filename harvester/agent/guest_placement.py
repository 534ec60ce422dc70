"""Whether a guest is on the GPUs of the production whose pages its gate reads.

On another GPU its steps would delay a production that no gate of it knows: as where a pod of
production has a successor on another GPU while the guest runs on.
"""

from collections.abc import Collection

from harvester.contracts.page import PageDirectory, stated_gpus
from harvester.policy.sample import MAX_PULSES


def misplacement(
    gpus: Collection[str], pages: PageDirectory, required: Collection[str] = ()
) -> str:
    """Why a guest must not run on these GPUs, by UUID; "" if it may, or if production states no
    GPUs. `required`: names of pulses that production has, besides those present.

    While one pulse is silent its engine's GPUs are not known, and the gate is closed.
    """
    names = {*pages.pulse_names(), *required}
    pulses = pages.pulses(most=MAX_PULSES)
    if len(pulses) < len(names):
        return ""
    used = stated_gpus(pulses)
    others = [uuid for uuid in gpus if used and uuid not in used]
    if not others:
        return ""
    return (
        f"the guest would be on {', '.join(others)}, and production runs on {', '.join(used)}: "
        "name those in guest.gpus, or leave it to discovery, which follows"
    )
