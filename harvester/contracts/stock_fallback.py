"""No fault of ours keeps production down: what fails in a hook is logged, and vLLM serves as stock.

Every entry point that vLLM loads goes through `guarded`. In a guest the fault passes on, since a
guest without one of its hooks would run ungated. A guest whose role is misspelt counts as
production here; its own scheduler and middleware refuse then. Only the standard library is
imported, so that a broken installation is a fault like others.
"""

import logging
import os
from collections.abc import Callable
from typing import TypeVar

ROLE_VARIABLE = "ROSEMUX_ROLE"
GUEST_ROLE = "guest"

_Result = TypeVar("_Result")
_log = logging.getLogger("vllm.rosemux")
_reported: set[str] = set()


def guarded(hook: Callable[[], _Result]) -> _Result | None:
    """The hook's result; None if the hook failed and vLLM goes on without it."""
    try:
        return hook()
    except Exception as error:
        if os.environ.get(ROLE_VARIABLE) == GUEST_ROLE:
            raise
        why = f"{type(error).__name__}: {error}"
        if why not in _reported:
            # Once a process: several hooks fail for the same reason.
            _reported.add(why)
            _log.error("RoseMux is off in this process, vLLM serves as stock: %s", why)
        return None
