"""`rosemux simulate`: all arms on one workload, in figures that a stranger can add up."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from harvester.cli import main
from scheduler.sim.rollmux.arms import ARMS
from scheduler.sim.rollmux.comparison import BINS, UNSHARED, ArmComparison, compare
from scheduler.sim.rollmux.comparison_page import comparison_page
from scheduler.sim.rollmux.comparison_text import TITLES
from scheduler.sim.rollmux.ledger import Ledger
from scheduler.sim.rollmux.workload import SimulatedJob, w1
from scheduler.sim.rollmux.workload_csv import COLUMNS

HEAD = ",".join(COLUMNS)


@pytest.fixture(scope="module")
def jobs() -> list[SimulatedJob]:
    return w1(4, jobs=8)


@pytest.fixture(scope="module")
def told(jobs: list[SimulatedJob]) -> tuple[ArmComparison, Ledger]:
    return compare(jobs, seed=4, record=True)


def test_every_arm_is_there_and_ours_is_the_measure(
    told: tuple[ArmComparison, Ledger],
) -> None:
    found, _ = told
    assert [arm.name for arm in found.arms] == [*ARMS, *UNSHARED]
    assert set(TITLES) == {arm.name for arm in found.arms}
    assert found.arm("ours").over_ours == 1.0
    assert found.arm("solo_d").slo_attainment == 1.0


def test_prices_over_time_add_up_to_the_dollars(told: tuple[ArmComparison, Ledger]) -> None:
    found, _ = told
    drawn = [arm for arm in found.arms if arm.dollars_per_hour]
    assert [arm.name for arm in drawn] == [*ARMS, "solo_d"]
    for arm in drawn:
        if arm.name == "solo_d":
            continue  # ends later than the others where they end first
        assert sum(arm.dollars_per_hour) * found.hours / BINS == pytest.approx(arm.dollars)


def test_slowdowns_give_the_attainment(
    told: tuple[ArmComparison, Ledger], jobs: list[SimulatedJob]
) -> None:
    found, _ = told
    for name in ARMS:
        arm = found.arm(name)
        kept = sum(ratio <= 1.0 + 1e-9 for ratio in arm.slowdowns_over_slo)
        assert len(arm.slowdowns_over_slo) == len(jobs)
        assert kept / len(jobs) == arm.slo_attainment


def test_group_sizes_never_count_more_jobs_than_there_are(
    told: tuple[ArmComparison, Ledger], jobs: list[SimulatedJob]
) -> None:
    found, _ = told
    for at in range(BINS):
        here = sum(size * counts[at] for size, counts in enumerate(found.group_sizes, start=1))
        assert here <= len(jobs)
    assert max(found.group_sizes[1]) >= 1


def test_a_comparison_without_a_recorded_arm_has_no_events_and_equal_figures(
    jobs: list[SimulatedJob], told: tuple[ArmComparison, Ledger]
) -> None:
    again, ledger = compare(jobs, seed=4)
    assert not ledger.events
    assert told[1].events
    assert again == told[0]


def test_the_page_holds_four_pictures_and_loads_nothing(
    told: tuple[ArmComparison, Ledger],
) -> None:
    shown = comparison_page(told[0])
    pictures = re.findall(r"<svg.*?</svg>", shown, re.DOTALL)
    assert len(pictures) == 4
    for svg in pictures:
        ET.fromstring(svg)
    assert "Simulated, not measured" in shown
    assert not re.search(r'(?:src|href)="(?!#)|@import|url\((?!#)', shown)


def test_a_workload_of_ones_own_is_compared_and_its_events_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, events, out = (tmp_path / name for name in ("w.csv", "e/events.jsonl", "out.json"))
    lines = [f"j{at},{at * 500},40,300,100,0.08,375,143,1,1,400,1.5,1" for at in range(3)]
    workload.write_text("\n".join((HEAD, *lines)) + "\n")
    given = ["--workload", str(workload), "--events", str(events), "--json", str(out)]
    with pytest.raises(SystemExit) as left:
        main(["simulate", *given])
    assert left.value.code == 0
    assert "3 jobs" in capsys.readouterr().out
    assert msgspec.json.decode(out.read_bytes(), type=ArmComparison).jobs == 3
    written = [json.loads(line) for line in events.read_text().splitlines()]
    assert {event["type"] for event in written} >= {"arrival", "placement", "phase_start"}
    assert [event["t"] for event in written] == sorted(event["t"] for event in written)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--drift", "sideways"], "none, increasing, decreasing, mixed"),
        (["--workload", "/nonexistent.csv"], "cannot be read"),
        (["--html", "/dev/null/page.html"], "cannot write"),
        (["--events", "/dev/null/events.jsonl"], "cannot write"),
    ],
)
def test_wrong_options_are_one_clear_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["simulate", *given])
    assert left.value.code == 2
    assert said in capsys.readouterr().err
