"""From a unit that starts to a lease of its slot, and back: `rosemux discover`, agent and gateway.

Each is a process of its own; stand-ins are systemctl, the engine and the pages of production.
"""

import asyncio
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from harvester.contracts.page import PageDirectory, PageFault
from tests.integration.conftest import Served
from tests.integration.test_agent_process import ROSEMUX, Agent, Beats, _turn, _up, wait_for

CONFIG = """\
node: node-1
mode: harvest
page_root: {root}/pages
state_dir: {root}/state
http: {{port: {port}}}
slots_file: {root}/slots.yaml
"""
UNIT = """\
Id=vllm@{name}.service
ActiveState=active
Environment=ROSEMUX_PAGE_DIR=/run/rosemux/{name} ROSEMUX_SLOT_GUEST={guest}
ExecStart={{ path=/v ; argv[]=/v serve --port 8000 ; ignore_errors=no ; pid=1 }}
"""


class Units:
    """A systemctl that shows these units, and `rosemux discover` that asks it."""

    def __init__(self, root: Path, slots_file: Path) -> None:
        self._shown = root / "shown"
        self._shown.write_text("")
        program = root / "bin" / "systemctl"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\nexec cat {self._shown}\n")
        program.chmod(0o755)
        template = root / "slot.yaml"
        template.write_text(yaml.safe_dump({"engine_url": "$guest"}))
        command = [ROSEMUX, "discover", "systemd", "--unit", "vllm@*.service", "--every-s", "1"]
        command += ["--forget-s", "0", "--template", template, "--write", slots_file]
        path = f"{program.parent}:{os.environ['PATH']}"
        self.process = subprocess.Popen(command, env={**os.environ, "PATH": path})

    def show(self, **guests: str) -> None:
        """Units that are up, with the URLs of their guests."""
        new = self._shown.with_name("new")
        new.write_text("\n".join(UNIT.format(name=name, guest=guests[name]) for name in guests))
        new.replace(self._shown)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, config=CONFIG)
    yield agent
    agent.end()


@pytest.fixture
def units(tmp_path: Path) -> Iterator[Units]:
    units = Units(tmp_path, tmp_path / "slots.yaml")
    yield units
    units.end()


async def test_a_unit_that_starts_is_lent_and_one_that_ends_gives_its_turns_back(
    tmp_path: Path,
    agent: Agent,
    units: Units,
    gateway: Callable[..., Served],
    fake_engine: Callable[..., Served],
) -> None:
    service = gateway(engines=[], agents=[{"id": "n", "url": agent.url}])
    assert agent.call("GET", "/v1/slots")["slots"] == []
    guests = {name: fake_engine(epoch=1, step_s=0.02) for name in ("a", "b")}
    units.show(**{name: guest.url for name, guest in guests.items()})
    beats = [Beats(PageDirectory.create(tmp_path / "pages" / name)) for name in guests]
    try:
        served: set[str] = set()
        async with asyncio.timeout(60):
            for wave in itertools.count():
                served |= await _turns(service, f"t{wave}")
                if served == {"guest.a", "guest.b"}:
                    break
        units.show(b=guests["b"].url)
        async with asyncio.timeout(60):
            for wave in itertools.count():
                # Some of them are on the guest that goes, and are whole all the same.
                await _turns(service, f"u{wave}")
                status = await service.get("/v1/status")
                if "a" not in status["slots"] and _up(status) == {"guest.b"}:
                    break
        left = PageDirectory(tmp_path / "pages" / "a").grant_reader()
        wait_for(lambda: left.read().fault is PageFault.EXPIRED)
        assert [slot["slot"] for slot in agent.call("GET", "/v1/slots")["slots"]] == ["b"]
        assert await _turns(service, "after") == {"guest.b"}
    finally:
        for each in beats:
            each.stop()


async def _turns(service: Served, name: str) -> set[str]:
    """The engines of a dozen turns, each of which is answered in full."""
    turns = (_turn(service, f"{name}.{number}") for number in range(12))
    return set().union(*await asyncio.gather(*turns))


def test_an_agent_that_was_killed_has_its_found_slots_again(
    tmp_path: Path, agent: Agent, units: Units
) -> None:
    units.show(a="http://127.0.0.1:1")

    def slots() -> list[str]:
        return [slot["slot"] for slot in agent.call("GET", "/v1/slots")["slots"]]

    wait_for(lambda: slots() == ["a"])
    agent.kill()
    units.end()
    agent.start()
    assert slots() == ["a"]
