"""Sleep until one of several words of shared memory changes, instead of polling.

Built on Linux futexes: the writer of a word wakes its watchers, which sleep in the kernel. A
watcher needs no write permission, and a writer waits for no watcher. If the kernel or its
system-call filter lacks `futex_waitv` (before Linux 5.16), a sleep is a 1 ms nap and the watcher
polls.
"""

import ctypes
import errno
import platform
import sys
import time
from collections.abc import Sequence
from mmap import PROT_READ, PROT_WRITE, mmap

import msgspec

from harvester.contracts.clock import monotonic_ns

NAP_S = 0.001
"""Seconds of one nap where no writer can wake the sleeper."""
WORDS_MAX = 128

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAITV = 449
_WAKE, _WAKE_PRIVATE = 1, 129
_SIZE_32, _PRIVATE = 2, 128
_EVERYBODY = 0x7FFFFFFF
_CLOCK_MONOTONIC = 1
_PAST = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class _Buffer(ctypes.Structure):
    """Py_buffer: `from_buffer` needs write access, which a watcher does not have."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.py_object),
        ("length", ctypes.c_ssize_t),
        ("item_bytes", ctypes.c_ssize_t),
        ("read_only", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _system_call() -> "ctypes._FuncPointer | None":
    if sys.platform != "linux" or _FUTEX is None:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call


_call = _system_call()


class Word(msgspec.Struct, frozen=True):
    """Four bytes at an address, with the value last seen there."""

    address: int
    value: int
    private: bool = False
    """Whether no other process maps the word, so that the cheaper private futex applies."""


class PrivateBell:
    """A word of this process, rung by one thread for another."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self._address = ctypes.addressof(self._word)

    def word(self) -> Word:
        return Word(self._address, self._word.value, private=True)

    def ring(self) -> None:
        self._word.value += 1
        ring(self._address, private=True)


def ring(address: int, *, private: bool = False) -> None:
    """Wake every sleeper on this word; call it after the word has changed."""
    if _call is not None:
        operation = _WAKE_PRIVATE if private else _WAKE
        _call(_FUTEX, ctypes.c_void_p(address), operation, _EVERYBODY, None, None, 0)


def sleep_until_rung(words: Sequence[Word], *, timeout_s: float) -> None:
    """Return when one of the words has changed or was rung, at most `timeout_s` later. Spurious
    returns are possible."""
    global _call
    if _call is None or not words:
        time.sleep(min(timeout_s, NAP_S))
        return
    waiters = (_Waiter * min(len(words), WORDS_MAX))(
        *[
            _Waiter(word.value, word.address, _SIZE_32 | (_PRIVATE if word.private else 0), 0)
            for word in words[:WORDS_MAX]
        ]
    )
    until_ns = monotonic_ns() + int(timeout_s * 1e9)
    until = _Timespec(*divmod(until_ns, 1_000_000_000))
    rung = _call(_FUTEX_WAITV, waiters, len(waiters), 0, ctypes.byref(until), _CLOCK_MONOTONIC)
    if rung >= 0 or ctypes.get_errno() in _PAST:
        return
    if ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
        _call = None
    # The word is gone (its page was unmapped): the watcher looks again.
    time.sleep(NAP_S)


class FileWord:
    """Four bytes of a file at an address that is only ever passed to the kernel.

    This process neither reads nor writes there: if the file was cut short, its own access would end
    the process (SIGBUS), while the kernel's access is an error (EFAULT).
    """

    def __init__(self, file: int, *, offset: int, rings: bool = False) -> None:
        """`file` is an open descriptor and may be closed afterwards. `address` is 0 if the file is
        too short. With `rings` the mapping is writable: the kernel resolves a writable page in half
        the time."""
        self.address = 0
        try:
            self._map = mmap(file, offset + 4, prot=PROT_READ | (PROT_WRITE if rings else 0))
        except (OSError, ValueError):
            return
        self.address = _address_of(self._map) + offset

    def close(self) -> None:
        if self.address:
            self.address = 0
            self._map.close()


def _address_of(memory: mmap) -> int:
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(buffer), 0)
    try:
        return int(buffer.address)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
