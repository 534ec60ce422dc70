"""The reporter of one production process, over real pages."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from coserve.guest.guest_slot import GuestSlot
from coserve.pulse.engine_cores import EngineStep
from coserve.pulse.pulse_state import EngineShape
from coserve.vllm import pulse_reporter
from coserve.vllm.environment import Role, SlotEnvironment
from coserve.vllm.pulse_reporter import PulseReporter, process_reporter
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import (
    Grant,
    GrantMode,
    PageDirectory,
    PageFault,
    Pulse,
    Reading,
)
from harvester.contracts.process import process_ids

SetRole = Callable[[str, Path], None]
BEATS = 50
STEP = EngineStep(
    running=1,
    kv_usage_ratio=0.5,
    ttft_s=(0.0,),
    prompt_tokens=10,
    generation_tokens=1,
    inter_token_s=(),
    finished_prompt_tokens=(),
)


def first_token() -> EngineStep:
    return replace(STEP, wall_s=monotonic_ns() * 1e-9)


def reporter_in(path: Path) -> PulseReporter:
    return PulseReporter(SlotEnvironment(Role.PRODUCTION, "prod", path))


def reading(path: Path) -> Reading[Pulse]:
    return PageDirectory(path).pulse_reader("pulse.prod.0").read()


def within_beats(holds: Callable[[], bool]) -> bool:
    import threading

    pause = threading.Event()
    return any(holds() or pause.wait(pulse_reporter.BEAT_S / 5) for _ in range(BEATS))


def test_publishes_each_event_at_once(tmp_path: Path) -> None:
    reporter = reporter_in(tmp_path)
    key = reporter.arrive(body_bytes=500)
    assert reading(tmp_path).record is not None
    reporter.step(first_token)
    record = reading(tmp_path).record
    assert record is not None
    assert (record.decoding, record.running, record.steps_total) == (1, 1, 1)
    reporter.finish(key)
    record = reading(tmp_path).record
    assert record is not None
    assert record.in_flight == 0


def test_beats_while_idle(tmp_path: Path) -> None:
    reporter_in(tmp_path)
    assert within_beats(lambda: reading(tmp_path).record is not None)
    first_ns = reading(tmp_path).stamp_ns
    assert within_beats(lambda: reading(tmp_path).stamp_ns > first_ns)


def test_two_engines_of_one_name_both_serve_and_close_the_gate(
    tmp_path: Path, make_grant: Callable[..., Grant]
) -> None:
    first = reporter_in(tmp_path)
    first.arrive(body_bytes=500)
    second = reporter_in(tmp_path)
    assert within_beats(lambda: reading(tmp_path).fault is PageFault.CONFLICT)
    second.finish(second.arrive(body_bytes=500))
    first.step(first_token)
    assert reading(tmp_path).fault is PageFault.CONFLICT
    grant = make_grant(pulses=("pulse.prod.0",))
    PageDirectory(tmp_path).grant_writer().write(grant, now_ns=monotonic_ns(), ttl_ns=10**11)
    decision = GuestSlot(tmp_path, token_limit=512).decide()
    assert (decision.tokens, decision.fault) == (0, PageFault.CONFLICT)


def test_begins_once_the_agent_has_made_the_directory(tmp_path: Path) -> None:
    pages = tmp_path / "after_reboot"
    reporter = reporter_in(pages)
    reporter.arrive(body_bytes=500)
    assert reading(pages).fault is PageFault.MISSING
    pages.mkdir()
    assert within_beats(lambda: reading(pages).record is not None)
    record = reading(pages).record
    assert record is not None
    assert record.in_flight == 1, "what arrived before is known"


def test_learns_nothing_while_a_guest_is_let_in(
    tmp_path: Path, make_grant: Callable[..., Grant]
) -> None:
    reporter = reporter_in(tmp_path)
    agent = PageDirectory(tmp_path).grant_writer()

    def grant(mode: GrantMode) -> None:
        agent.write(make_grant(mode=mode), now_ns=monotonic_ns(), ttl_ns=10**11)

    def learns() -> bool:
        """Whether a request teaches anything that comes one step after the newest grant."""
        reporter.step(lambda: replace(STEP, ttft_s=(), prompt_tokens=0))
        before = len(reporter._state.times.prefills)
        key = reporter.arrive(body_bytes=500)
        reporter.step(first_token)
        reporter.finish(key)
        return len(reporter._state.times.prefills) > before

    assert learns(), "no agent, no guest"
    grant(GrantMode.OPEN)
    assert within_beats(lambda: not learns()), "a page that is new is found by the timer"
    grant(GrantMode.CLOSED)
    assert learns()
    grant(GrantMode.UNGATED)
    assert not learns()


def test_counts_late_tokens_by_the_slo_of_the_newest_grant(
    tmp_path: Path, make_grant: Callable[..., Grant]
) -> None:
    reporter = reporter_in(tmp_path)
    agent = PageDirectory(tmp_path).grant_writer()
    for slo_s, total in ((0.5, 0), (0.1, 2)):
        grant = make_grant(mode=GrantMode.CLOSED, itl_slo_s=slo_s)
        agent.write(grant, now_ns=monotonic_ns(), ttl_ns=10**11)
        assert within_beats(lambda slo_s=slo_s: counted_by(tmp_path) == slo_s)
        reporter.step(lambda: replace(STEP, ttft_s=(), inter_token_s=(0.2, 0.01, 0.3)))
        record = reading(tmp_path).record
        assert record is not None
        assert record.itl_late_total == total
    assert record.itl_late_s_recent == (0.2, 0.3)


def counted_by(path: Path) -> float | None:
    record = reading(path).record
    return None if record is None else record.itl_slo_s


def test_makes_a_deleted_page_anew(tmp_path: Path) -> None:
    reporter = reporter_in(tmp_path)
    reporter.arrive(body_bytes=500)
    (tmp_path / "pulse.prod.0").unlink()
    assert within_beats(lambda: reading(tmp_path).record is not None)


def test_a_step_that_cannot_be_read_silences_the_pulse_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = reporter_in(tmp_path)
    reporter.arrive(body_bytes=500)

    def of_another_vllm() -> EngineStep:
        raise AttributeError("num_running_reqs")

    reporter.step(of_another_vllm)
    assert "num_running_reqs" in caplog.text
    stamp_ns = reading(tmp_path).stamp_ns
    reporter.finish(reporter.arrive(body_bytes=500))
    reporter.step(first_token)
    assert reading(tmp_path).stamp_ns == stamp_ns


def test_there_is_one_reporter_in_a_production_process(
    tmp_path: Path, set_role: SetRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse_reporter, "_reporter", None)
    set_role("production", tmp_path)
    reporter = process_reporter()
    assert reporter is not None
    assert process_reporter() is reporter


def test_there_is_no_reporter_elsewhere(
    tmp_path: Path, set_role: SetRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse_reporter, "_reporter", None)
    set_role("guest", tmp_path)
    assert process_reporter() is None
    monkeypatch.delenv("ROSEMUX_ROLE")
    assert process_reporter() is None


def shaped(path: Path, process: int) -> PulseReporter:
    shape = EngineShape(step_tokens=512, processes=2, process=process)
    return PulseReporter(SlotEnvironment(Role.PRODUCTION, "prod", path), lambda: shape)


def test_each_api_server_writes_its_own_page_and_says_how_many_there_are(tmp_path: Path) -> None:
    shaped(tmp_path, 0).arrive(body_bytes=500)
    shaped(tmp_path, 1)
    assert within_beats(
        lambda: PageDirectory(tmp_path).pulse_names() == ("pulse.prod.0", "pulse.prod.1")
    )
    record = reading(tmp_path).record
    assert record is not None
    assert (record.in_flight, record.processes) == (1, 2)


def test_learns_nothing_while_another_api_server_prefills_or_is_silent(tmp_path: Path) -> None:
    reporter = shaped(tmp_path, 0)

    def learns() -> bool:
        before = len(reporter._state.times.prefills)
        key = reporter.arrive(body_bytes=500)
        reporter.step(first_token)
        reporter.finish(key)
        return len(reporter._state.times.prefills) > before

    assert not learns(), "the other has not begun"
    other = shaped(tmp_path, 1)
    key = other.arrive(body_bytes=500)
    assert not learns(), "the other has a prompt in the same steps"
    other.step(first_token)
    assert learns(), "the other decodes"
    other.finish(key)
    assert learns()


def test_a_shape_that_cannot_be_read_silences_the_pulse_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def of_another_vllm() -> EngineShape:
        raise AttributeError("_api_process_count")

    reporter = PulseReporter(SlotEnvironment(Role.PRODUCTION, "prod", tmp_path), of_another_vllm)
    assert "_api_process_count" in caplog.text
    reporter.finish(reporter.arrive(body_bytes=500))
    assert reading(tmp_path).record is None


@pytest.mark.parametrize("spawned", [False, True])
def test_names_the_process_that_all_of_the_engine_s_descend_from(
    spawned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several API servers is vLLM's child, and a sibling of the engine's cores."""
    parent = SimpleNamespace(pid=os.getppid()) if spawned else None
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    reporter_in(tmp_path).report(lambda now_ns: None)
    record = reading(tmp_path).record
    assert record is not None
    assert record.root == process_ids([os.getppid() if spawned else os.getpid()])[0]


@pytest.mark.parametrize("fault", [RuntimeError("ours"), MemoryError("none left")])
def test_an_error_of_the_timer_silences_the_pulse_and_nothing_else(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
) -> None:
    reporter = reporter_in(tmp_path)
    reporter.arrive(body_bytes=500)

    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr(reporter._page, "keep", broken)
    assert within_beats(lambda: "reports no pulse any more" in caplog.text)
    stamp_ns = reading(tmp_path).stamp_ns
    reporter.finish(reporter.arrive(body_bytes=500))
    assert reading(tmp_path).stamp_ns == stamp_ns, "half a pulse would be believed"
