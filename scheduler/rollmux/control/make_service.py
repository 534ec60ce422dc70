"""Chooses a control's service: one that plans every job's nodes, or one that is given them."""

from pathlib import Path

from harvester.contracts.clock import Clock
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.control.phase_service import JOURNAL_BYTES, PhaseService
from scheduler.rollmux.permits.terms import PermitsConfig


def make_service(
    config: PermitsConfig,
    clock: Clock,
    *,
    state: Path | None,
    journal: Path | None,
    cluster: ClusterConfig | None,
    journal_bytes: int = JOURNAL_BYTES,
) -> PhaseService:
    """Raises ConfigError if the state file belongs to another kind of control."""
    if cluster is None:
        return PhaseService(
            config, clock, state=state, journal=journal, journal_bytes=journal_bytes
        )
    # A control without a plan needs no compiler.
    from scheduler.rollmux.control.planning import PlanningService

    return PlanningService(
        config, cluster, clock, state=state, journal=journal, journal_bytes=journal_bytes
    )


def compile_for(cluster: ClusterConfig | None) -> None:
    """Compiles a planner's forecasts before the first call: tens of seconds on a new machine.

    A client of a present but silent control gives its permit up in the end; a client of an absent
    control goes on.
    """
    if cluster is not None:
        from scheduler.rollmux.cluster.compile_ahead import compile_forecasts

        compile_forecasts(cluster)
