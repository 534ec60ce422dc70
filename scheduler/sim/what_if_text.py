"""Text of a what-if's result for people."""

from collections.abc import Iterator

from scheduler.sim.what_if import GATE_SETTINGS, WhatIf


def what_if_text(found: WhatIf) -> str:
    return "\n".join(_lines(found))


def _lines(found: WhatIf) -> Iterator[str]:
    gaps = f", and {_time(found.gaps_s)} without decisions" if found.gaps_s >= 1 else ""
    yield (
        f"slot {found.slot}: {found.decisions} decisions over {_time(found.span_s)}{gaps}, "
        f"from {found.begins}"
    )
    yield "changed: " + ("; ".join(found.differing) or "nothing")
    yield _row("", "recorded", "changed", "difference")
    recorded, changed = found.recorded, found.changed
    yield _times("grantable", recorded.grantable_s, changed.grantable_s, found.span_s)
    for reason in sorted(
        recorded.closed_s.keys() | changed.closed_s.keys(),
        key=lambda one: -max(recorded.closed_s[one], changed.closed_s[one]),
    ):
        times = recorded.closed_s[reason], changed.closed_s[reason]
        yield _times(f"closed: {reason}", *times, found.span_s)
    if found.guest_tokens is None:
        yield "no tokens: the journal has no guest that stepped"
    else:
        more = f"{changed.tokens - recorded.tokens:+,.0f}"
        tokens = f"{recorded.tokens:,.0f}", f"{changed.tokens:,.0f}", more
        yield _row("guest tokens, at its recorded pace", *tokens)
    gate = {one.partition(":")[0] for one in found.differing} & GATE_SETTINGS
    if gate:
        yield (
            f"not in these figures: {', '.join(sorted(gate))} also act in the guest's own gate, "
            "whose steps a journal does not have"
        )
    yield "production's latencies are those beside the recorded grants"


def _times(name: str, recorded_s: float, changed_s: float, span_s: float) -> str:
    more_s = changed_s - recorded_s
    difference = f"{'-' if more_s < 0 else '+'}{_time(abs(more_s))}"
    return _row(name, _share(recorded_s, span_s), _share(changed_s, span_s), difference)


def _share(part_s: float, span_s: float) -> str:
    return f"{_time(part_s)} ({part_s / span_s:.1%})" if span_s else _time(part_s)


def _row(name: str, recorded: str, changed: str, difference: str) -> str:
    return f"{name:36}{recorded:>24}{changed:>24}{difference:>16}".rstrip()


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {seconds % 60:.0f} s"
    return f"{int(seconds // 3600)} h {seconds % 3600 / 60:.0f} min"
