"""Two gateway processes with one state file: the second ends and says why, whatever its port."""

import json
import signal
import subprocess
import sys
from pathlib import Path


def begun(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harvester.cli", "gateway", "--config", str(config)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_gateway_on_a_state_file_ends_and_a_killed_one_leaves_it_free(
    tmp_path: Path,
) -> None:
    config = tmp_path / "gateway.json"
    state = tmp_path / "kept" / "state.sqlite"
    engines = [{"id": "a", "url": "http://127.0.0.1:9"}]
    settings = {"port": 0, "state_file": str(state), "engines": engines, "jobs": [{"id": "job"}]}
    config.write_text(json.dumps(settings))
    first = begun(config)
    try:
        assert first.stdout is not None
        assert "listening" in first.stdout.readline()
        second = begun(config)
        try:
            _, said = second.communicate(timeout=20)
        finally:
            second.kill()
        assert second.returncode != 0
        assert f"state_file {state}: another gateway runs with it" in said
    finally:
        first.kill()
        first.communicate()
    third = begun(config)
    try:
        assert third.stdout is not None
        assert "listening" in third.stdout.readline()
    finally:
        third.send_signal(signal.SIGTERM)
        third.communicate(timeout=60)
