"""The command around a session that the test plays: its files, and its leftovers."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.testbed.bursts import Bursts, generated_trace
from benchmarks.testbed.excerpt import excerpts_of
from benchmarks.testbed.trace import Trace
from examples.demo import command
from examples.demo.command import demo
from examples.demo.preparation import SCALES
from examples.demo.records import Record
from examples.demo.schema import problems
from examples.demo.session import Outcome
from harvester.contracts.errors import ConfigError

PLAIN_TRACE = "t_s,input_tokens,output_tokens\n" + "".join(
    f"{second},100,20\n" for second in range(100)
)


class FakeSession:
    """Records a run that never happened."""

    run_records: tuple[Record, ...] = ()
    error: BaseException | None = None
    seen: Any = None

    def __init__(self, **given: Any) -> None:
        self.given = SimpleNamespace(**given)
        type(self).seen = self.given

    async def run(self) -> Outcome:
        for record in self.run_records:
            self.given.recorder(record)
            self.given.progress(record)
        if self.error is not None:
            raise self.error
        trace: Trace = self.given.trace
        return Outcome(
            excerpts=excerpts_of(trace, count=2, duration_s=40.0, rate=2.0),
            sizes=SCALES[0],
            prompts=36,
            gateway={"jobs": {"harvest": {"turns": {"migrated": 3}}}},
            hash_mismatches=0,
            first_harvested_token_s=self.given.clock.now() + 5.0,
        )


@pytest.fixture
def session(
    monkeypatch: pytest.MonkeyPatch, whole_run: tuple[Record, ...]
) -> Iterator[type[FakeSession]]:
    fake = type("FakeSession", (FakeSession,), {"run_records": whole_run})
    monkeypatch.setattr(command, "Session", fake)
    monkeypatch.setattr(command, "Stack", lambda processes, paths, *, seed: paths)
    monkeypatch.setattr(command, "check_machine", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the report, whose plots take seconds to draw."""
    monkeypatch.setattr(command, "write_report", lambda *_: None)


def run(out: Path, *, trace: Path | None = None, quick: bool = False) -> None:
    demo(trace=trace, quick=quick, out=out, seed=1)  # type: ignore[arg-type]


def test_a_run_leaves_a_whole_result_a_report_and_its_records(
    tmp_path: Path, session: type[FakeSession], whole_run: tuple[Record, ...]
) -> None:
    out = tmp_path / "out" / "demo"
    run(out)
    result = json.loads((out / "result.json").read_text())
    assert problems(result) == []
    assert result["trajectories"]["migrated"] == 3
    assert result["trace"] == generated_trace(Bursts(), duration_s=3600.0, seed=1).name
    assert "<html" in (out / "report.html").read_text().lower()
    assert len((out / "records.jsonl").read_bytes().splitlines()) == len(whole_run)
    assert list(out.glob("run-*")) == []
    assert not session.seen.stack.pages.exists()


@pytest.mark.usefixtures("undrawn")
def test_quick_is_shorter_than_the_full_form(tmp_path: Path, session: type[FakeSession]) -> None:
    plans = []
    for quick in (True, False):
        run(tmp_path / "out", quick=quick)
        plans.append(session.seen.plan)
    short, full = plans
    assert short.blocks.rounds * short.blocks.steps < full.blocks.rounds * full.blocks.steps
    assert short.within_s < full.within_s


@pytest.mark.usefixtures("undrawn")
def test_a_given_trace_is_replayed(tmp_path: Path, session: type[FakeSession]) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text(PLAIN_TRACE)
    run(tmp_path / "out", trace=trace)
    assert len(session.seen.trace.t_s) == 100


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("the guest died")])
def test_a_run_that_ends_early_keeps_its_records_and_claims_no_result(
    tmp_path: Path, session: type[FakeSession], error: BaseException
) -> None:
    session.error = error
    with pytest.raises(type(error)):
        run(tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes()
    assert not (tmp_path / "result.json").exists()
    assert list(tmp_path.glob("run-*")) == []
    assert not session.seen.stack.pages.exists()


def test_a_broken_trace_is_refused_before_anything_is_written(
    tmp_path: Path, session: type[FakeSession]
) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("when,how much\n1,2\n")
    with pytest.raises(ConfigError, match=r"mine\.csv"):
        run(tmp_path / "out", trace=trace)
    assert not (tmp_path / "out").exists()


def test_an_unfit_machine_is_refused_before_anything_is_written(
    tmp_path: Path, session: type[FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ConfigError("the engines need 2 cores")

    monkeypatch.setattr(command, "check_machine", refuse)
    with pytest.raises(ConfigError, match="2 cores"):
        run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undrawn")
def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path: Path, session: type[FakeSession]) -> None:
    run(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
