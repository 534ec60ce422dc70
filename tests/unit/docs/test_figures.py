"""Figures that a page repeats are those of the benchmark's README."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

Table = list[list[str]]
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")


def figures(text: str) -> Iterator[tuple[float, int]]:
    """Each number in a text, with its decimals."""
    for found in _NUMBER.findall(text):
        yield float(found.replace(",", "")), len(found.partition(".")[2])


def test_each_figure_of_the_readme_is_in_the_readme_of_its_benchmark(
    repository: Path, table_after: Callable[[str, str], Table]
) -> None:
    missing, name = [], ""
    for question, result, *_ in table_after("README.md", "| question | result |"):
        linked = re.search(r"benchmarks/(\w+)/README|\((\w+)\)$", question)
        name = linked[1] or linked[2] if linked else name
        page = (repository / f"benchmarks/{name}/README.md").read_text()
        measured = {value for value, _ in figures(page)}
        missing += [
            (name, value)
            for value, decimals in figures(result)
            if value not in {round(each, decimals) for each in measured}
        ]
    assert missing == []


def test_times_to_find_harm_are_those_of_the_guards_benchmark(
    table_after: Callable[[str, str], Table],
) -> None:
    measured = table_after("benchmarks/guards/README.md", "| service and guest | SLO | found")
    repeated = table_after("docs/slo.md", "| service and guest | found by")

    def first_two(cell: str) -> list[float]:
        return [value for value, _ in figures(cell)][:2]

    found = [(row[0], first_two(row[2])) for row in measured]
    assert [row for row in repeated if (row[0], first_two(row[1])) not in found] == []
