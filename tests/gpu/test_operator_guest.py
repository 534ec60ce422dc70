"""`rosemux guest` and the agent, as an operator starts them, on a CPU and on a GPU."""

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

from tests.gpu.conftest import ENGINE_START_S, ON_A_GPU, need_cuda
from tests.integration import test_agent_process, test_guest_stopped
from tests.integration.engine_slot import EngineSlot, FakeAgent, answers, until
from tests.integration.test_agent_process import wait_for
from tests.integration.test_guest_engine import LONG, steps_stand_still
from tests.integration.test_guest_stopped import (
    ON_A_CPU,
    Slot,
    test_a_guest_that_its_operator_stops_is_no_loss,
)

__all__ = ["test_a_guest_that_its_operator_stops_is_no_loss"]

pytestmark = pytest.mark.timeout(540)

ON_ITS_GPU = "eager: true"
"""Isolation is the default: time-slicing."""


@pytest.fixture(
    params=[
        pytest.param(ON_A_CPU, marks=pytest.mark.engine, id="cpu"),
        pytest.param(ON_ITS_GPU, marks=ON_A_GPU, id="cuda"),
    ]
)
def slot(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Slot]:
    if request.param == ON_ITS_GPU:
        need_cuda()
        monkeypatch.setattr(test_guest_stopped, "START_S", ENGINE_START_S)
    if not Path(test_agent_process.ROSEMUX).exists():
        # RoseMux is on the path and not installed.
        program = tmp_path / "rosemux"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m harvester.cli "$@"\n')
        program.chmod(0o755)
        monkeypatch.setattr(test_agent_process, "ROSEMUX", str(program))
    slot = Slot(tmp_path, request.param)
    yield slot
    slot.end()


def engines(slot: Slot) -> EngineSlot:
    """The guest alone: production only writes its pages."""
    found = re.search(r"engine_url: (\S+)", (slot.root / "guest.yaml").read_text())
    assert found is not None
    nobody: FakeAgent = None  # type: ignore[assignment]
    return EngineSlot("", found[1], slot.pages, slot.root / "weights", nobody, None)  # type: ignore[arg-type]


async def test_a_guest_under_the_kill_switch_takes_no_step(slot: Slot) -> None:
    # Its engine writes its page before its server listens.
    guest = engines(slot)
    wait_for(
        lambda: slot.offer()[0] == "offered" and answers(guest.guest_url),
        seconds=test_guest_stopped.START_S,
    )
    lease = slot.take("r1")
    wait_for(lambda: slot.mode() == "open")
    slot.switch.write_text("hold")
    await until(lambda: slot.mode() == "closed", "the agent has closed it")
    assert "kill switch" in slot.offer()[1]
    steps = await steps_stand_still(guest)
    turn = guest.begin(LONG, epoch=lease["epoch"])
    assert await steps_stand_still(guest) == steps
    assert not turn.tokens
    assert turn.task is not None
    turn.task.cancel()
