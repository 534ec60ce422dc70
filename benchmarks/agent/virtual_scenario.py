"""A scenario in virtual time: two to five faults strike a node at drawn times."""

import asyncio
import errno
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.agent.evidence import Evidence, read_files
from benchmarks.agent.virtual_faults import FAULTS
from benchmarks.agent.virtual_node import (
    LASTS_S,
    VirtualNode,
)
from harvester.agent.audit.audit_file import AuditFile
from harvester.contracts.journal import JournalWriter
from harvester.contracts.page import GrantMode
from harvester.platform import whole_file

_EARLIEST_S = 3.0
"""Slots are open by then."""


def run_scenario(seed: int, root: Path, *, lasts_s: float = LASTS_S) -> tuple[Evidence, list[str]]:
    """The evidence, and the faults that struck while a grant was open or had been."""
    node = VirtualNode(seed, root)
    rng = random.Random(f"faults {seed}")
    names = sorted(FAULTS)
    drawn = [names[seed % len(names)], *rng.choices(names, k=rng.randrange(1, 5))]
    faults = sorted((rng.uniform(_EARLIEST_S, lasts_s - 3.0), name) for name in drawn)
    with ExitStack() as stack:
        stack.enter_context(node.time.governing())
        stack.enter_context(_refusing(node))
        runner = stack.enter_context(asyncio.Runner())
        node.run([(at_s, FAULTS[name]) for at_s, name in faults], runner, lasts_s=lasts_s)
    evidence = node.evidence
    for slot in node.slots:
        slot.pulse_page.close()
        slot.guest_page.close()
    for state in (*node.moved, root / "state"):
        read_files(evidence, state, [slot.name for slot in node.slots])
    return evidence, drawn


@contextmanager
def _refusing(node: VirtualNode) -> Iterator[None]:
    """Journal, state and audit are refused while the disk is full."""

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if node.disk_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*given, **named)

        return call

    with (
        patch.object(JournalWriter, "decided", refusing(JournalWriter.decided)),
        patch.object(JournalWriter, "opened", refusing(JournalWriter.opened)),
        patch.object(AuditFile, "append", refusing(AuditFile.append)),
        patch.object(whole_file, "replace", refusing(whole_file.replace)),
    ):
        yield


def run_in(root: Path, seed: int, *, lasts_s: float = LASTS_S) -> tuple[Evidence, list[str]]:
    """`run_scenario` in a folder that is removed behind it, without its log."""
    folder = root / f"v{seed}"
    logging.disable(logging.CRITICAL)
    try:
        return run_scenario(seed, folder, lasts_s=lasts_s)
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(folder, ignore_errors=True)


def was_open(evidence: Evidence) -> bool:
    return any(seen.grant.mode is not GrantMode.CLOSED for seen in evidence.grants)
