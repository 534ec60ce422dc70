"""The gateway's process: one for each state file, and what it tells systemd."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def begun(config: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harvester.cli", "gateway", "--config", str(config)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


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


def test_the_gateway_is_ready_once_it_serves_alive_while_its_loop_runs_and_says_that_it_stops(
    tmp_path: Path,
) -> None:
    config, address = tmp_path / "gateway.json", tmp_path / "notify"
    engines = [{"id": "a", "url": "http://127.0.0.1:9"}]
    config.write_text(json.dumps({"port": 0, "engines": engines, "jobs": [{"id": "job"}]}))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.settimeout(20)
        gateway = begun(config, NOTIFY_SOCKET=str(address), WATCHDOG_USEC="400000")
        try:
            assert systemd.recv(256) == b"READY=1"
            assert gateway.stdout is not None
            assert "listening" in gateway.stdout.readline()
            assert [systemd.recv(256) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            gateway.send_signal(signal.SIGTERM)
            while (sent := systemd.recv(256)) != b"STOPPING=1":
                assert sent == b"WATCHDOG=1"
        finally:
            gateway.kill()
            gateway.communicate()
