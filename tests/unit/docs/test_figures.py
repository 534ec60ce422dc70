"""Figures that a page repeats are those of the benchmark's README."""

import re
from collections.abc import Callable

Table = list[list[str]]


def test_times_to_find_harm_are_those_of_the_guards_benchmark(
    table_after: Callable[[str, str], Table],
) -> None:
    measured = table_after("benchmarks/guards/README.md", "| service and guest | SLO | found")
    repeated = table_after("docs/slo.md", "| service and guest | found by")

    def first_two(cell: str) -> list[str]:
        return re.findall(r"[\d.]+", cell)[:2]

    found = [(row[0], first_two(row[2])) for row in measured]
    assert [row for row in repeated if (row[0], first_two(row[1])) not in found] == []
