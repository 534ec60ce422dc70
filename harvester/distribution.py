"""The installed distribution: its version, and the extra that provides a missing package."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from harvester.contracts.errors import Unsupported

_EXTRAS = {"weights": ("fsspec", "numba", "numpy"), "rollmux": ("numba", "numpy")}
"""Modules that come with each extra, as pyproject.toml says."""


def rosemux_version() -> str:
    """`0+tree` where RoseMux runs from a source tree that is not installed."""
    try:
        return metadata.version("rosemux")
    except metadata.PackageNotFoundError:
        return "0+tree"


@contextmanager
def needing(extra: str, *, subject: str) -> Iterator[None]:
    """Raises Unsupported with what to install where a module that the block imports is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = str(error.name).partition(".")[0]
        package = f"'rosemux[{extra}]'" if module in _EXTRAS.get(extra, ()) else module
        raise Unsupported(f"{subject} needs {module}: pip install {package}") from error
