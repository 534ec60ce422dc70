"""CUDA's driver interface, through NVIDIA's own bindings."""

import importlib
from typing import Any

from harvester.contracts.errors import Unsupported


def driver() -> Any:
    """CUDA's driver interface. Raises Unsupported where cuda-bindings is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise Unsupported(f"this part needs the package cuda-bindings: {error}") from None


def checked(library: Any, name: str, *arguments: Any) -> Any:
    """The call's result, a tuple of several, or None. Raises RuntimeError with its CUresult."""
    code, *found = getattr(library, name)(*arguments)
    if code != library.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} failed: {code.name} ({int(code)})")
    if len(found) > 1:
        return tuple(found)
    return found[0] if found else None
