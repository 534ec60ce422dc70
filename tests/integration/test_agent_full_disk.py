"""The real agent process with a full tmpfs as state directory, in its own mount namespace."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.contracts.journal import Opened, read_journal
from scheduler.sim.replay import replay_journal
from tests.integration.owing_guest import owing_guest, sharing_config
from tests.integration.test_agent_process import Agent, Beats, wait_for

SIZE_KIB = 1024


def _can_mount(folder: Path) -> bool:
    command = f"mount -t tmpfs -o size=64k tmpfs {folder}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, check=False)
    return done.returncode == 0


class SmallAgent(Agent):
    """Its `state_dir` is a tmpfs that other processes see only through /proc."""

    full_at_start = False

    def start(self) -> None:
        state = self.root / "state"
        state.mkdir(exist_ok=True)
        fill = f"dd if=/dev/zero of={state}/fill bs=1k count={2 * SIZE_KIB} 2>/dev/null;"
        script = (
            f"mount -t tmpfs -o size={SIZE_KIB}k tmpfs {state} && "
            f"{{ {fill if self.full_at_start else ''} exec {sys.executable} -m harvester.cli agent "
            f"--config {self.config}; }}"
        )
        self.process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script],
            stderr=subprocess.PIPE,
            bufsize=0,
            env=self._environment,
        )
        self.url = "http://" + self.line(r"listens on (\S+:\d+)").group(1)

    @property
    def state(self) -> Path:
        return Path(f"/proc/{self.process.pid}/root{self.root}/state")

    def fill(self) -> None:
        with (self.state / "fill").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    def make_room(self) -> None:
        (self.state / "fill").unlink()

    def metrics(self) -> str:
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as reply:
            return str(reply.read().decode())

    def state_of(self, slot: str) -> tuple[str, str]:
        offers = self.call("GET", "/v1/slots")["slots"]
        (offer,) = [one for one in offers if one["slot"] == slot]
        return offer["state"], offer["reason"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    if os.geteuid() != 0 or not _can_mount(tmp_path):
        pytest.skip("needs root and leave to mount a tmpfs in a mount namespace")
    return tmp_path


@pytest.fixture
def agent(place: Path) -> Iterator[SmallAgent]:
    agent = SmallAgent(place, config=sharing_config(place))
    yield agent
    agent.end()


@pytest.fixture
def beats(agent: SmallAgent) -> Iterator[Beats]:
    beats = Beats(agent.pages)
    yield beats
    beats.stop()


def test_a_full_disk_withdraws_the_slot_until_there_is_room_again(
    agent: SmallAgent, beats: Beats
) -> None:
    agent.take("r1")
    wait_for(lambda: agent.mode() == "open")
    agent.fill()
    agent.line("slot slot0 is withdrawn: .*No space left on device")
    wait_for(lambda: agent.mode() == "closed")
    wait_for(lambda: agent.state_of("slot0")[0] == "off")
    assert "No space left on device" in agent.state_of("slot0")[1]
    body = {"request_id": "r2", "slot": "slot0", "tenant": "t", "job": "j", "duration_s": 60}
    assert agent.call("POST", "/v1/leases", body)["type"] == "refused"
    assert 'harvester_unrecorded{slot="slot0"} 1.0' in agent.metrics()
    agent.make_room()
    missing = int(agent.line(r"written again; (\d+) decisions are missing").group(1))
    agent.take("r3")
    wait_for(lambda: agent.mode() == "open")
    opened = [x for x in read_journal(agent.state / "slot0.journal") if isinstance(x, Opened)]
    assert sum(line.missing for line in opened) == missing > 0
    agent.process.terminate()
    # Before it ends: its mounts go with it.
    copy = agent.root / "journal"
    copy.write_bytes((agent.state / "slot0.journal").read_bytes())
    assert agent.process.wait(timeout=60) == 0
    assert replay_journal(copy).difference is None


def test_sigterm_ends_an_agent_cleanly_on_a_full_disk(agent: SmallAgent, beats: Beats) -> None:
    agent.take("r1")
    agent.fill()
    agent.line("is withdrawn")
    agent.process.terminate()
    assert agent.process.wait(timeout=60) == 0
    assert agent.process.stderr is not None
    assert "Traceback" not in agent.process.stderr.read().decode()


def test_an_agent_that_starts_on_a_full_disk_runs_and_lends_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SmallAgent, "full_at_start", True)
    agent = SmallAgent(place)
    beats = Beats(agent.pages)
    try:
        wait_for(lambda: "No space left" in agent.state_of("slot0")[1])
        assert agent.state_of("slot0")[0] == "off"
        agent.make_room()
        agent.take("r1")
        wait_for(lambda: agent.mode() == "open")
    finally:
        beats.stop()
        agent.end()


def test_a_guest_that_owes_memory_is_ended_on_a_full_disk(agent: SmallAgent) -> None:
    with owing_guest(agent.pages) as guest:
        guest.speak(kv_usage_ratio=0.2)
        agent.take("r1")
        agent.fill()
        agent.line("is withdrawn")
        guest.speak(kv_usage_ratio=0.97)
        assert guest.process.wait(timeout=60) == -9
        done = 'harvester_guest_actions_total{action="kill",outcome="done",slot="slot0"} 1.0'
        wait_for(lambda: done in agent.metrics())
