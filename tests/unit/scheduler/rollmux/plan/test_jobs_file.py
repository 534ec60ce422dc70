"""`jobs.yaml`: every mistake is named by its field and its line."""

from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError
from scheduler.model import Completion, Pool
from scheduler.rollmux.plan.jobs_file import read_jobs

GOOD = """\
nodes:
  rollout: {type: h20, price_per_hour: 14.8, host_gb: 2000}
  training: {type: h800, price_per_hour: 42.24, host_gb: 1000}
jobs:
  - id: first
    slo: 1.5
    host_gb: 400
    rollout: {max_s: 500, mean_s: 400}
    training: {max_s: 200}
  - id: second
    slo: 1.5
    host_gb: 400
    rollout: {max_s: 500}
    training: {max_s: 200}
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    return path


def test_reads_jobs_nodes_and_prices(tmp_path: Path) -> None:
    settings = read_jobs(_file(tmp_path, GOOD))
    assert [job.id for job in settings.jobs] == ["first", "second"]
    assert settings.as_control.types[Pool.TRAINING].host_bytes == 10**12
    assert settings.jobs[0].spec.phases[0].max_s == 500


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ("slo: 1.5", "slo: 0.5", r"line 6: jobs\.0\.slo: Input should be greater"),
        ("max_s: 200", "max_s: soon", r"line 9: jobs\.0\.training\.max_s: Input should be a valid"),
        ("max_s: 200", "max_s: .nan", r"line 9: jobs\.0\.training\.max_s"),
        ("price_per_hour: 42.24", "price_per_hour: .nan", r"line 3: .*price_per_hour: .* finite"),
        ("host_gb: 1000", "host_gb: .inf", r"line 3: .*training\.host_gb: .* finite number"),
        ("slo: 1.5", "slo: .inf", r"line 6: jobs\.0\.slo: .* finite number"),
        ("id: second", "id: ../second", r"line 10: jobs\.1\.id: use 1 to 64 letters, digits"),
        ("id: second", "id: first", r"line 10: jobs\.1\.id: first is the name of jobs\.0 too"),
        ("host_gb: 400", "host_gb: 1500", r"line 7: jobs\.0\.host_gb: 1500 GB do not fit on a tr"),
        ("mean_s: 400", "mean_s: 600", r"line 8: jobs\.0\.rollout\.mean_s: 600 is more than max_s"),
        ("slo: 1.5", "sync: {max_s: 9, nodes: 1}", r"line 6: jobs\.0\.sync\.nodes: no such field"),
        (
            "slo: 1.5",
            "sync: {max_s: 9, mean_s: 10}\n    slo: 1.5",
            r"line 6: .*\.sync\.mean_s: 10 is",
        ),
        ("slo: 1.5", "slow: 1.5", r"line 6: jobs\.0\.slow: .* mean 'slo'"),
        ("type: h800", "type: h20", r"line 3: nodes\.training\.type"),
        ("nodes:", "nodes: [", "line 3: not YAML"),
    ],
)
def test_names_the_field_and_its_line(tmp_path: Path, wrong: str, right: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_jobs(_file(tmp_path, GOOD.replace(wrong, right, 1)))


def test_a_mistake_in_a_job_stands_alone(tmp_path: Path) -> None:
    alone = GOOD.partition("  - id: second")[0]
    for wrong, right in (("slo: 1.5", "slo: 0.5"), ("id: first", "id: a b/../c")):
        with pytest.raises(ConfigError) as refused:
            read_jobs(_file(tmp_path, alone.replace(wrong, right, 1)))
        assert "; " not in str(refused.value)
        assert "should have at least" not in str(refused.value)
    with pytest.raises(ConfigError, match="jobs: Tuple should have at least 1 item"):
        read_jobs(_file(tmp_path, GOOD.partition("jobs:")[0] + "jobs: []\n"))


def test_names_every_mistake_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("slo: 1.5", "slo: 0")
    with pytest.raises(ConfigError, match=r"jobs\.0\.slo.*jobs\.1\.slo"):
        read_jobs(_file(tmp_path, text))


def test_a_curve_rises(tmp_path: Path) -> None:
    text = GOOD.replace("slo: 1.5", "slo: 1.5\n    responses: [[0.5, 0.8], [0.4, 0.9]]", 1)
    with pytest.raises(ConfigError, match=r"line 7: jobs\.0\.responses: both numbers must rise"):
        read_jobs(_file(tmp_path, text))


def test_a_rollout_s_curve_and_its_indivisibility_reach_the_control(tmp_path: Path) -> None:
    text = GOOD.replace("slo: 1.5", "slo: 1.5\n    responses: [[0.5, 0.8]]", 1)
    text = text.replace("max_s: 500}", "max_s: 500, divisible: false}", 1)
    first, second = (job.spec for job in read_jobs(_file(tmp_path, text)).jobs)
    assert [one.curve for one in first.phases] == [(Completion(0.5, 0.8),), ()]
    assert [one.divisible for one in (*first.phases, *second.phases)] == [True, True, False, True]
    assert (first.phases[0].curve, second.phases[0].curve) == ((Completion(0.5, 0.8),), ())
    assert not second.phases[0].divisible


def test_a_bound_on_the_jobs_and_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than"):
        read_jobs(_file(tmp_path, GOOD + "# " + "x" * (1 << 20)))
    job = GOOD[GOOD.index("  - id: second") :]
    many = GOOD + "".join(job.replace("second", f"job{at}") for at in range(200))
    with pytest.raises(ConfigError, match=r"jobs: Tuple should have at most 200"):
        read_jobs(_file(tmp_path, many))
