"""A control daemon whose servers and clients a test sets; `fake_mps.py` answers for it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harvester.platform.mps import MpsControl

EXECUTABLE = Path(__file__).parent / "fake_mps.py"


class MpsDaemon:
    def __init__(self, pipes: Path) -> None:
        self.pipes = pipes
        self.control = MpsControl(pipe_directory=pipes, executable=str(EXECUTABLE), timeout_s=30.0)
        self.serve({})

    def serve(self, servers: dict[int, Sequence[int]], **more: Any) -> None:
        """`servers` maps process ids to their clients'; `status` and `refuses` hold for all."""
        status = more.pop("status", "ACTIVE")
        state = {
            str(server): {"clients": list(clients), "status": status}
            for server, clients in servers.items()
        }
        (self.pipes / "state.json").write_text(json.dumps({"servers": state, **more}))

    def stop(self) -> None:
        (self.pipes / "state.json").unlink()

    def commands(self) -> list[str]:
        file = self.pipes / "commands"
        return file.read_text().splitlines() if file.exists() else []
