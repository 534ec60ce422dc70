"""Entry point `vllm.general_plugins` of the observer, the part of RoseMux for production's image.

Observer and RoseMux have files of the same names. In one environment the one that was installed
last is in force, and removing either leaves a torn other.
"""

import logging
from importlib import metadata

from harvester.contracts.stock_fallback import guarded

DISTRIBUTIONS = ("rosemux", "rosemux-observer")

_log = logging.getLogger("vllm.rosemux")


def register() -> None:
    """Called by vLLM in each of its processes: says so where both are installed."""
    guarded(_register)


def _register() -> None:
    if set(DISTRIBUTIONS) <= {str(each.name) for each in metadata.distributions()}:
        both = " and ".join(DISTRIBUTIONS)
        _log.error("%s share their files: uninstall both, then install one of them", both)
