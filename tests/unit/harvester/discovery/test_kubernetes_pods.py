"""Engines among the pods of a node."""

from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from harvester.contracts.errors import ConfigError
from harvester.discovery.kubernetes_pods import LABEL, PodList, found_pods, pods_path
from harvester.discovery.slot_template import DiscoveredEngine


def pod(name: str, *, slot: str = "chat", **changes: Any) -> dict[str, Any]:
    """A pod as the API writes it, with fields that no part of this project reads."""
    metadata = {
        "name": name,
        "namespace": "serving",
        "uid": "1",
        "labels": {LABEL: slot, "app": "vllm"},
        "annotations": {"rosemux.dev/guest-port": "8003", "other/x": "y"},
        **changes.pop("metadata", {}),
    }
    ports = [{"containerPort": 8000, "protocol": "TCP"}, {"containerPort": 9}]
    spec = {"nodeName": "n", "containers": [{"name": "log"}, {"name": "vllm", "ports": ports}]}
    status = {"phase": "Running", "podIP": "10.1.2.3", "podIPs": [{"ip": "10.1.2.3"}]}
    status |= {"hostIP": "192.0.2.21"}
    return {"metadata": metadata, "spec": spec, "status": status | changes}


def found(*pods: dict[str, Any], label: str = LABEL) -> list[DiscoveredEngine]:
    listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [*pods]}
    return found_pods(msgspec.json.decode(msgspec.json.encode(listed), type=PodList), label=label)


def test_a_pod_is_an_engine_with_its_own_values() -> None:
    assert found(pod("a")) == [
        DiscoveredEngine(
            slot="chat",
            origin="pod serving/a",
            instance="1",
            host="10.1.2.3",
            port="8000",
            values={"guest_port": "8003", "node": "n", "node_ip": "192.0.2.21"},
        )
    ]


def test_its_annotation_names_the_port_before_its_containers_do() -> None:
    annotated = {"annotations": {"rosemux.dev/port": "8443"}}
    assert found(pod("a", metadata=annotated))[0].port == "8443"


def test_a_pod_of_ipv6_has_a_host_for_urls() -> None:
    engine = found(pod("a", podIP="fd00::7", hostIP="fd00::1"))[0]
    assert (engine.host, engine.values["node_ip"]) == ("[fd00::7]", "[fd00::1]")


def test_its_node_is_the_one_that_it_runs_on_whatever_its_annotations_say() -> None:
    annotated = {"annotations": {"rosemux.dev/node": "other", "rosemux.dev/node-ip": "192.0.2.9"}}
    assert found(pod("a", metadata=annotated))[0].values == {"node": "n", "node_ip": "192.0.2.21"}


def test_a_pod_that_ends_makes_room_for_its_successor() -> None:
    ends = pod("a", metadata={"deletionTimestamp": "2026-11-28T00:00:00Z"})
    assert [each.origin for each in found(ends, pod("b"))] == ["pod serving/b"]
    assert found(pod("c", phase="Pending"), pod("d", phase="Succeeded")) == []


def test_pods_come_in_the_order_of_their_names() -> None:
    assert [each.origin[-1] for each in found(pod("b"), pod("a"))] == ["a", "b"]


def test_a_list_without_pods_may_be_null() -> None:
    raw = b'{"kind": "PodList", "items": null}'
    assert found_pods(msgspec.json.decode(raw, type=PodList), label=LABEL) == []


def test_the_api_is_asked_for_the_running_pods_of_one_node() -> None:
    asked = urlsplit(pods_path(node="node-1.example", label=LABEL))
    assert asked.path == "/api/v1/pods"
    query = parse_qs(asked.query)
    assert query["fieldSelector"] == ["spec.nodeName=node-1.example,status.phase=Running"]
    assert query["labelSelector"] == [LABEL]
    one = urlsplit(pods_path(node="n", label="slot", namespace="serving"))
    assert one.path == "/api/v1/namespaces/serving/pods"


@pytest.mark.parametrize(
    "given",
    [
        {"node": "n,spec.x=y"},
        {"node": "n", "label": "a=b"},
        {"node": "n", "namespace": "../secrets?"},
    ],
)
def test_a_name_with_more_in_it_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is no name of Kubernetes"):
        pods_path(**{"label": LABEL, **given})
