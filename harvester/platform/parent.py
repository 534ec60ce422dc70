"""Ends a process with its parent, however the parent ends."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int) -> None:
    """Have the kernel end this process as soon as its parent, of that id, has ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
