"""Moved turns beside unmoved ones: equal or not, and by how little the first token differs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import binomtest

from scheduler.gateway.policy.turn import Turn

_MOVED_SHARE = 0.8
"""Least share of planned moves. Moves of a whole reply fall on times, and some after its end; two
moves within tokens that are read together count as one."""
TIE_NATS = 1e-3
"""Two best candidates this close are decided by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTurns:
    setting: str
    tokens: int
    moves: int
    """Attempts that went on where one was cut, on the other engine or the same."""
    engine_changes: int
    """Counted by the moved turn's spans."""
    planned_moves: int
    identical: bool
    """Ids, finish reason and stop reason."""
    first_difference: int | None
    gap_nats: float | None
    """Between the two best candidates of the unmoved turn at the first difference."""
    ends: tuple[str, str]

    @classmethod
    def of(cls, setting: str, still: Turn, moved: Turn, *, planned_moves: int) -> "ComparedTurns":
        pairs = zip(still.token_ids, moved.token_ids, strict=False)
        first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if first is None and len(still.token_ids) != len(moved.token_ids):
            first = min(len(still.token_ids), len(moved.token_ids))
        ends = (_end(still), _end(moved))
        return cls(
            setting=setting,
            tokens=len(still.token_ids),
            moves=moved.attempts - 1,
            engine_changes=max(0, len(moved.choice().spans) - 1),
            planned_moves=planned_moves,
            identical=first is None and ends[0] == ends[1],
            first_difference=first,
            gap_nats=None if first is None else _gap(still, first),
            ends=ends,
        )

    @property
    def tie(self) -> bool:
        return self.gap_nats is not None and self.gap_nats < TIE_NATS


def _end(turn: Turn) -> str:
    return f"{turn.finish_reason} {turn.stop_reason!r} {turn.fault}".strip()


def _gap(turn: Turn, at: int) -> float | None:
    if at >= len(turn.logprobs):
        return None
    best = sorted((each.logprob for each in turn.logprobs[at].top_logprobs), reverse=True)
    return best[0] - best[1] if len(best) > 1 else None


def summary(pairs: Sequence[ComparedTurns]) -> dict[str, Any]:
    """`identical_share` counts turns that changed their engine; others are `unmoved`."""
    moved = [pair for pair in pairs if pair.engine_changes]
    settings = sorted({pair.setting for pair in pairs})
    return {
        "turns": len(moved),
        "unmoved": len(pairs) - len(moved),
        "moves": sum(pair.moves for pair in pairs),
        "engine_changes": sum(pair.engine_changes for pair in moved),
        "planned_moves": sum(pair.planned_moves for pair in pairs),
        "identical_share": _share(moved),
        "identical_share_at_least": _least_share(moved),
        "differing": [
            {
                "setting": pair.setting,
                "at": pair.first_difference,
                "of": pair.tokens,
                "gap_nats": pair.gap_nats,
                "tie": pair.tie,
                "ends": pair.ends,
            }
            for pair in moved
            if not pair.identical
        ],
        "settings": {
            name: {
                "turns": len(own := [pair for pair in moved if pair.setting == name]),
                "identical_share": _share(own),
                "tokens": sum(pair.tokens for pair in own),
            }
            for name in settings
        },
    }


def differing(found: Mapping[str, Any]) -> dict[str, Any]:
    """Reasons for which a run convicts: moved turns that differ by more than a tie, or few moves of
    those that were planned; seeded turns that left at one token and differ, or none; an adapter
    that changes nothing."""
    faults: dict[str, Any] = {}
    for name, part in (("differing", found), ("lora", found["lora"])):
        unlike = [each for each in part["differing"] if not each["tie"]]
        few = part["moves"] < _MOVED_SHARE * part["planned_moves"] or not part["turns"]
        if unlike or few:
            faults[name] = unlike or f"{part['moves']} of {part['planned_moves']} moves"
    seeded = found["seeded"]
    alike = min(seeded["equal_to_each_other"], seeded["equal_up_to_the_move"])
    if alike < seeded["turns"] or seeded["turns"] < _MOVED_SHARE * found["turns_each"]:
        faults["seeded"] = seeded
    if not found["lora"]["unlike_base"]:
        faults["unlike_base"] = 0
    return faults


def _least_share(pairs: Sequence[ComparedTurns]) -> float | None:
    """The lower end of the exact 95 % interval of the share."""
    if not pairs:
        return None
    identical = sum(pair.identical for pair in pairs)
    return float(binomtest(identical, len(pairs)).proportion_ci().low)


def _share(pairs: Sequence[ComparedTurns]) -> float | None:
    return sum(pair.identical for pair in pairs) / len(pairs) if pairs else None
