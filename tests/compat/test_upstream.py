"""The upstream table against the installed vLLM and against what the adapters import."""

import ast
from pathlib import Path

import pytest

import coserve.vllm
import weightsync
from coserve.vllm.capabilities import SUPPORTED, capabilities, installed_vllm_version
from harvester.contracts.errors import ConfigError
from tests.compat.conformance import compare
from tests.compat.source_tree import installed_tree
from tests.compat.upstream import TABLE

ADAPTERS = (Path(coserve.vllm.__file__).parent, Path(weightsync.__file__).parent / "vllm")


def test_the_installed_vllm_has_every_name_in_the_form_that_the_adapters_rely_on() -> None:
    try:
        table = capabilities(installed_vllm_version())
    except ConfigError:
        pytest.skip("no vLLM is installed")
    assert [finding for finding in compare(installed_tree(), table) if not finding.agrees] == []


def test_every_row_is_relied_on_in_some_version() -> None:
    """A row that no version can satisfy would pass everywhere by being absent."""
    for symbol in TABLE:
        assert any(symbol.when(table) for table in SUPPORTED.values()), symbol


def test_the_adapters_import_only_what_the_table_names() -> None:
    named = {(symbol.module, symbol.name.partition(".")[0]) for symbol in TABLE}
    for symbol in TABLE:
        package, _, module = symbol.module.rpartition(".")
        named.add((package, module))
    imported = {
        (node.module, alias.name): file.name
        for folder in ADAPTERS
        for file in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm")
        for alias in node.names
    }
    unnamed = {name: file for name, file in imported.items() if name not in named}
    assert unnamed == {}, "add these to tests/compat/upstream.py"
