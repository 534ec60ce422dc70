"""The row of guests on GPUs: what bounds their steps, and what they hold."""

from grafana_foundation_sdk.builders.timeseries import Panel as Lines

from deploy.grafana.panels import BYTES, COUNT, RATIO, lines
from deploy.grafana.queries import PLACE, SLOT, latest


def gpu_guests() -> tuple[Lines, ...]:
    """Is it what the operator agreed to?"""
    return (
        lines(
            "Isolation of the guest",
            "1 for what each guest says that bounds its steps. Holds: 0 where the guest sees that "
            "it does not; its steps count whole then.",
            COUNT,
            (latest("harvester_guest_isolation_holds", SLOT), "{{node}} {{slot}} holds"),
            (
                latest("harvester_guest_isolation", SLOT, f"{PLACE}, backend"),
                "{{node}} {{slot}} {{backend}}",
            ),
        ),
        lines(
            "MPS",
            "By consent only. Apart: the two take turns, whatever was configured. Fault: also "
            "production must start anew.",
            COUNT,
            (latest("harvester_mps_state", SLOT, f"{PLACE}, state"), "{{node}} {{slot}} {{state}}"),
        ),
        lines(
            "Share of a guest step that production waits for",
            "Configured, in force, and observed at the P99.",
            RATIO,
            (
                latest("harvester_blocking_ratio", SLOT, f"{PLACE}, kind"),
                "{{node}} {{slot}} {{kind}}",
            ),
        ),
        lines(
            "What the guest holds of the accelerator",
            "All but kv stays while its gate is closed.",
            BYTES,
            (
                latest("harvester_guest_memory_bytes", SLOT, f"{PLACE}, part"),
                "{{node}} {{slot}} {{part}}",
            ),
        ),
        lines(
            "Memory shared with production",
            "Of the control group, or of the KV by pages: at nine tenths of the limit the guest's "
            "budget is halved.",
            BYTES,
            (
                latest("harvester_shared_memory_bytes", SLOT, f"{PLACE}, part"),
                "{{node}} {{slot}} {{part}}",
            ),
        ),
        lines(
            "Weights asleep",
            "1 while the guest's weights are in host memory.",
            COUNT,
            (latest("harvester_guest_weights_away", SLOT), "{{node}} {{slot}}"),
        ),
        lines(
            "Held asleep over what may stay",
            "Above 1 a sleeping guest holds more than it declared; 0: it is awake.",
            RATIO,
            (_held_asleep(), "{{node}} {{slot}}"),
        ),
    )


def _held_asleep() -> str:
    parts = latest("harvester_guest_memory_bytes", f'{SLOT}, part!="kv"', f"{PLACE}, part")
    held = f"sum by ({PLACE}) ({parts})"
    bound = latest("harvester_guest_asleep_bytes_max", SLOT)
    return f"{held} / {bound} * {latest('harvester_guest_weights_away', SLOT)}"
