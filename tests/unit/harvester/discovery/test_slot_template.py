"""Slots of found engines: what a template gives, what has no slot and why, what is kept."""

from typing import Any

import pytest

from harvester.config import AgentConfig
from harvester.contracts.errors import ConfigError
from harvester.discovery.slot_template import DiscoveredEngine, KeptSlots, SlotTemplate

TEMPLATE: dict[str, Any] = {
    "engine_url": "http://127.0.0.1:1$port",
    "metrics_url": "http://$host:$port/metrics",
    "model": "policy of $name for $$1",
    "concurrency": 8,
    "guest": {
        "model": "/srv/models/${name}",
        "weights": "/srv/weights",
        "context_tokens": 4096,
        "kv_cache_bytes": 1,
        "arguments": ["--seed", "$port"],
    },
}


def engine(slot: str = "chat", **fields: Any) -> DiscoveredEngine:
    return DiscoveredEngine(slot=slot, origin=f"unit of {slot}", **{"port": "8001", **fields})


def test_the_engine_s_own_values_are_filled_everywhere() -> None:
    fields = SlotTemplate(TEMPLATE).slot(engine(host="10.0.0.7"))
    assert fields == {
        "name": "chat",
        "engine_url": "http://127.0.0.1:18001",
        "metrics_url": "http://10.0.0.7:8001/metrics",
        "model": "policy of chat for $1",
        "concurrency": 8,
        "guest": {
            "model": "/srv/models/chat",
            "weights": "/srv/weights",
            "context_tokens": 4096,
            "kv_cache_bytes": 1,
            "arguments": ["--seed", "8001"],
        },
    }


def test_engines_have_more_values_of_their_own() -> None:
    gpus = {"guest": {**TEMPLATE["guest"], "gpus": ["$gpu"]}}
    template = SlotTemplate(gpus)
    assert template.slot(engine(values={"gpu": "GPU-1"}))["guest"]["gpus"] == ["GPU-1"]
    slots, faults = template.slots([engine("a", values={"gpu": "GPU-1"}), engine("b")])
    assert [*slots] == ["a"]
    assert faults == ["unit of b: no value for $gpu, or one that is none"]


@pytest.mark.parametrize(
    "value",
    ["", "../../etc", "80@169.254.169.254:80", "8000?x=y", "a b", "a\nb", "$HOME", "x" * 257],
)
def test_a_value_that_leads_elsewhere_is_none(value: str) -> None:
    slots, faults = SlotTemplate({"model": "$x"}).slots([engine(values={"x": value})])
    assert (slots, len(faults)) == ({}, 1)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-1", "8000/..", "8e3", "٣"])
def test_a_number_that_is_no_port_is_none(port: str) -> None:
    slots, faults = SlotTemplate({"metrics_url": "http://$host:$port/metrics"}).slots(
        [engine(port=port)]
    )
    assert (slots, len(faults)) == ({}, 1)


def test_the_agent_takes_the_slots_of_any_engines_as_a_whole() -> None:
    engines = [engine(name) for name in ("kill", "stop", "a", "b")]
    engines += [engine(f"more{number}") for number in range(300)]
    slots, faults = SlotTemplate({"model": "m"}).slots(engines)
    AgentConfig.model_validate({"slots": [*slots.values()]})
    assert not {"kill", "stop"} & slots.keys()
    assert len(slots) == 256
    assert len(faults) == 48


def test_two_engines_of_one_slot_with_pages_of_their_own_are_one() -> None:
    template = SlotTemplate({"pages": "/run/rosemux/$gpu"})
    engines = [engine("a", values={"gpu": f"GPU-{number}"}) for number in range(2)]
    slots, faults = template.slots(engines)
    assert slots["a"]["pages"] == "/run/rosemux/GPU-0"
    assert faults == ["unit of a: slot a belongs to unit of a"]


def test_two_slots_on_one_page_directory_are_one() -> None:
    template = SlotTemplate({"pages": "/run/rosemux/$gpu"})
    gpu = {"gpu": "GPU-1"}
    slots, faults = template.slots([engine("a", values=gpu), engine("b", values=gpu)])
    assert [*slots] == ["a"]
    assert faults == ["unit of b: slot b belongs to unit of a"]
    kept = KeptSlots({"old": template.slot(engine("old", values=gpu))}, forget_s=60.0)
    assert names(kept.observe(slots, now=0.0)) == ["a"]


def test_an_engine_s_own_values_hide_neither_its_name_nor_its_address() -> None:
    template = SlotTemplate({"model": "$name $host"})
    found = engine(values={"name": "other", "host": "10.9.9.9"})
    assert template.slot(found)["model"] == "chat 127.0.0.1"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ({"name": "slot0"}, "leave it out"),
        ({"models": "m"}, "models: Extra inputs are not permitted"),
        ({"engine_url": "ftp://$host"}, "engine_url: use http"),
        ({"model": "50 $"}, "write $$ for a dollar"),
        ({"policy": {"beat_s": "soon"}}, "policy.beat_s"),
        ({"policy": {"grant_ttl_s": 60}}, "policy.grant_ttl_s"),
        ({"engine_url": "http://127.0.0.1:1$port$port"}, "engine_url"),
    ],
)
def test_a_template_that_no_engine_could_have_is_refused(
    template: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SlotTemplate(template)
    assert says in str(caught.value)


def test_an_engine_without_a_slot_leaves_the_others_theirs() -> None:
    engines = [
        engine("a"),
        engine("../b"),
        engine(""),
        engine("x" * 65),
        engine("c", port=""),
        engine("d", port="no port"),
        DiscoveredEngine(slot="a", origin="another", port="1"),
        engine("e"),
    ]
    slots, faults = SlotTemplate({"metrics_url": "http://$host:$port/metrics"}).slots(engines)
    assert [*slots] == ["a", "e"]
    assert slots["a"]["metrics_url"] == "http://127.0.0.1:8001/metrics"
    assert [fault.partition(":")[0] for fault in faults] == [
        "unit of ../b",
        "unit of ",
        f"unit of {'x' * 65}",
        "unit of c",
        "unit of d",
        "another",
    ]
    assert faults[-1] == "another: slot a belongs to unit of a"


def test_two_engines_of_one_bad_slot_name_are_two_faults() -> None:
    slots, faults = SlotTemplate({}).slots([engine("-"), engine("-")])
    assert (slots, len(faults)) == ({}, 2)


def names(slots: list[dict[str, Any]]) -> list[str]:
    return [slot["name"] for slot in slots]


def test_a_missing_engine_keeps_its_slot_for_a_while() -> None:
    a, b = {"name": "a"}, {"name": "b"}
    kept = KeptSlots({"old": {"name": "old"}}, forget_s=60.0)
    assert names(kept.observe({"b": b, "a": a}, now=10.0)) == ["a", "b", "old"]
    assert names(kept.observe({"b": b}, now=50.0)) == ["a", "b", "old"]
    assert names(kept.observe({"b": b}, now=69.0)) == ["a", "b", "old"]
    assert names(kept.observe({"b": b}, now=70.0)) == ["a", "b"]
    assert names(kept.observe({"a": a}, now=100.0)) == ["a", "b"]
    assert names(kept.observe({"a": a}, now=159.0)) == ["a", "b"]
    assert names(kept.observe({"a": a}, now=160.0)) == ["a"]


def test_an_engine_that_comes_back_is_missing_anew_the_next_time() -> None:
    kept = KeptSlots({}, forget_s=60.0)
    a = {"a": {"name": "a"}}
    for now, found in ((0.0, a), (10.0, {}), (60.0, a), (70.0, {})):
        assert names(kept.observe(found, now=now)) == ["a"]
    assert names(kept.observe({}, now=129.0)) == ["a"]
    assert names(kept.observe({}, now=130.0)) == []


def test_a_slot_that_is_found_again_has_its_new_fields_at_once() -> None:
    kept = KeptSlots({}, forget_s=0.0)
    old, new = {"name": "a", "model": "x"}, {"name": "a", "model": "y"}
    assert kept.observe({"a": old}, now=1.0) == [old]
    assert kept.observe({"a": new}, now=2.0) == [new]
    assert kept.observe({}, now=2.0) == []
