#!/usr/bin/env python3
"""Stands in for `nvidia-cuda-mps-control`: commands on standard input, replies on standard output.

Its state is `state.json` in the pipe directory, which a test writes: servers by process id, each
with its status and clients, and what it refuses. Every command is appended to `commands`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def answer(command: list[str], state: dict[str, Any]) -> str:
    servers: dict[str, Any] = state.get("servers", {})
    match command:
        case ["get_server_list"]:
            return "\n".join(servers)
        case ["get_client_list", server]:
            return "\n".join(str(pid) for pid in servers[server]["clients"])
        case ["get_server_status", server]:
            return str(servers[server].get("status", "ACTIVE"))
        case ["terminate_client", server, client]:
            if state.get("refuses"):
                return "CUDA_ERROR_UNKNOWN"
            servers[server]["clients"].remove(int(client))
            return "CUDA_SUCCESS"
        case _:
            return f"Invalid command: {' '.join(command)}"


def main() -> int:
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    file = pipes / "state.json"
    if not file.exists():
        print("Cannot find MPS control daemon process")
        return 1
    state = json.loads(file.read_text())
    for line in sys.stdin:
        with (pipes / "commands").open("a") as log:
            log.write(line)
        print(answer(line.split(), state))
    file.write_text(json.dumps(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())
