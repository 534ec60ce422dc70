"""One name, one thing: no public class of the packages has the name of another."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGES = ("harvester", "coserve", "weightsync", "scheduler")


def test_no_public_class_name_stands_for_two_classes(repository: Path) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((repository / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(path.relative_to(repository).as_posix())
    assert len(places) > 500, "the packages were not found"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
