"""An agent's tables on a terminal of 80 columns."""

import msgspec
import pytest
from rich.console import Console

from harvester.cli.agent_tables import agent_sentences, agent_tables
from harvester.contracts.ids import Epoch, NodeId, SlotId
from harvester.contracts.page import Lending
from harvester.contracts.wire.leases import (
    GuardReading,
    IdleForecast,
    SlotOffer,
    SlotOffers,
    SlotState,
)


def offers(scale: int) -> SlotOffers:
    """Two leased slots; `scale` lengthens their names."""
    slots = tuple(
        SlotOffer(
            slot=SlotId(name * scale),
            node=NodeId("node-a"),
            state=SlotState.LEASED,
            mode="harvest",
            slot_state="open",
            tenant="research",
            job="grpo-a" * scale,
            engine_url="http://127.0.0.1:8001",
            model="qwen-3b" * scale,
            isolation="time-slicing",
            floor_bytes=3 << 30,
            epoch=Epoch(1234),
            concurrency=32,
            kv_tokens=1 << 16,
            idle_ratio=0.25,
            headroom_ratio=0.41,
            headroom_age_s=3.0,
            lending=Lending(tokens=128, share_ratio=0.5),
            reason="level_ttft is over its limit " * scale,
            guards=(GuardReading(guard="level_ttft", value=0.3, limit=0.1, binds=True),),
            forecasts=(
                IdleForecast(horizon_s=30.0, low_ratio=0.5, median_ratio=0.7, high_ratio=0.9),
            ),
        )
        for name in ("slot0", "slot1")
    )
    return SlotOffers(
        node=NodeId("node-a"),
        slots=slots,
        restart_needed=("http.port",),
        unopened={"slot2": "page belongs to another user"},
        config_refused="agent.yaml: moed is no field",
        slots_file_age_s=400.0,
        audit_fault="No space left on device",
        kill_file_fault="/run/rosemux/kill has 'halt': known are hold, drain",
    )


def printed(scale: int, width: int) -> list[list[str]]:
    found = []
    for table in agent_tables(offers(scale)):
        console = Console(width=width)
        with console.capture() as shown:
            console.print(table)
        found.append([line.rstrip() for line in shown.get().splitlines()])
        assert len(found[-1]) == table.row_count + 1 + bool(table.title)
    return found


@pytest.mark.parametrize("scale", [1, 9])
def test_each_row_is_one_line_and_only_names_are_cut(scale: int) -> None:
    narrow = printed(scale, 80)
    assert len(narrow) == 4
    assert all(len(line) <= 80 for table in narrow for line in table)
    for row in narrow[0][2:]:
        assert all(cell in row for cell in ("leased", "harvest", "open", "1234", "25%", "41%"))
    text = "\n".join(line for table in narrow for line in table)
    assert ("…" in text) == (scale > 1)
    assert all(cell in text for cell in ("level_ttft", "binds", "3.00 GiB"))


def test_a_wide_terminal_and_a_pipe_cut_nothing() -> None:
    wide = printed(9, 1000)
    assert "…" not in "".join(line for table in wide for line in table)
    assert printed(9, 1000) == wide


def test_a_node_without_slots_is_a_sentence() -> None:
    empty = SlotOffers(node=NodeId("node-a"), slots=())
    assert list(agent_sentences(empty)) == ["Node node-a has no open slot"]
    awaiting = msgspec.structs.replace(empty, slots_file_absent="/run/rosemux/slots.yaml")
    assert list(agent_sentences(awaiting)) == [
        "Node node-a has no open slot",
        "No slots file at /run/rosemux/slots.yaml yet: its slots open once it is there",
    ]


def test_long_texts_are_sentences() -> None:
    found = list(agent_sentences(offers(9)))
    assert found[0].startswith(f"Slot {'slot0' * 9} can lend ")
    assert found[1] == f"Slot {'slot0' * 9}: " + "level_ttft is over its limit " * 9
    assert found[-6].startswith("The kill file drains the node")
    assert found[-6].endswith("/run/rosemux/kill has 'halt': known are hold, drain")
    assert found[-5] == "Slot slot2 is not open: page belongs to another user"
    refused = "A reload was refused, the old configuration goes on: agent.yaml: moed is no field"
    assert found[-4] == refused
    assert found[-3] == "Discovery has been silent for 400 s: slots stay as they were"
    assert found[-2].endswith("the agent's log has its events: No space left on device")
    assert found[-1] == "The agent needs a restart for http.port"


SUSPECTED = "Slot a withholds 50% of its leased time until a suspicion of harm is settled"


@pytest.mark.parametrize(
    ("withheld_ratio", "proving_left_s", "sentences"),
    [
        (
            0.25,
            900.0,
            [
                "Slot a has proven itself after 15 more min of leased time",
                "Slot a withholds 25% of its leased time until then",
            ],
        ),
        (0.5, 20.0, ["Slot a has proven itself after 1 more min of leased time", SUSPECTED]),
        (0.5, 0.0, [SUSPECTED]),
        (0.05, 0.0, []),
    ],
)
def test_more_withheld_time_than_the_usual_share_has_a_sentence(
    withheld_ratio: float, proving_left_s: float, sentences: list[str]
) -> None:
    assert sentences_of(withheld_ratio=withheld_ratio, proving_left_s=proving_left_s) == sentences


def test_a_slot_that_its_proof_has_stopped_says_nothing_of_a_suspicion() -> None:
    proof = GuardReading(guard="proof", value=25.0, limit=20.0, binds=True)
    found = sentences_of(withheld_ratio=0.5, guards=(proof,), reason="the guest harms production")
    assert found == ["Slot a: the guest harms production"]


def test_the_kill_file_is_an_order_and_no_fault() -> None:
    killed = "kill switch: hold"
    found = sentences_of(mode="harvest", slot_state="off", reason=killed)
    assert found == [f"Slot a: {killed}"]
    found = sentences_of(mode="harvest", slot_state="off", reason="3 losses")
    assert found == ["Slot a needs a look: 3 losses"]


def sentences_of(**changes: object) -> list[str]:
    known = offers(1)
    plain: dict[str, object] = {"slot": SlotId("a"), "reason": "", "lending": Lending()}
    slot = msgspec.structs.replace(known.slots[0], **plain | changes)
    return list(agent_sentences(SlotOffers(node=known.node, slots=(slot,))))
