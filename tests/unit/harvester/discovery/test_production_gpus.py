"""GPUs of discovered slots: as production states them, or as an annotation names them."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harvester.config import AgentConfig
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageDirectory, PageWriter, Pulse
from harvester.contracts.process import ProcessId
from harvester.discovery.production_gpus import ProductionGpus
from harvester.discovery.slot_template import DiscoveredEngine, KeptSlots, SlotTemplate
from tests.virtual_clock import VirtualClock

TEMPLATE: dict[str, Any] = {
    "guest": {"model": "/m", "weights": "/w", "context_tokens": 1, "kv_cache_bytes": 1}
}
HOUR_NS = 3_600_000_000_000


class Node:
    """The pages of a node, and a discovery that reads them."""

    def __init__(self, root: Path, last: Mapping[str, tuple[str, ...]] | None = None) -> None:
        config = AgentConfig.model_validate({"page_root": root, "slots_file": root / "slots.yaml"})
        self.root, self.template = root, SlotTemplate(TEMPLATE)
        self.clock = VirtualClock()
        self.stated = ProductionGpus(config, last=last, clock=self.clock)
        self._pages: list[PageWriter[Pulse]] = []

    def serves(
        self,
        slot: str,
        *gpus: str,
        process: int = 0,
        start: int = 1,
        engine: str = "production",
        ttl_ns: int = HOUR_NS,
    ) -> PageWriter[Pulse]:
        """An API server beats; `start`: when its engine began."""
        directory = self.root / slot
        directory.mkdir(mode=0o755, exist_ok=True)
        page = PageDirectory(directory).pulse_writer(engine, process)
        pulse = Pulse(gpus=gpus, root=ProcessId(pid=7, start_ticks=start))
        page.write(pulse, now_ns=monotonic_ns(), ttl_ns=ttl_ns)
        self._pages.append(page)
        return page

    def slots(self, *engines: DiscoveredEngine) -> tuple[dict[str, Any], list[str]]:
        return self.template.slots(engines, self.stated)

    def gpus(self, *engines: DiscoveredEngine) -> dict[str, Any]:
        slots, faults = self.slots(*engines)
        assert faults == []
        return {name: slot["guest"].get("gpus") for name, slot in slots.items()}

    def close(self) -> None:
        for page in self._pages:
            page.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def pod(slot: str = "chat", *, name: str = "", uid: str = "1", **own: str) -> DiscoveredEngine:
    return DiscoveredEngine(slot=slot, origin=f"pod s/{name or slot}", instance=uid, values=own)


def test_a_guest_gets_the_gpus_that_production_states(node: Node) -> None:
    node.serves("chat", "GPU-2", "GPU-3")
    node.serves("code", "GPU-0")
    assert node.gpus(pod("chat"), pod("code")) == {"chat": ["GPU-2", "GPU-3"], "code": ["GPU-0"]}


def test_a_slot_is_there_before_production_has_stated_its_gpus(node: Node) -> None:
    """The agent makes its page directory, without which production cannot state anything."""
    assert node.gpus(pod()) == {"chat": None}
    node.serves("chat")
    assert node.gpus(pod()) == {"chat": None}, "a CPU"


def test_an_annotation_counts_where_production_states_nothing(node: Node) -> None:
    node.serves("chat")
    assert node.gpus(pod(gpu="GPU-5,GPU-6")) == {"chat": ["GPU-5", "GPU-6"]}
    node.serves("code", "GPU-0", "GPU-1")
    assert node.gpus(pod("code", gpu="GPU-1")) == {"code": ["GPU-1"]}, "a guest on one of two"


def test_an_annotation_that_production_contradicts_gives_no_slot(node: Node) -> None:
    node.serves("chat", "GPU-2")
    slots, (fault,) = node.slots(pod(gpu="GPU-1"))
    assert slots == {}
    assert fault.startswith("pod s/chat: GPU-1 is named as its GPU, and production runs on GPU-2")


@pytest.mark.parametrize("named", ["GPU-1 GPU-2", "GPU-1,0", "GPU-" + "x" * 99, "GPU-$x"])
def test_an_annotation_that_is_no_uuid_gives_no_slot(node: Node, named: str) -> None:
    slots, (fault,) = node.slots(pod(gpu=named))
    assert (slots, "is no GPU's UUID" in fault) == ({}, True)


@pytest.mark.parametrize("placed", ["0", "all", "../GPU-1", "$x"])
def test_a_value_for_a_placeholder_names_no_gpu(node: Node, placed: str) -> None:
    """A template may have `memory_group: /sys/fs/cgroup/gpu$gpu`."""
    assert node.gpus(pod(gpu=placed)) == {"chat": None}
    node.serves("chat", "GPU-2")
    assert node.gpus(pod(gpu=placed)) == {"chat": ["GPU-2"]}


@pytest.mark.parametrize("stated", ["", "0", "MIG-1", "GPU-1\x1b[2J", "GPU-" + "x" * 61, "GPU-1\n"])
def test_another_text_than_a_uuid_states_nothing(node: Node, stated: str) -> None:
    node.serves("chat", "GPU-1", stated)
    assert node.gpus(pod()) == {"chat": None}


def test_api_servers_of_an_engine_state_its_gpus_together(node: Node) -> None:
    for process, gpu in enumerate(("GPU-0", "GPU-1")):
        node.serves("chat", gpu, process=process)
    assert node.gpus(pod()) == {"chat": ["GPU-0", "GPU-1"]}
    node.serves("chat", process=2)
    assert node.gpus(pod()) == {"chat": None}, "one does not know"


def test_an_engine_that_falls_silent_keeps_its_gpus_and_its_successor_does_not(node: Node) -> None:
    node.serves("chat", "GPU-2").close(unlink=True)
    page = node.serves("chat", "GPU-2")
    assert node.gpus(pod()) == {"chat": ["GPU-2"]}
    page.close(unlink=True)
    assert node.gpus(pod()) == {"chat": ["GPU-2"]}, "its container may start again"
    assert node.gpus(pod(uid="2")) == {"chat": None}, "another pod of that name"


def test_a_process_that_is_silent_for_a_while_keeps_its_gpu_in_the_slot(node: Node) -> None:
    node.serves("chat", "GPU-0", start=1)
    beating = node.serves("chat", "GPU-1", process=1, start=2)
    assert node.gpus(pod()) == {"chat": ["GPU-0", "GPU-1"]}
    beating.close()
    silent = node.serves("chat", "GPU-1", process=1, start=2, ttl_ns=1)
    for _ in range(2):
        assert node.gpus(pod()) == {"chat": ["GPU-0", "GPU-1"]}
    silent.close()
    again = node.serves("chat", "GPU-2", process=1, start=3)
    assert node.gpus(pod()) == {"chat": ["GPU-0", "GPU-2"]}
    again.close(unlink=True)
    node.serves("chat", "GPU-9", process=1, start=4, ttl_ns=1)
    assert node.gpus(pod()) == {"chat": ["GPU-0"]}, "what an older engine has left"


def test_a_unit_that_states_nothing_yet_keeps_the_gpus_that_were_written_last(
    tmp_path: Path,
) -> None:
    """Discovery has started anew. A pod may have taken the place of another meanwhile."""
    node = Node(tmp_path, last={"chat": ("GPU-2",), "code": ("GPU-3",), "talk": ("GPU-4",)})
    unit = DiscoveredEngine(slot="chat", origin="unit chat")
    named = DiscoveredEngine(slot="talk", origin="unit talk", values={"gpu": "GPU-5"})
    assert node.gpus(unit, pod("code"), named) == {
        "chat": ["GPU-2"],
        "code": None,
        "talk": ["GPU-5"],
    }
    node.serves("chat", "GPU-1")
    assert node.gpus(unit) == {"chat": ["GPU-1"]}
    node.close()


def test_a_successor_that_began_beside_its_predecessor_is_believed_in_the_end(node: Node) -> None:
    page = node.serves("chat", "GPU-2", start=1, engine="a")
    assert node.gpus(pod(uid="1")) == {"chat": ["GPU-2"]}
    node.serves("chat", "GPU-3", start=2, engine="b")
    assert node.gpus(pod(uid="1")) == {"chat": ["GPU-2", "GPU-3"]}
    assert node.gpus(pod(uid="2")) == {"chat": None}
    page.close(unlink=True)
    node.clock.now_s = 59.0
    assert node.gpus(pod(uid="2")) == {"chat": None}
    node.clock.now_s = 60.0
    assert node.gpus(pod(uid="2")) == {"chat": ["GPU-3"]}


def test_the_last_beats_of_a_pod_that_ends_are_not_its_successor_s(node: Node) -> None:
    page = node.serves("chat", "GPU-2", start=1)
    assert node.gpus(pod(uid="1")) == {"chat": ["GPU-2"]}
    for _ in range(2):
        assert node.gpus(pod(uid="2")) == {"chat": None}
    page.close(unlink=True)
    node.serves("chat", "GPU-3", start=2)
    assert node.gpus(pod(uid="2")) == {"chat": ["GPU-3"]}


def test_a_pod_without_a_slot_does_not_disturb_the_one_that_has_it(node: Node) -> None:
    node.serves("chat", "GPU-2")
    for _ in range(2):
        slots, faults = node.slots(pod(name="a"), pod(name="b", uid="2"))
        assert slots["chat"]["guest"]["gpus"] == ["GPU-2"]
        assert faults == ["pod s/b: slot chat belongs to pod s/a"]


def test_two_engines_on_one_gpu_have_one_guest_and_the_agent_takes_all_slots(node: Node) -> None:
    """Shared by the device plugin: a gate would know only one of the two productions."""
    for slot, gpu in (("a", "GPU-1"), ("b", "GPU-1"), ("c", "GPU-2")):
        node.serves(slot, gpu)
    slots, faults = node.slots(pod("a"), pod("b"), pod("c"))
    assert [name for name, slot in slots.items() if "guest" in slot] == ["a", "c"]
    assert slots["b"] == {"name": "b"}, "observed"
    assert faults == ["pod s/b: no guest: guest.gpus GPU-1 belongs to pod s/a"]
    AgentConfig.model_validate({"slots": [*slots.values()]})


def test_a_gpu_stays_with_the_engine_that_had_it(node: Node) -> None:
    kept = KeptSlots({}, forget_s=60.0)
    for slots in (("b",), ("a", "b"), ("a", "b")):
        for slot in slots:
            node.serves(slot, "GPU-1").close()
        found, _ = node.template.slots(map(pod, slots), node.stated, first=kept.on_gpus)
        kept.observe(found, now=0.0)
        assert [name for name, slot in found.items() if "guest" in slot] == ["b"]


def test_a_missing_slot_is_not_kept_where_another_has_its_gpu(node: Node) -> None:
    node.serves("a", "GPU-1")
    kept = KeptSlots({}, forget_s=60.0)
    kept.observe(node.slots(pod("a"))[0], now=0.0)
    node.serves("b", "GPU-1")
    assert [slot["name"] for slot in kept.observe(node.slots(pod("b"))[0], now=10.0)] == ["b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user take root")
def test_a_page_of_another_user_states_nothing(node: Node) -> None:
    node.serves("chat", "GPU-2")
    (page,) = (node.root / "chat").glob("pulse.*")
    os.chown(page, 4711, 4711)
    assert node.gpus(pod()) == {"chat": None}
