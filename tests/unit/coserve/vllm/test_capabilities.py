"""The capability tables: which versions are supported and how an unknown one is refused."""

import pytest

from coserve.vllm.capabilities import SUPPORTED, capabilities
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
