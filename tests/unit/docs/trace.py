"""Files that calls and returns pass through, while a part of the system runs."""

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGES = ("harvester/", "coserve/", "weightsync/", "scheduler/")


class Trace:
    """Records the thread that asks for it and every thread that starts within `of_threads`."""

    def __init__(self, repository: Path) -> None:
        self._root = f"{repository}/"
        self._files: dict[str, str] = {}
        """Path from the root by a code's file; empty for a file of no package."""
        self._on = False
        self._background: frozenset[asyncio.Task[Any]] = frozenset()
        self.passed: list[str] = []
        """Files in the order of calls and returns; no file twice in a row."""

    @contextmanager
    def of_threads(self) -> Iterator[None]:
        threading.setprofile(self._note)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Leaves out destructors, and tasks of the packages that run already."""
        self._background = _running_tasks(self._file_of)
        gc.collect()
        gc.disable()
        self._on = True
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._on = False
            gc.enable()

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if not self._on or event not in ("call", "return"):
            return
        entered = frame if event == "call" else frame.f_back
        file = self._file_of(entered.f_code.co_filename) if entered else ""
        if file and self.passed[-1:] != [file] and _task() not in self._background:
            self.passed.append(file)

    def _file_of(self, name: str) -> str:
        file = self._files.get(name)
        if file is None:
            path = name.removeprefix(self._root)
            file = self._files[name] = path if path.startswith(PACKAGES) else ""
        return file


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _running_tasks(file_of: Callable[[str], str]) -> frozenset[asyncio.Task[Any]]:
    if _task() is None:
        return frozenset()
    found = []
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and file_of(code.co_filename):
            found.append(task)
    return frozenset(found)
