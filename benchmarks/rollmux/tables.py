"""Figures for the README, as Markdown: `python -m benchmarks.rollmux.tables RESULT.json`.

Every table says with how many seeds it was measured and whether its SLOs count queueing.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from scheduler.sim.rollmux.arms import WINDOW_GOAL

Figures = Mapping[str, Any]

_HEAD: Final = (
    "",
    "dollars over {measure}",
    "Solo-D over it",
    "SLOs kept, life",
    "worst 20 iterations",
    "largest over SLO",
    f"jobs above {WINDOW_GOAL:g}",
    "moves a job",
    "CPU s a seed",
)
_MIXES: Final = ("quality", "w2", "w3")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.rollmux.tables", description=__doc__)
    parser.add_argument("result", type=Path)
    result = json.loads(parser.parse_args().result.read_text())
    print("\n\n".join(f"### {name}\n\n{table}" for name, table in tables(result)))


def tables(result: Figures) -> Iterator[tuple[str, str]]:
    """Name and text of every table that the result has parts for."""
    for mix in _MIXES:
        if mix in result:
            yield mix, arms_table(result[mix]["arms"], measure="ours")
    for drift, found in result.get("drift", {}).items():
        yield f"drift, {drift}", arms_table(found["arms"], measure="hourly")
    if "failures" in result:
        yield "failures", arms_table(result["failures"]["arms"], measure="ours")
    if "worlds" in result:
        yield "worlds", arms_table(result["worlds"], measure=None)
    if "arms" in result:
        yield (
            "arms",
            arms_table(result["arms"], measure="ours" if "ours" in result["arms"] else None),
        )


def arms_table(arms: Mapping[str, Figures], *, measure: str | None) -> str:
    """One row an arm; without a `measure` no arm's dollars are held against another's."""
    first = next(iter(arms.values()))
    columns = [at for at in range(len(_HEAD)) if measure is not None or at != 1]
    head = [name.format(measure=measure) for name in _HEAD]
    rows = [head, ["---"] * len(head)]
    for name, found in arms.items():
        rows.append(_row(name, found, None if measure is None else arms[measure]))
    counts = "counts" if first["slo_counts_queueing"] else "does not count"
    lines = ["| " + " | ".join(row[at] for at in columns) + " |" for row in rows]
    seeds = len(first["dollars"])
    of = f"{seeds} seed{'s' if seeds > 1 else ''}"
    return "\n".join([*lines, "", f"{of}; an SLO {counts} queueing."])


def _shared(found: Figures) -> bool:
    """Whether the arm's jobs share nodes, so that it has figures of their windows."""
    return "slo_of_worst_20_iterations" in found


def _row(name: str, found: Figures, measure: Figures | None) -> list[str]:
    life = found["slo_of_life"]
    dollars = "" if measure is None else _range(_over(found["dollars"], measure["dollars"]))
    row = [
        name,
        dollars,
        _range(found["solo_d_over_it"]["by_seed"]),
        f"{life['kept']:,} of {found['jobs']:,}",
    ]
    if not _shared(found):
        return [*row, "", "", "", "", ""]
    worst = found["slo_of_worst_20_iterations"]
    return [
        *row,
        f"{worst['kept']:,} of {found['jobs']:,}",
        f"{worst['largest_over_slo']:.2f}",
        str(worst["jobs_above_goal"]),
        f"{found['moves_per_job']:.1f}",
        f"{found['cpu_s']['mean']:.1f} (at most {found['cpu_s']['max']:.1f})",
    ]


def _over(dollars: Sequence[float], measure: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(dollars, measure, strict=True)]


def _range(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
