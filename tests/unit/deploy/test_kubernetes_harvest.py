"""The four parties of a harvested slot on Kubernetes (agent, discovery, production, guest) mean the
same files, users and ports, and the guest has no right that it does not need."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import yaml

from deploy.check_expressions import DEPLOY
from harvester.cli.root import main
from harvester.config import AgentConfig
from harvester.config_file import load_agent_config
from harvester.contracts.page import PageDirectory
from harvester.contracts.page.directory import DIRECTORY_VARIABLE, LAUNCH_DIRECTORY
from harvester.contracts.page.owners import OWNERS_VARIABLE
from harvester.contracts.stock_fallback import ROLE_VARIABLE
from harvester.discovery.kubernetes_pods import LABEL, PodList, found_pods
from harvester.discovery.slot_template import SlotTemplate
from harvester.policy.settings import Mode
from tests.certificates import Authority, token_file
from tests.install.page import block
from tests.unit.harvester.cli.test_guest_command import fake_vllm, said

DOCS = DEPLOY.parent / "docs"
FOLDER = DEPLOY / "kubernetes-harvest"
SLOT = "chat"
Object = dict[str, Any]


def documents(name: str) -> list[Object]:
    return [*yaml.safe_load_all((FOLDER / name).read_text())]


def patches() -> dict[str, Object]:
    """The overlay's patches of the agents, by kind."""
    (written,) = documents("kustomization.yaml")
    parsed = [yaml.safe_load(each["patch"]) for each in written["patches"]]
    return {each["kind"]: each for each in parsed}


def agents_pod() -> tuple[Object, dict[str, Object]]:
    """The agents' pod of ../kubernetes, and its containers by name."""
    objects = yaml.safe_load_all((DEPLOY / "kubernetes" / "agent.yaml").read_text())
    (pod,) = (o["spec"]["template"]["spec"] for o in objects if o["kind"] == "DaemonSet")
    return pod, {each["name"]: each for each in pod["containers"]}


GUEST = {each["kind"]: each for each in documents("guest.yaml")}
GUEST_POD = GUEST["DaemonSet"]["spec"]["template"]["spec"]
CONTAINERS = {each["name"]: each for each in GUEST_POD["containers"]}
(PATCH,) = documents("production.yaml")
(PRODUCTION,) = PATCH["spec"]["template"]["spec"]["containers"]
VARIABLES = {each["name"]: each["value"] for each in PRODUCTION["env"]}
FILES = patches()["ConfigMap"]["data"]


def slot_of(*gpus: str, **annotations: str) -> Object:
    """The slot that discovery makes of a pod with production's patch, which states that it runs on
    `gpus`."""
    metadata = {
        "name": "chat-0",
        "annotations": {f"rosemux.dev/{k}": v for k, v in annotations.items()},
    }
    pod = {
        "metadata": PATCH["spec"]["template"]["metadata"] | metadata,
        "spec": {"nodeName": "node-1", "containers": [{"ports": [{"containerPort": 8000}]}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1", "hostIP": "192.0.2.21"},
    }
    listed = msgspec.json.decode(msgspec.json.encode({"items": [pod]}), type=PodList)
    (engine,) = found_pods(listed, label=LABEL)
    template = SlotTemplate(yaml.safe_load(FILES["slot.yaml"]))
    slots, faults = template.slots([engine], lambda _slot, _engine: gpus)
    assert faults == []
    return slots[SLOT]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    def write(**replaced: str) -> Path:
        """agent.yaml with the slot that discovery has written, as the guest's pod reads both."""

        def local(text: str) -> str:
            for old, new in replaced.items():
                text = text.replace(old, new)
            return text

        slots, agent = tmp_path / "slots.yaml", tmp_path / "agent.yaml"
        slots.write_text(local(yaml.safe_dump({"slots": [slot_of()]})))
        agent.write_text(local(FILES["agent.yaml"].replace("/slots/slots.yaml", str(slots))))
        return agent

    return write


@pytest.fixture
def read(config: Callable[..., Path]) -> AgentConfig:
    """As the agent's container reads it."""
    (container,) = patches()["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    return load_agent_config(
        config(), environment={e["name"]: e["value"] for e in container["env"]}
    )


def mounts(pod: Object, container: Object) -> dict[str, Object]:
    """The volumes of a container by their mount path."""
    volumes = {each["name"]: each for each in pod["volumes"]}
    return {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}


def test_a_patched_pod_gives_a_slot_whose_guest_is_reached_by_its_node(read: AgentConfig) -> None:
    (slot,) = read.slots
    assert (slot.name, read.mode, slot.metrics_url) == (SLOT, Mode.OBSERVE, None)
    assert slot.offered_url == "https://192.0.2.21:8443"
    (port,) = CONTAINERS["proxy"]["ports"]
    assert slot.offered_url.endswith(f":{port['hostPort']}")
    assert f"--port={port['containerPort']}" in CONTAINERS["proxy"]["args"]
    assert f"--engine={slot.engine_url}" in CONTAINERS["proxy"]["args"]
    (listed,) = patches()["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert {each["hostPort"] for each in listed["ports"]} == {read.http.port}


def test_production_and_guest_are_the_users_that_the_agent_believes(read: AgentConfig) -> None:
    (slot,) = read.slots
    owners = read.owners_of(slot)
    assert owners.variable() == {OWNERS_VARIABLE: VARIABLES[OWNERS_VARIABLE]}
    assert owners.guest == {CONTAINERS["guest"]["securityContext"]["runAsUser"]}
    _, agents = agents_pod()
    assert owners.agent == {agents["agent"]["securityContext"]["runAsUser"]}
    pods = (
        GUEST_POD,
        PATCH["spec"]["template"]["spec"],
        patches()["DaemonSet"]["spec"]["template"]["spec"],
    )
    groups = [pod["securityContext"]["supplementalGroups"] for pod in pods]
    assert groups == [[read.page_gid]] * 3


def test_all_parties_see_the_same_directories_of_the_node(read: AgentConfig) -> None:
    (slot,) = read.slots
    pages = str(read.pages_of(slot))
    pod, agents = agents_pod()
    changed = patches()["DaemonSet"]["spec"]["template"]["spec"]["volumes"]
    pod["volumes"] = [*pod["volumes"], *changed]  # The last of a name counts.
    agent, discover = (mounts(pod, agents[name]) for name in ("agent", "discover"))
    guest = mounts(GUEST_POD, CONTAINERS["guest"])
    production = mounts(PATCH["spec"]["template"]["spec"], PRODUCTION)
    assert VARIABLES[DIRECTORY_VARIABLE] == pages
    assert VARIABLES[ROLE_VARIABLE] == "production"
    assert agent[str(read.page_root)]["hostPath"]["path"] == str(read.page_root)
    for path in (pages, f"{read.page_root}/{LAUNCH_DIRECTORY}"):
        assert guest[path]["hostPath"] == {"path": path, "type": "Directory"}, "made by the agent"
    assert production[pages]["hostPath"]["path"] == pages
    slots_file = agents["discover"]["args"][-1]
    assert yaml.safe_load(FILES["agent.yaml"])["slots_file"] == slots_file
    folder = str(Path(slots_file).parent)
    assert {m[folder]["hostPath"]["path"] for m in (agent, discover, guest)} == {
        "/run/rosemux-discover"
    }
    assert agent["/etc/rosemux"] == discover["/etc/rosemux"] == guest["/etc/rosemux"]
    assert slot.guest is not None
    assert "/srv" in guest
    assert all(each.is_relative_to("/srv") for each in (slot.guest.model, slot.guest.weights))
    used = {each["name"] for c in CONTAINERS.values() for each in c["volumeMounts"]}
    assert {each["name"] for each in GUEST_POD["volumes"]} == used


def test_the_guest_of_the_template_would_start_from_its_pod(
    config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf 'GPU-1, Default\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "300")
    fake_vllm(tmp_path / "fake", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/fake:{os.environ.get('PYTHONPATH', '')}")
    for each in CONTAINERS["guest"]["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    (tmp_path / "models/policy").mkdir(parents=True)
    (tmp_path / "models/policy/config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    (tmp_path / "weights").mkdir()
    own, group = str(os.geteuid()), os.getegid()
    users = {"[0]": f"[{own}]", "47101": own, "47100": str(group)}
    file = config(**{"/srv": str(tmp_path), "/run/rosemux": str(tmp_path / "pages"), **users})
    PageDirectory.create(tmp_path / "pages" / SLOT, group=group)
    rosemux, command, *arguments = CONTAINERS["guest"]["command"]
    assert (rosemux, command, arguments[0]) == ("rosemux", "guest", "--config")
    code, shown = said(file, capsys, *arguments[2:])
    assert code == 0, shown
    assert "time-slicing │ taken" in shown
    assert "CUDA_VISIBLE_DEVICES=GPU-1 " in shown
    owners = VARIABLES[OWNERS_VARIABLE].replace("47101", own).replace(":0", f":{own}")
    assert f"production needs, with one restart: {OWNERS_VARIABLE}={owners}" in shown
    program.write_text("#!/bin/sh\nprintf 'GPU-1, Default\\nGPU-2, Default\\n'\n")
    code, shown = said(file, capsys, *arguments[2:])
    assert (code, "until production states its own, out of GPU-1, GPU-2" in shown) == (75, True)


def test_the_guest_of_a_node_with_several_gpus_gets_those_of_production() -> None:
    assert slot_of("GPU-2", "GPU-3")["guest"]["gpus"] == ["GPU-2", "GPU-3"]
    assert slot_of(gpu="GPU-2")["guest"]["gpus"] == ["GPU-2"], "where production states none"
    assert "gpus" not in slot_of()["guest"]


def test_discovery_reads_production_s_pages_as_the_agent_does(read: AgentConfig) -> None:
    _, agents = agents_pod()
    pod, _ = agents_pod()
    discover = mounts(pod, agents["discover"])
    arguments = agents["discover"]["args"]
    config = Path(arguments[arguments.index("--config") + 1])
    assert discover[str(config.parent)]["configMap"]["name"] == "rosemux-agent"
    assert config.name in FILES
    assert discover[str(read.page_root)] == mounts(pod, agents["agent"])[str(read.page_root)]
    (pages,) = (
        each
        for each in agents["discover"]["volumeMounts"]
        if each["mountPath"] == str(read.page_root)
    )
    assert pages["readOnly"], "it reads only"


def test_the_commands_take_their_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        main([*CONTAINERS["guest"]["command"][1:], "--help"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in CONTAINERS["guest"]["command"] if word.startswith("--"))
    # The proxy's settings are judged before it listens.
    started = list[object]()

    def run(proxy: Coroutine[Any, Any, None]) -> None:
        started.append(proxy)
        proxy.close()

    monkeypatch.setattr(uvloop, "run", run)
    signed = Authority(tmp_path).signs("node")
    signed.cert_file.rename(tmp_path / "tls.crt")
    signed.key_file.rename(tmp_path / "tls.key")
    # The proxy reads it as a member of the pod's fsGroup.
    for name in ("gateway", "data"):
        token_file(tmp_path, name, name[0] * 24).chmod(0o440)
    rosemux, *arguments = CONTAINERS["proxy"]["args"]
    (mount,) = CONTAINERS["proxy"]["volumeMounts"]
    assert rosemux == "rosemux"
    with pytest.raises(SystemExit) as left:
        main([each.replace(mount["mountPath"], str(tmp_path)) for each in arguments])
    assert (left.value.code or 0, len(started)) == (0, 1)
    (volume,) = (
        each["projected"] for each in GUEST_POD["volumes"] if each["name"] == mount["name"]
    )
    secrets = {item["path"] for each in volume["sources"] for item in each["secret"]["items"]}
    asked = {Path(each).name for each in arguments if mount["mountPath"] in each}
    assert (secrets, volume["defaultMode"]) == (asked, 0o440)


def test_the_guest_has_no_right_that_it_does_not_need() -> None:
    for each in CONTAINERS.values():
        context = each["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context["allowPrivilegeEscalation"]
        assert context["readOnlyRootFilesystem"]
        assert "privileged" not in context
        assert "resources" not in each, "BestEffort: the kernel ends it before production"
    assert GUEST_POD["automountServiceAccountToken"] is False
    assert GUEST_POD["securityContext"]["runAsNonRoot"]
    assert "hostNetwork" not in GUEST_POD
    guest, proxy = (CONTAINERS[name]["securityContext"]["runAsUser"] for name in ("guest", "proxy"))
    assert (guest != proxy, GUEST_POD["securityContext"]["fsGroup"]) == (True, proxy)
    assert not any("rosemux-proxy" in path for path in mounts(GUEST_POD, CONTAINERS["guest"]))
    writable = {
        each["mountPath"]
        for each in CONTAINERS["guest"]["volumeMounts"]
        if not each.get("readOnly") and not each["mountPath"].startswith(("/tmp", "/dev"))
    }
    assert writable == {f"/run/rosemux/{SLOT}", f"/run/rosemux/{LAUNCH_DIRECTORY}"}


def test_an_agent_asks_the_guest_in_another_pod_what_it_serves(read: AgentConfig) -> None:
    """The guest's proxy answers, to a token that changes nothing."""
    assert read.guests is not None
    assert read.guests.server_name in (FOLDER / "kustomization.yaml").read_text()
    spec = patches()["DaemonSet"]["spec"]["template"]["spec"]
    (agent,) = spec["containers"]
    (mount,) = agent["volumeMounts"]
    (volume,) = (each["projected"] for each in spec["volumes"] if each["name"] == mount["name"])
    items = [item for source in volume["sources"] for item in source["secret"]["items"]]
    files = {f"{mount['mountPath']}/{item['path']}" for item in items}
    assert {str(read.guests.token_file), str(read.guests.ca_file)} == files
    (data,) = (a for a in CONTAINERS["proxy"]["args"] if a.startswith("--data-token-file="))
    assert Path(data).name == Path(str(read.guests.token_file)).name
    assert not read.guests.exposed_at(read.slots[0].offered_url)


def test_a_guest_gives_way_to_every_pod_and_has_the_time_that_its_unit_has() -> None:
    priority = GUEST["PriorityClass"]
    assert GUEST_POD["priorityClassName"] == priority["metadata"]["name"]
    assert (priority["value"] < 0, priority["preemptionPolicy"]) == (True, "Never")
    unit = (DEPLOY / "systemd" / "rosemux-guest@.service").read_text()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)s$", unit, re.M)
    assert GUEST_POD["terminationGracePeriodSeconds"] == int(stop_s)


def test_the_network_leads_to_the_proxy_alone_and_nowhere_from_the_guest() -> None:
    policy = GUEST["NetworkPolicy"]["spec"]
    labels = GUEST["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert (policy["policyTypes"], "egress" in policy) == (["Ingress", "Egress"], False)
    (port,) = CONTAINERS["proxy"]["ports"]
    assert policy["ingress"] == [{"ports": [{"port": port["containerPort"]}]}]
    assert CONTAINERS["proxy"]["livenessProbe"]["httpGet"]["port"] == port["name"]
    assert LABEL not in labels, "discovery would take it for production"


def kubectl(*arguments: str | Path) -> list[Object]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    command = ["kubectl", *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [*yaml.safe_load_all(done.stdout)]


def test_kubectl_renders_agents_that_share_their_slots_with_guests() -> None:
    rendered = kubectl("kustomize", FOLDER)
    pods = {
        o["metadata"]["name"]: o["spec"]["template"]["spec"]
        for o in rendered
        if o["kind"] == "DaemonSet"
    }
    pod = pods["rosemux-agent"]
    (slots,) = (each for each in pod["volumes"] if each["name"] == "slots")
    assert slots == {
        "name": "slots",
        "hostPath": {"path": "/run/rosemux-discover", "type": "DirectoryOrCreate"},
    }
    (agent,) = (each for each in pod["containers"] if each["name"] == "agent")
    assert agent["ports"] == [{"name": "agent", "containerPort": 9711, "hostPort": 9711}]
    modes = [each["value"] for each in agent["env"] if each["name"] == "ROSEMUX_AGENT_MODE"]
    assert modes == ["observe"]
    (files,) = (each["data"] for each in rendered if each["kind"] == "ConfigMap")
    assert {name: text.strip() for name, text in files.items()} == {
        name: text.strip() for name, text in FILES.items()
    }
    assert pods[GUEST["DaemonSet"]["metadata"]["name"]] == GUEST_POD


def test_kubectl_patches_a_deployment_and_leaves_what_it_has(tmp_path: Path) -> None:
    container = {
        "name": PRODUCTION["name"],
        "image": "vllm",
        "args": ["--model", "x"],
        "env": [{"name": "HF_HOME", "value": "/models"}],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    pod = {"containers": [container], "volumes": [{"name": "models", "emptyDir": {}}]}
    labels = {"app": "chat"}
    template = {"metadata": {"labels": labels}, "spec": pod}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat"},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment))
    patch = ("--patch-file", FOLDER / "production.yaml")
    (patched,) = kubectl("patch", "--local", "--filename", file, *patch, "--output", "yaml")
    changed = patched["spec"]["template"]
    assert changed["metadata"]["labels"] == {**labels, LABEL: SLOT}
    (one,) = changed["spec"]["containers"]
    assert (one["args"], one["image"]) == (container["args"], PRODUCTION["image"])
    assert {each["name"] for each in one["env"]} == {"HF_HOME", *VARIABLES}
    assert {each["name"] for each in changed["spec"]["volumes"]} == {"models", "rosemux-pages"}


def test_the_documented_commands_name_what_the_files_have() -> None:
    commands = block("On Kubernetes")
    paths = re.findall(r"deploy/kubernetes-harvest(?:/\S+)?", commands)
    assert len(paths) >= 3
    assert all((DEPLOY.parent / path).exists() for path in paths)
    targets = re.findall(r"^FROM \S+ AS (\S+)$", (FOLDER / "Dockerfile").read_text(), re.M)
    (built,) = re.findall(r"for target in ([\w ]+);", commands)
    assert {*built.split()} == {*targets} - {"wheels"}
    images = {each["image"] for each in (*CONTAINERS.values(), PRODUCTION)}
    assert images == {f"rosemux-{target}:latest" for target in built.split()}
    named = {*re.findall(r"(?:daemonset|ds)/(\S+)", commands)}
    assert named == {"rosemux-agent", GUEST["DaemonSet"]["metadata"]["name"]}
    labels = {*re.findall(r"rosemux\.dev/\w+=\S+", commands)}
    assert labels == {"rosemux.dev/serving=true", f"rosemux.dev/guest={SLOT}"}
    assert GUEST_POD["nodeSelector"] == {"rosemux.dev/guest": SLOT}
    assert "ROSEMUX_AGENT_MODE=harvest" in commands


def test_the_documented_names_of_servers_are_those_of_the_certificates() -> None:
    """A certificate of an agent or a guest names no address: pods and nodes come and go."""
    documented = {*re.findall(r"server_name: ([\w.-]+)`", (DOCS / "install.md").read_text())}
    required = "\n".join(
        (DEPLOY / name / "kustomization.yaml").read_text()
        for name in ("kubernetes", "kubernetes-harvest")
    )
    certified = {*re.findall(r"tls\.key for the name ([\w.-]+)[,;]", required)}
    assert documented == certified == {"rosemux-agent.rosemux", "rosemux-guest.rosemux"}
    monitored = (DEPLOY / "kubernetes" / "monitoring.yaml").read_text()
    assert {*re.findall(r"serverName: (\S+)", monitored)} <= certified
