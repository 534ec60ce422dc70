"""The agent of the guest's slot as a process: leases, grants and ends of the guest are its own."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.testbed.page_beats import shared_group
from benchmarks.testbed.processes import Child, Processes
from harvester.contracts.audit import AuditKind, audit_files


@dataclass(slots=True, kw_only=True)
class GuestAgent:
    """A killed agent comes back in the same place, with its state."""

    processes: Processes
    root: Path
    """Folder of the run."""
    port: int
    slot: str
    guest_url: str
    kv_tokens: int
    starts: int = 0
    child: Child | None = None
    _file: Path = field(init=False)
    _memory_group: str = field(init=False)

    def __post_init__(self) -> None:
        self._memory_group = shared_group(self.root / "group")
        self._file = self.root / "agent.yaml"
        self._file.write_text(json.dumps(self._config()))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.starts += 1
        command = (sys.executable, "-m", "harvester.cli", "agent", "--config", str(self._file))
        self.child = self.processes.start(f"agent-{self.starts}", command)

    def kill(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            self.processes.kill(child)

    def guests_ended(self) -> int:
        """Guests that it has ended, by its audit."""
        files = audit_files(self.root / "agent" / "audit.jsonl")
        lines = [line for file in files for line in file.read_text().splitlines()]
        return sum(json.loads(line)["event"] == AuditKind.GUEST_KILLED for line in lines)

    def _config(self) -> dict[str, Any]:
        return {
            "node": "node",
            "mode": "harvest",
            "unsafe_experiments": True,
            "page_root": str(self.root / "pages"),
            "state_dir": str(self.root / "agent"),
            "http": {"port": self.port},
            "slots": [
                {
                    "name": self.slot,
                    "engine_url": self.guest_url,
                    "model": "policy",
                    "concurrency": 8,
                    "memory_group": self._memory_group,
                    # No slice without grants: what takes turns off the guest is in the script.
                    # Room for about half of the turns that it may have; a cut takes more of them.
                    "policy": {
                        "cooldown_s": 0.3,
                        "proof": {"share_ratio": 0},
                        # The script takes more guests than a sound one would lose.
                        "quarantine_losses": 1000,
                        "kv_budget_tokens": self.kv_tokens,
                        "kv_level": {"shrink_interval_s": 0.2, "quiet_s": 0.5, "grow_ratio": 1.0},
                    },
                }
            ],
        }
