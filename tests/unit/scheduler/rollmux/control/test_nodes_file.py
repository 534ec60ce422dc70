"""Files of nodes and of jobs for a control that plans: read whole, or refused by field and line."""

from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError
from scheduler.rollmux.cluster.job_limits import GB, spec_fault
from scheduler.rollmux.control.nodes_file import read_nodes, read_specs

REPOSITORY = Path(__file__).parents[5]
NODES = """nodes:
  rollout: {type: h20, names: [r0, r1], price_per_hour: 15, host_gb: 2000}
  training: {type: h800, names: [t0], price_per_hour: 42, host_gb: 1000}
"""


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_nodes_are_named_and_the_rest_has_defaults(tmp_path: Path) -> None:
    config = read_nodes(_written(tmp_path / "nodes.yaml", NODES))
    assert config.rollout.names == ("r0", "r1")
    assert config.training.type.host_bytes == 1000 * GB
    assert (config.risk, config.move_s) == (0.25, 300.0)
    assert not config.slo_counts_queueing
    counted = read_nodes(_written(tmp_path / "nodes.yaml", f"slo_counts_queueing: true\n{NODES}"))
    assert counted.planner.slo_counts_queueing


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ("[t0]", "[r1]", r"line 3: .*r1 is the name of nodes.rollout.names.1 too"),
        ("[t0]", "[../t0]", "line 3: .*names.0"),
        ("[t0]", "[]", "line 3: .*names"),
        ("h800", "h20", "types of different names"),
        ("host_gb: 1000", "host_gb: .inf", "line 3: .*host_gb"),
        ("host_gb: 1000", "host_gb: 1000, count: 3", "count"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, was: str, now: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_nodes(_written(tmp_path / "nodes.yaml", NODES.replace(was, now)))


def test_the_examples_are_read(tmp_path: Path) -> None:
    assert read_nodes(REPOSITORY / "examples/nodes.yaml").rollout.names == ("roll-0",)
    jobs = read_specs(REPOSITORY / "examples/jobs.yaml")
    assert [one.job for one in jobs] == ["math-7b", "code-14b", "tools-7b", "agent-32b"]
    assert [spec_fault(one) for one in jobs] == [""] * 4
    assert jobs[0].phases[0].mean_s == 430


def test_a_missing_field_is_named_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("risk: 0.2\n")
    with pytest.raises(ConfigError, match=rf"{file}: nodes: Field required"):
        read_nodes(file)
