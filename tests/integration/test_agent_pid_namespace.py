"""The real agent process in a pid namespace of its own, where a guest's numbers mean nothing."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.owing_guest import owing_guest, sharing_config
from tests.integration.test_agent_process import Agent, wait_for

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


class FarAgent(Agent):
    def start(self) -> None:
        command = [sys.executable, "-m", "harvester.cli", "agent", "--config", str(self.config)]
        self.process = subprocess.Popen(
            [*UNSHARE, *command], stderr=subprocess.PIPE, bufsize=0, env=self._environment
        )
        self.url = "http://" + self.line(r"listens on (\S+:\d+)").group(1)

    def kills(self, outcome: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        series = f'harvester_guest_actions_total{{action="kill",outcome="{outcome}",slot="slot0"}} '
        (line,) = [line for line in lines if line.startswith(series)]
        return float(line.rpartition(" ")[2])

    def offer(self) -> dict[str, str]:
        (offer,) = self.call("GET", "/v1/slots")["slots"]
        return dict(offer)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FarAgent]:
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespace can be made here")
    agent = FarAgent(tmp_path, config=sharing_config(tmp_path))
    yield agent
    agent.end()


def test_a_kill_that_never_happened_is_counted_as_that_and_quarantines(agent: FarAgent) -> None:
    with owing_guest(agent.pages) as guest:
        guest.speak(kv_usage_ratio=0.2)
        agent.take("r1")
        guest.speak(kv_usage_ratio=0.97)
        wait_for(lambda: agent.kills("failed"))
        wait_for(lambda: agent.offer()["state"] == "quarantined")
        reason = agent.offer()["reason"]
        assert "could not be ended" in reason
        assert "another pid namespace?" in reason
        assert agent.kills("done") == 0
        assert guest.process.poll() is None
