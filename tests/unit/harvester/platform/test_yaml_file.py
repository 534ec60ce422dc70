"""Files of settings: every one is read by one reader, and no key stands twice in one of them."""

import ast
from pathlib import Path

import pytest
from yaml import YAMLError

from harvester.contracts.errors import ConfigError
from harvester.platform.yaml_file import parse_fields, parse_value

REPOSITORY = Path(__file__).parents[4]
PACKAGES = ("harvester", "coserve", "weightsync", "scheduler", "examples")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mode: observe\nmode: harvest\n", "line 2: not YAML: 'mode' is given twice"),
        ("a: {b: 1, c: 2, b: 3}\n", "line 1: not YAML: 'b' is given twice"),
        ("slots:\n  - name: x\n    'name': y\n", "line 3: not YAML: 'name' is given twice"),
        ('{"a": 1, "a": 1}', "line 1: not YAML: 'a' is given twice"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fields(text, Path("x.yaml"))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["2024-13-45", "2024-01-01T99:00:00Z", "0x_", "0b_", "[" * 1000 + "]" * 1000, "{a: " * 1000],
    ids=["month", "hour", "hexadecimal", "binary", "lists", "mappings"],
)
def test_a_value_that_yaml_chokes_on_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="not YAML"):
        parse_fields(f"node: {value}\n", Path("x.yaml"))
    with pytest.raises(YAMLError):
        parse_value(value)


def test_the_same_key_in_two_mappings_or_over_a_merged_one_is_good() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, x: 2}\nc: [{x: 1}, {x: 2}]\n1: {x: 1}\n'1': {x: 2}\n"
    fields = parse_fields(text, None)
    assert (fields["b"], fields["c"]) == ({"x": 2}, [{"x": 1}, {"x": 2}])
    assert len(fields) == 5


def test_no_package_loads_yaml_by_itself() -> None:
    loads = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        # LMCache's own file is read as LMCache reads it.
        if path.name not in ("yaml_file.py", "kv_connectors.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in {"safe_load", "full_load", "unsafe_load"}
    ]
    assert loads == []
