"""The journal of a policy of gateway or RollMux: no effect waits for it.

A journal that cannot be written costs decisions in the journal, never one of their effects.
"""

import logging
from pathlib import Path
from typing import Any

from harvester.contracts.journal import TAKEN
from harvester.platform.decision_journal import DecisionJournal, JournalledPolicy

_log = logging.getLogger(__name__)


class DecisionLog(DecisionJournal):
    """`<policy's name>.jsonl` in a directory; without one it records nothing."""

    def __init__(
        self,
        directory: Path | None,
        policy: JournalledPolicy,
        config: dict[str, Any],
        *,
        max_bytes: int,
        now: float,
        snapshot: dict[str, Any] | None = None,
    ) -> None:
        """`snapshot` is the state to which the policy was restored, where it does not begin new.

        Raises OSError for faults that do not pass by themselves.
        """
        super().__init__(
            None if directory is None else directory / f"{policy.NAME}.jsonl",
            policy,
            config,
            actor="scheduler",
            max_bytes=max_bytes,
        )
        self.begin(snapshot, now=now)

    def check(self, *, now: float) -> dict[str, Any] | None:
        snapshot = super().check(now=now)
        # No lease depends on the lines that another program took away.
        return self.begin_anew(now=now) if self.fault == TAKEN else snapshot

    def log_fault(self) -> None:
        if self.fault:
            _log.error("%s: decisions are not journalled: %s", self.policy.NAME, self.fault)
        else:
            notice = "%s: decisions are journalled again; %d are missing in all"
            _log.warning(notice, self.policy.NAME, self.missing_total)
