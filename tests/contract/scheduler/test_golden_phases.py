"""The bytes that jobs and the phase control agree on: fields are added, never renamed."""

from typing import Any

import msgspec
import pytest

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.model import JobSpec, PhaseKind, PhaseSpec
from scheduler.rollmux.cluster.runtime_events import (
    Call,
    NodeReport,
    OrderMove,
    Submit,
)
from scheduler.rollmux.control.wire import (
    CALLS,
    Accepted,
    CallRefused,
    Ended,
    Granted,
    PermitSnapshot,
    Placed,
    Reply,
    Waiting,
    decoded_call,
    decoded_reply,
)
from scheduler.rollmux.permits.events import (
    Beat,
    Enter,
    Forget,
    Leave,
    Recall,
    Register,
    Unloaded,
    Withdraw,
)
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms

JOB, NODES = JobId("j"), (NodeId("n"),)
TERMS = JobTerms(
    job=JOB, phases=(PhaseTerms(kind=PhaseKind.ROLLOUT, nodes=NODES, max_s=9.0, tail_ratio=0.8),)
)
GOLDEN_CALLS: list[tuple[str, Call, bytes]] = [
    (
        "register",
        Register(terms=TERMS),
        (
            b'{"type":"register","terms":{"job":"j","phases":[{"kind":"rollout","nodes":["n"],"accelerators":1,"max_s":9.0,'
            b'"least_accelerators":0,'
            b'"tail_ratio":0.8,"tail_accelerators":1,"learn_tail":false}]}}'
        ),
    ),
    (
        "enter",
        Enter(job=JOB, kind=PhaseKind.TRAINING, holder="h", wait_s=1.0),
        b'{"type":"enter","job":"j","kind":"training","holder":"h","wait_s":1.0}',
    ),
    ("withdraw", Withdraw(job=JOB, holder="h"), b'{"type":"withdraw","job":"j","holder":"h"}'),
    (
        "beat",
        Beat(
            job=JOB,
            epoch=Epoch(2),
            complete_ratio=0.5,
            tokens=7,
            narrowed=True,
            recall=Recall.WHEN_FREE,
        ),
        (
            b'{"type":"beat","job":"j","epoch":2,"complete_ratio":0.5,"tokens":7,"narrowed":true,'
            b'"recall":"when_free"}'
        ),
    ),
    (
        "leave",
        Leave(job=JOB, epoch=Epoch(2)),
        (
            b'{"type":"leave","job":"j","epoch":2,"failed":"","loading_s":0.0,"leased_s":0.0,'
            b'"stays_loaded":false,"released_s":0.0}'
        ),
    ),
    (
        "unloaded",
        Unloaded(job=JOB, holder="h", nodes=NODES),
        b'{"type":"unloaded","job":"j","holder":"h","nodes":["n"]}',
    ),
    ("forget", Forget(job=JOB), b'{"type":"forget","job":"j"}'),
    (
        "submit",
        Submit(
            spec=JobSpec(
                job=JOB,
                phases=(PhaseSpec(kind=PhaseKind.ROLLOUT, max_s=9.0),),
                slo=1.5,
                host_bytes=7,
            ),
            holder="h",
        ),
        (
            b'{"type":"submit","spec":{"job":"j","phases":[{"kind":"rollout","max_s":9.0,"nodes":1,"mean_s":null,'
            b'"cv":0.1,"seen":40,"divisible":true,"curve":[]}],"slo":1.5,"host_bytes":7,"tenant":'
            b'"default","harvesting":false},"holder":"h"}'
        ),
    ),
    ("node", NodeReport(node=NODES[0], failed=True), b'{"type":"node","node":"n","failed":true}'),
]
GOLDEN_REPLIES: list[tuple[Reply, bytes]] = [
    (
        Granted(epoch=Epoch(2), nodes=NODES, lease_s=10.0),
        b'{"type":"granted","epoch":2,"nodes":["n"],"lease_s":10.0}',
    ),
    (Waiting(ahead=1), b'{"type":"waiting","ahead":1,"reason":""}'),
    (
        CallRefused(reason="why", retry_after_s=0.5),
        b'{"type":"refused","reason":"why","retry_after_s":0.5,"unknown":false}',
    ),
    (
        PermitSnapshot(
            stage=PermitStage.NARROWING, nodes=NODES, keep=NODES, warned=True, ends_in_s=3.0
        ),
        (
            b'{"type":"permit_state","stage":"narrowing","nodes":["n"],"accelerators":{},'
            b'"keep":["n"],"keep_accelerators":{},"warned":true,"ends_in_s":3.0}'
        ),
    ),
    (Ended(reason="why"), b'{"type":"ended","reason":"why"}'),
    (Accepted(), b'{"type":"accepted"}'),
    (
        Accepted(move=OrderMove(job=JOB, rollout_nodes=NODES, training_nodes=(), reason="why")),
        (
            b'{"type":"accepted","move":{"type":"order_move","job":"j","rollout_nodes":["n"],"training_nodes":[],"reason":"why"}}'
        ),
    ),
    (
        Placed(job=JOB, group="g", rollout_nodes=NODES, training_nodes=(), reason="why"),
        (
            b'{"type":"placed","job":"j","rollout_nodes":["n"],"training_nodes":[],"group":"g",'
            b'"reason":"why","harvesting":false}'
        ),
    ),
    (Waiting(reason="why", ahead=1), b'{"type":"waiting","ahead":1,"reason":"why"}'),
]


@pytest.mark.parametrize(("name", "call", "wire"), GOLDEN_CALLS, ids=list(CALLS))
def test_calls_are_the_agreed_bytes(name: str, call: Any, wire: bytes) -> None:
    assert msgspec.json.encode(call) == wire
    assert decoded_call(name, wire) == call


@pytest.mark.parametrize(
    ("reply", "wire"), GOLDEN_REPLIES, ids=[type(reply).__name__ for reply, _ in GOLDEN_REPLIES]
)
def test_replies_are_the_agreed_bytes(reply: Any, wire: bytes) -> None:
    assert msgspec.json.encode(reply) == wire
    assert decoded_reply(wire) == reply


def test_every_call_has_its_golden_bytes() -> None:
    assert [name for name, _, _ in GOLDEN_CALLS] == list(CALLS)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("shutdown", b"{}"),
        ("enter", b'{"job":"../up","kind":"rollout","holder":"h"}'),
        ("enter", b'{"job":"j","kind":"rollout","holder":"h","more":1}'),
        ("register", b'{"terms":{"job":"j","phases":[{"kind":"rollout","nodes":["/dev/null"]}]}}'),
        ("beat", b'{"job":"j"}'),
        ("round", b'{"turns":["j","k"]}'),
        ("beat", b"not json"),
        ("submit", b'{"spec":{"job":"../up","phases":[],"slo":1.0,"host_bytes":0}}'),
        (
            "submit",
            b'{"spec":{"job":"j","phases":[],"slo":1.0,"host_bytes":0,"tenant":"a/b"}}',
        ),
        ("enter", b'{"type":"leave","job":"j","kind":"rollout","holder":"h"}'),
        ("node", b'{"node":"/dev/null","failed":true}'),
    ],
)
def test_an_unknown_call_is_refused(name: str, body: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        decoded_call(name, body)


def test_a_reply_of_a_newer_control_with_another_field_is_read() -> None:
    assert decoded_reply(b'{"type":"waiting","ahead":1,"later":2}') == Waiting(ahead=1)
    with pytest.raises(PeerProtocolError):
        decoded_reply(b'{"type":"what"}')
