"""The DaemonSet names what the commands take, and its files are good ones. With the kustomization a
Prometheus operator scrapes it."""

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from deploy.check_expressions import DEPLOY, RULES
from harvester.cli.root import main
from harvester.config_file import load_agent_config, read_agent_config
from harvester.discovery.slot_template import DiscoveredEngine, SlotTemplate
from harvester.platform.http_kit import listen, serving
from harvester.policy.settings import Mode
from tests.certificates import Authority, token_file

FOLDER = DEPLOY / "kubernetes"
MANIFEST = FOLDER / "agent.yaml"
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


@pytest.fixture
def patched() -> Object:
    """The pod's part of the kustomization."""
    (patch,) = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["patches"]
    pod: Object = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]
    return pod


@pytest.fixture
def monitor() -> Object:
    loaded: Object = yaml.safe_load((FOLDER / "monitoring.yaml").read_text())
    return loaded


def test_monitored_agents_listen_to_the_network_with_tls_and_tokens(
    objects: dict[str, Object], patched: Object, tmp_path: Path
) -> None:
    (container,), (volume,) = patched["containers"], patched["volumes"]
    (mount,) = container["volumeMounts"]
    assert (volume["name"], volume["projected"]["defaultMode"]) == (mount["name"], 0o400)
    signed = Authority(tmp_path).signs("agent")
    for file in ("gateway", "observer"):
        token_file(tmp_path, file, file * 3)
    signed.cert_file.rename(tmp_path / "tls.crt")
    signed.key_file.rename(tmp_path / "tls.key")
    mounted = {
        item["path"] for s in volume["projected"]["sources"] for item in s["secret"]["items"]
    }
    environment = {
        each["name"]: each["value"].replace(mount["mountPath"], str(tmp_path))
        for each in container["env"]
    }
    assert mounted == {Path(each).name for each in environment.values() if "/" in each}
    agent = tmp_path / "agent.yaml"
    agent.write_text(objects["ConfigMap"]["data"]["agent.yaml"])
    loaded = read_agent_config(agent, environment=environment)
    http = loaded.config.http
    assert (loaded.notes, http.host, http.plain_http) == ((), "0.0.0.0", False)
    assert http.tls is not None
    http.tls.context()
    assert http.observer_token_file == tmp_path / "observer"
    assert container["ports"] == [{"name": "agent", "containerPort": http.port}]


async def test_the_probe_of_a_monitored_agent_asks_over_tls(
    patched: Object, tmp_path: Path
) -> None:
    async def healthy(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/healthz", healthy)])
    python, *arguments = patched["containers"][0]["livenessProbe"]["exec"]["command"]
    assert python == "python3"
    async with serving(app) as runner:
        url = await listen(runner, "127.0.0.1", 0, remedy="", tls=Authority(tmp_path).server("s"))
        command = [word.replace("https://127.0.0.1:9711", url) for word in arguments]
        assert command != arguments
        probe = await asyncio.create_subprocess_exec(sys.executable, *command)
        assert await probe.wait() == 0


def test_the_pod_monitor_finds_the_agents_and_the_rules_find_its_series(
    objects: dict[str, Object], patched: Object, monitor: Object
) -> None:
    daemons, spec = objects["DaemonSet"], monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    labels = daemons["spec"]["template"]["metadata"]["labels"]
    assert monitor["metadata"]["namespace"] == daemons["metadata"]["namespace"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert endpoint["port"] in {each["name"] for each in patched["containers"][0]["ports"]}
    assert f'up{{job="{labels[spec["jobLabel"]]}"}}' in RULES.read_text()
    assert endpoint["relabelings"][0]["targetLabel"] == "node"
    sources = patched["volumes"][0]["projected"]["sources"]
    keys = {s["secret"]["name"]: {i["key"] for i in s["secret"]["items"]} for s in sources}
    token, authority = (
        endpoint["authorization"]["credentials"],
        endpoint["tlsConfig"]["ca"]["secret"],
    )
    assert token["key"] in keys[token["name"]]
    assert authority["name"] in keys
    assert token["key"] == "observer", "it takes no lease"


def test_kubectl_renders_the_kustomization(monitor: Object) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    command = ["kubectl", "kustomize", str(FOLDER)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rendered = {each["kind"]: each for each in yaml.safe_load_all(said)}
    assert rendered["PodMonitor"] == monitor
    containers = rendered["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    (agent,) = (each for each in containers if each["name"] == "agent")
    assert {"ROSEMUX_AGENT_NODE", "ROSEMUX_AGENT_HTTP__HOST"} <= {e["name"] for e in agent["env"]}
    assert {"http", "config", "pages", "state"} <= {each["name"] for each in agent["volumeMounts"]}


def test_the_documented_command_makes_a_rule_of_the_rules() -> None:
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"^  (\{ printf .*?) \| kubectl apply -f -$", page, re.M | re.S)
    said = subprocess.run(
        ["bash", "-c", command], check=True, capture_output=True, text=True, cwd=DEPLOY.parent
    ).stdout
    rule = yaml.safe_load(said)
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
