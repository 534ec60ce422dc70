"""Which desk a control has: one that is told every job's nodes, or one that plans them."""

from pathlib import Path

from harvester.contracts.clock import Clock
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.control.desk import JOURNAL_BYTES, PermitDesk
from scheduler.rollmux.permits.terms import PermitsConfig


def opened(
    config: PermitsConfig,
    clock: Clock,
    *,
    state: Path | None,
    journal: Path | None,
    cluster: ClusterConfig | None,
    journal_bytes: int = JOURNAL_BYTES,
) -> PermitDesk:
    """Raises ConfigError where the state file is not one of such a control."""
    if cluster is None:
        return PermitDesk(config, clock, state=state, journal=journal, journal_bytes=journal_bytes)
    # Whoever does not plan needs no compiler.
    from scheduler.rollmux.control.planning import PlanningDesk

    return PlanningDesk(
        config, cluster, clock, state=state, journal=journal, journal_bytes=journal_bytes
    )


def compile_for(cluster: ClusterConfig | None) -> None:
    """A planner's forecasts, before anybody is listened to: tens of seconds on a new machine.

    Who connects to a control that is there and does not answer gives its permit up in the end;
    who finds none goes on.
    """
    if cluster is not None:
        from scheduler.rollmux.cluster.rehearsal import rehearse

        rehearse(cluster)
