"""The DaemonSet names what the commands take, and its files are good ones."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.check_expressions import DEPLOY
from harvester.cli.root import main
from harvester.config_file import load_agent_config, read_agent_config
from harvester.discovery.slot_template import DiscoveredEngine, SlotTemplate
from harvester.policy.settings import Mode

MANIFEST = DEPLOY / "kubernetes" / "agent.yaml"
Object = dict[str, Any]


@pytest.fixture
def objects() -> dict[str, Object]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.fixture
def containers(objects: dict[str, Object]) -> dict[str, Object]:
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    return {each["name"]: each for each in pod["containers"]}


def test_its_pods_are_observed_and_nothing_is_lent(
    objects: dict[str, Object], containers: dict[str, Object], tmp_path: Path
) -> None:
    files = objects["ConfigMap"]["data"]
    engine = DiscoveredEngine(slot="chat", origin="pod", host="10.0.0.1", port="8000")
    slot = SlotTemplate(yaml.safe_load(files["slot.yaml"])).slot(engine)
    slots = tmp_path / "slots.yaml"
    slots.write_text(yaml.safe_dump({"slots": [slot]}))
    agent = tmp_path / "agent.yaml"
    agent.write_text(files["agent.yaml"].replace("/slots/slots.yaml", str(slots)))
    (env,) = containers["agent"]["env"]
    config = load_agent_config(agent, environment={env["name"]: "node-1.example"})
    assert (config.node, config.mode) == ("node-1.example", Mode.OBSERVE)
    assert [each.metrics_url for each in config.slots] == ["http://10.0.0.1:8000/metrics"]


def test_agent_and_discovery_mean_the_same_files(
    objects: dict[str, Object], containers: dict[str, Object], tmp_path: Path
) -> None:
    agent = tmp_path / "agent.yaml"
    agent.write_text(objects["ConfigMap"]["data"]["agent.yaml"])
    config = read_agent_config(agent, environment={}).config
    arguments = containers["discover"]["args"]
    assert str(config.slots_file) == arguments[arguments.index("--write") + 1]
    mounts = {
        name: {mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]}
        for name, each in containers.items()
    }
    assert mounts["agent"]["/slots"] == mounts["discover"]["/slots"]
    assert {str(config.page_root), str(config.state_dir)} <= mounts["agent"].keys()
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    assert {volume["name"] for volume in pod["volumes"]} == {*mounts["agent"].values()}


def test_the_commands_take_its_arguments(
    containers: dict[str, Object], capsys: pytest.CaptureFixture[str]
) -> None:
    for each in containers.values():
        program, *arguments = each["args"]
        assert program == "rosemux"
        with pytest.raises(SystemExit):
            main([*arguments, "--help"])
        said = capsys.readouterr().out
        for option in (word for word in arguments if word.startswith("--")):
            assert option in said


def test_it_has_no_right_that_it_does_not_need(
    objects: dict[str, Object], containers: dict[str, Object]
) -> None:
    assert objects["ClusterRole"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}
    ]
    for each in containers.values():
        context = each["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (
            False,
            True,
        )
        assert "privileged" not in context
