"""The capability tables: which versions are supported and how an unknown one is refused."""

import pytest

from coserve.vllm.capabilities import SUPPORTED, WeightEngineApi, capabilities
from harvester.contracts.errors import Unsupported


@pytest.mark.parametrize("version", SUPPORTED)
def test_gives_the_table_of_every_supported_version(version: str) -> None:
    assert capabilities(version).version == version


def test_a_build_suffix_does_not_matter() -> None:
    assert capabilities("0.32.0+cpu") == capabilities("0.32.0")


@pytest.mark.parametrize("version", ["0.23.0", "0.25.2", "0.34.0", "0.32.0rc1", "0.32", ""])
def test_refuses_a_version_that_was_not_checked_and_names_those_that_were(version: str) -> None:
    with pytest.raises(Unsupported, match=r"0\.24\.0, .*0\.33\.0") as refusal:
        capabilities(version)
    assert f"vLLM {version} is not supported" in str(refusal.value)


def test_hooks_that_upstream_renamed_carry_the_name_of_their_version() -> None:
    flags = {version: table.plain_weight_flag for version, table in SUPPORTED.items()}
    assert flags["0.28.0"] is None
    assert flags["0.29.0"] == flags["0.31.0"] == flags["0.32.0"] == "_cpu_skip_gemm_dispatch"
    assert flags["0.30.0"] == "skip_weight_relayout"


def test_only_the_oldest_version_hands_a_loader_to_the_weight_engine() -> None:
    loaders = [v for v, t in SUPPORTED.items() if t.weight_engine_api is WeightEngineApi.LOADER]
    assert loaders == ["0.24.0"]
