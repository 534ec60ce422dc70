"""Ends a process with its parent, however the parent ends, or gives it another parent."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with(parent: int, by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel end this process as soon as its parent, of that id, has ended.

    More exactly, as soon as the parent's thread that started this process has ended.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
