import io
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console

from examples.demo import table, wording
from examples.demo.records import DemoArm, TrainingStep
from examples.demo.schema import Result


def printed(result: Result) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(table.closing(result))
    return out.getvalue()


def test_the_closing_table_shows_every_check_and_its_verdict(whole_result: Result) -> None:
    rows = [line.split("│") for line in printed(whole_result).splitlines() if "│" in line]
    verdicts = {cells[1].strip(): cells[-2].strip() for cells in rows}
    for check in whole_result.checks:
        assert verdicts[check.name] == ("ok" if check.ok else "not ok")


def test_a_trace_name_is_no_markup(whole_result: Result) -> None:
    named = msgspec.structs.replace(whole_result, trace="[bold]x[/bold]")
    assert "[bold]x[/bold]" in printed(named)


def test_progress_shows_a_steps_harvested_share(step_of: Callable[..., TrainingStep]) -> None:
    step = step_of(DemoArm.HARVEST, tokens_by_engine={"dedicated-0": 2000, "guest-0": 1000})
    line = table.step_line(step, guests=frozenset({"guest-0"}))
    assert "step 1 in 4.0 s, 1,000 rollout tokens/s, 33 % harvested, reward 0.50 ± 0.02" in line


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (wording.change(0.9999), "+0.0 %"),
        (wording.change(1.0512), "+5.1 %"),
        (wording.times(None), "–"),
        (wording.size(12_300_000), "12.3 MB"),
        (wording.size(999), "999 B"),
        (wording.number(1234567), "1,234,567"),
        (wording.interval((0.5, 1.25)), "0.50 to 1.25"),
    ],
)
def test_figures_are_written_for_people(written: str, said: str) -> None:
    assert written == said
