"""Faults over the real code: what recovers, and whether anything is claimed that is not there."""

from benchmarks.weightsync.faults.trials import measure

__all__ = ["measure"]
