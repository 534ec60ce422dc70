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
from tests.compat.upstream_versions import UPSTREAM_VERSIONS, WeightEngineApi

ADAPTERS = (Path(coserve.vllm.__file__).parent, Path(weightsync.__file__).parent / "vllm")


def test_the_installed_vllm_has_every_name_in_the_form_that_the_adapters_rely_on() -> None:
    try:
        version = capabilities(installed_vllm_version()).version
    except ConfigError:
        pytest.skip("no vLLM is installed")
    table = UPSTREAM_VERSIONS[version]
    assert [finding for finding in compare(installed_tree(), table) if not finding.agrees] == []


def test_every_supported_version_has_its_entry() -> None:
    assert list(UPSTREAM_VERSIONS) == list(SUPPORTED)
    assert all(name == table.version for name, table in UPSTREAM_VERSIONS.items())


def test_hooks_that_upstream_renamed_carry_the_name_of_their_version() -> None:
    flags = {version: table.plain_weight_flag for version, table in UPSTREAM_VERSIONS.items()}
    assert flags["0.28.0"] is None
    assert flags["0.29.0"] == flags["0.31.0"] == flags["0.32.0"] == "_cpu_skip_gemm_dispatch"
    assert flags["0.30.0"] == "skip_weight_relayout"


def test_only_the_oldest_version_hands_a_loader_to_the_weight_engine() -> None:
    loaders = [
        version
        for version, table in UPSTREAM_VERSIONS.items()
        if table.weight_engine_api is WeightEngineApi.LOADER
    ]
    assert loaders == ["0.24.0"]


def test_every_row_is_relied_on_in_some_version() -> None:
    """A row that no version can satisfy would pass everywhere by being absent."""
    for symbol in TABLE:
        assert any(symbol.when(table) for table in UPSTREAM_VERSIONS.values()), symbol


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
