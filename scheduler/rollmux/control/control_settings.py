"""Settings of a phase control, the same for a socket and for Ray."""

from dataclasses import dataclass, field
from pathlib import Path

from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.permits.terms import PermitsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    permits: PermitsConfig = field(default_factory=PermitsConfig)
    cluster: ClusterConfig | None = None
    """Nodes that the control plans on, if given; `nodes_file.read_nodes` reads them from a file."""
    state: Path | None = None
    """SQLite file of the state; without it a restart loses the state."""
    journal: Path | None = None
    """Directory for the journal of decisions; without it none are written."""
    journal_bytes: int = 64 << 20
    metrics_port: int | None = None
    """Loopback port of the metrics, on the control's machine."""
