"""Gives jobs that share nodes the round in which they take turns; for planners and operators."""

from collections.abc import Sequence

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId
from scheduler.phases.wire import Refused, Round, Transport


def give_round(transport: Transport, turns: Sequence[JobId], *, patience_s: float) -> None:
    """From now on the jobs take turns so, whatever round they were in before.

    A job stands in `turns` as often as it has turns; one job alone leaves the round that it was in.
    `patience_s` is how long free nodes are kept for whose turn it is.

    Raises ConfigError where a job is not placed or the round is none; Exhausted, PeerProtocolError.
    """
    reply = transport.call("round", Round(turns=tuple(turns), patience_s=patience_s))
    if isinstance(reply, Refused):
        raise ConfigError(f"round {' '.join(turns)}: {reply.reason}")
