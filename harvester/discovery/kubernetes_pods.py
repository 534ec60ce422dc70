"""Production engines that are pods of one node, by a label, as the Kubernetes API lists them."""

import re
from urllib.parse import urlencode

import msgspec

from harvester.contracts.errors import ConfigError
from harvester.discovery.slot_template import DiscoveredEngine

LABEL = "rosemux.dev/slot"
_OWN = "rosemux.dev/"
"""Prefix of annotations that fill placeholders: rosemux.dev/guest-port is $guest_port."""
MAX_REPLY_BYTES = 16 << 20
"""Pods are some 10 KB each, and a node has some hundred."""
_MOST_PODS = 500
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,250}[A-Za-z0-9])?")


class _PodMetadata(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion: str = msgspec.field(name="deletionTimestamp", default="")


class _Port(msgspec.Struct):
    number: int = msgspec.field(name="containerPort", default=0)


class _Container(msgspec.Struct):
    ports: list[_Port] = []


class _Spec(msgspec.Struct):
    containers: list[_Container] = []
    node: str = msgspec.field(name="nodeName", default="")


class _PodStatus(msgspec.Struct):
    phase: str = ""
    ip: str = msgspec.field(name="podIP", default="")
    node_ip: str = msgspec.field(name="hostIP", default="")


class _Pod(msgspec.Struct):
    metadata: _PodMetadata = msgspec.field(default_factory=_PodMetadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class PodList(msgspec.Struct):
    items: list[_Pod] | None


def pods_path(*, node: str, label: str, namespace: str = "") -> str:
    """Path and query of the running pods of a node that have the label. Raises ConfigError."""
    for option, given in (("--node", node), ("--label", label), ("--namespace", namespace)):
        if not _NAME.fullmatch(given or "any"):
            raise ConfigError(f"{option} {given}: is no name of Kubernetes")
    fields = f"spec.nodeName={node},status.phase=Running"
    query = {"fieldSelector": fields, "labelSelector": label, "limit": _MOST_PODS}
    where = f"namespaces/{namespace}/" if namespace else ""
    return f"/api/v1/{where}pods?{urlencode(query)}"


def found_pods(pods: PodList, *, label: str) -> list[DiscoveredEngine]:
    """Engines of the pods; the label's value names the slot. A pod that ends has none, so that its
    successor may have its slot."""
    living = [pod for pod in pods.items or () if not pod.metadata.deletion]
    living.sort(key=lambda pod: (pod.metadata.namespace, pod.metadata.name))
    return [_engine(pod, label) for pod in living if pod.status.phase == "Running"]


def _engine(pod: _Pod, label: str) -> DiscoveredEngine:
    annotations = pod.metadata.annotations.items()
    own = {
        key.removeprefix(_OWN).replace("-", "_"): value
        for key, value in annotations
        if key.startswith(_OWN)
    }
    own |= {"node": pod.spec.node, "node_ip": _host_of_url(pod.status.node_ip)}
    ports = [str(port.number) for container in pod.spec.containers for port in container.ports]
    return DiscoveredEngine(
        slot=pod.metadata.labels.get(label, ""),
        origin=f"pod {pod.metadata.namespace}/{pod.metadata.name}",
        instance=pod.metadata.uid,
        host=_host_of_url(pod.status.ip),
        port=own.get("port") or next(iter(ports), ""),
        values=own,
    )


def _host_of_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
