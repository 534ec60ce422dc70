"""Workloads: the fixed one, and the CSV with faults named by line."""

from pathlib import Path

import numpy as np
import pytest

from harvester.contracts.errors import ConfigError
from scheduler.sim.rollmux.workload import LIFE_MEAN_S, Drift, w1
from scheduler.sim.rollmux.workload_csv import COLUMNS, read_workload

GOOD = "a,0,10,300,100,0.08,375,143,1,1,400,1.5,1"


def _file(tmp_path: Path, *lines: str, head: str = ",".join(COLUMNS)) -> Path:
    path = tmp_path / "workload.csv"
    path.write_text("\n".join((head, *lines)) + "\n")
    return path


def test_the_fixed_workload_is_what_it_says() -> None:
    jobs = [one for seed in range(10) for one in w1(seed)]
    lives_s = np.array([one.lengths_s.sum() for one in jobs])
    assert lives_s.mean() == pytest.approx(LIFE_MEAN_S, rel=0.1)
    assert all(1 <= one.job.slo <= 2 for one in jobs)
    heavy = np.mean([one.means_s[0] >= 2 * one.means_s[1] for one in jobs])
    assert heavy == pytest.approx(0.6, abs=0.05)


def test_a_drift_changes_durations_and_nothing_else() -> None:
    still, drifting = w1(3), w1(3, drift=Drift.INCREASING)
    assert [one.job for one in still] == [one.job for one in drifting]
    ratio = drifting[0].lengths_s[-1] / still[0].lengths_s[-1]
    assert (ratio > 1.19).all()


def test_planners_get_maxima_and_no_mean() -> None:
    for one in w1(1):
        assert all(phase.mean_s is None and not phase.curve for phase in one.job.phases)


def test_reads_jobs_in_the_order_of_their_arrivals(tmp_path: Path) -> None:
    jobs = read_workload(_file(tmp_path, GOOD.replace("a,0", "b,50"), GOOD), seed=1)
    assert [one.job.job for one in jobs] == ["a", "b"]
    assert jobs[0].iterations == 10


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a,0,10", "line 3: 3 columns"),
        (GOOD.replace("a,0", "b,soon"), "line 3: arrival_s 'soon' is no number"),
        (GOOD.replace("a,0", "b,nan"), "line 3: arrival_s is nan"),
        (GOOD.replace("a,0,10", "b,0,10.5"), "line 3: iterations is 10.5; it must be whole"),
        (GOOD.replace("a,0,10", "b,0,0"), "line 3: iterations is 0"),
        (GOOD.replace("a,0", "../b,0"), "line 3: job '../b' is no name"),
        (GOOD.replace("375", "30").replace("a,0", "b,0"), "line 3: roll_max_s is less than roll_s"),
        (GOOD.replace(",1.5,", ",0.9,").replace("a,0", "b,0"), "line 3: slo is 0.9"),
        (GOOD, "line 3: job a is on line 2 too"),
        ("\n\n" + GOOD.replace("a,0", "b,soon"), "line 5: arrival_s 'soon' is no number"),
        (GOOD.replace(",400,", ",2001,").replace("a,0", "b,0"), "line 3: host_gb is 2001"),
        (GOOD.replace(",1,1,", ",0,1,").replace("a,0", "b,0"), "line 3: roll_nodes is 0"),
        (GOOD.replace("0.08", "").replace("a,0", "b,0"), "line 3: phase_cv '' is no number"),
        (GOOD.replace("a,0", "b,0") + ",7", "line 3: 14 columns"),
        (GOOD.replace("a,0", "b,2e8"), "line 3: arrival_s is 2e8"),
        (GOOD.replace("a,0,10", "b,0,999999"), "line 3: iterations of roll_max_s and train_max_s"),
    ],
)
def test_names_the_line_and_what_is_wrong(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        read_workload(_file(tmp_path, GOOD, line), seed=1)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e12", "1e400"])
@pytest.mark.parametrize("column", COLUMNS[1:])
def test_bounds_every_number_by_line_and_column(tmp_path: Path, column: str, value: str) -> None:
    given = GOOD.split(",")
    given[COLUMNS.index(column)] = value
    with pytest.raises(ConfigError, match=f"line 2: {column} is {value}; it must be"):
        read_workload(_file(tmp_path, ",".join(given)), seed=1)


def test_bounds_the_iterations_of_all_jobs_together(tmp_path: Path) -> None:
    lines = [f"{name},0,400000,1,1,0.08,10,10,1,1,1,1.5,1" for name in "abc"]
    with pytest.raises(ConfigError, match="line 4: iterations of all jobs so far are 1200000"):
        read_workload(_file(tmp_path, *lines), seed=1)


def test_reads_what_a_spreadsheet_writes(tmp_path: Path) -> None:
    path = _file(tmp_path, GOOD)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    (one,) = read_workload(path, seed=1)
    assert one.job.job == "a"


def test_refuses_other_columns_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: the columns must be"):
        read_workload(_file(tmp_path, GOOD, head="job,arrival"), seed=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_workload(tmp_path / "none.csv", seed=1)
