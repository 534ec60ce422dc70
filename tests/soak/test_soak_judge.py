"""The judge of a soak convicts a clean record that was tampered with in one place of that alone."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from harvester.contracts.audit import AuditEvent
from tests.soak.judge import judged, soaked_s
from tests.soak.judge_memory import slope_per_h
from tests.soak.parts import AGENT, DEDICATED, GATEWAY, GUEST, PRODUCTION
from tests.soak.records import (
    Audited,
    DiskSample,
    FaultStruck,
    GrantSpan,
    LendingSample,
    Life,
    MemorySample,
    PieceBegun,
    PieceEnded,
    ProductionAnswer,
    RecordFile,
    SoakRecord,
    Stopped,
    Struck,
    TrajectoryEnded,
    TurnAnswer,
    TurnAttempt,
    TurnLost,
    VersionMade,
    VersionServed,
    read_records,
)
from tests.soak.verdict import CONVICTING

_DOCUMENTED = (200, 400, 409, 410, 422, 429, 503)
_LAST_S = 4000


def _life(part: str, pid: int, since_s: float, until_s: float, **changes: Any) -> Life:
    fields = {"ready_s": since_s + 1.0, "status": 0, "asked": "status" not in changes, **changes}
    return Life(part=part, pid=pid, since_s=since_s, until_s=until_s, **fields)


def _event(kind: str, epoch: int, t_s: float) -> Audited:
    event = AuditEvent(schema=1, time="", t_s=t_s, node="n", event=kind, slot="slot0", epoch=epoch)
    return Audited(event=event)


def _span(epoch: int, first_s: float, last_s: float, mode: str = "open") -> GrantSpan:
    return GrantSpan(
        epoch=epoch,
        mode=mode,
        reason="",
        withheld=False,
        first_s=first_s,
        last_s=last_s,
        expires_s=last_s + 0.5,
    )


def _turn(turn: int, **changes: Any) -> TurnAnswer:
    prompts = ((5, 6), (5, 6, 7, 8, 9), (5, 6, 7, 8, 9, 7, 8))
    fields: dict[str, Any] = {
        "asked_s": 100.0 + turn,
        "sent_s": 100.0 + turn,
        "ended_s": 100.5 + turn,
        "prompt": prompts[turn],
        "max_tokens": 2,
        "minimum_version": 1,
        "token_ids": (7, 8),
        "logprobs": (-0.5, 0.0),
        "spans": ((0, 1, 1, "dedicated-0"), (1, 2, 1, "slot0")),
        "finish_reason": "length",
        "repeated": (7, 8) if turn == 0 else None,
        **changes,
    }
    return TurnAnswer(trajectory="a", turn=turn, **fields)


def _answer(due_s: float, **changes: Any) -> ProductionAnswer:
    fields = {"input_tokens": 9, "output_tokens": 4, "ttft_s": 0.1, "itl_s": (0.01,), **changes}
    return ProductionAnswer(due_s=due_s, ended_s=due_s + 1.0, **fields)


def _attempt(**changes: Any) -> TurnAttempt:
    fields: dict[str, Any] = {"sent_s": 899.0, "ended_s": 901.0, "status": 0, **changes}
    return TurnAttempt(trajectory="a", turn=1, error="gone", **fields)


def _samples(part: str, pid: int, *, bytes_per_s: float = 0.0, fds: int = 9) -> list[SoakRecord]:
    return [
        MemorySample(
            part=part,
            pid=pid,
            at_s=at_s,
            age_s=at_s,
            rss_bytes=int(1e8 + bytes_per_s * at_s) + at_s % 7 * 4096,
            fds=fds,
        )
        for at_s in range(40, _LAST_S, 40)
    ]


def _clean() -> list[SoakRecord]:
    """A piece in which agent, gateway and production were killed, and an order was given."""
    return [
        PieceBegun(at_s=0.0, seed=1, every_s=30.0, wall="", machine="", documented=_DOCUMENTED),
        VersionMade(version=1, state_hash="aa", begun_s=1.0, durable_s=2.0),
        VersionMade(version=2, state_hash="bb", begun_s=3000.0, durable_s=3001.0),
        # The agent dies at 500, the gateway at 900, production at 2000.
        Struck(part=AGENT, pid=1, signal=9, at_s=500.0),
        _life(AGENT, 1, 0.0, 500.1, status=-9),
        _life(AGENT, 2, 501.0, _LAST_S),
        Struck(part=GATEWAY, pid=3, signal=9, at_s=900.0),
        _life(GATEWAY, 3, 0.0, 900.1, status=-9),
        _life(GATEWAY, 4, 901.0, _LAST_S),
        Struck(part=PRODUCTION, pid=5, signal=15, at_s=2000.0),
        _life(PRODUCTION, 5, 0.0, 2000.5, status=0),
        _life(PRODUCTION, 6, 2001.0, _LAST_S, ready_s=2060.0),
        _life(GUEST, 7, 0.0, _LAST_S),
        _life(DEDICATED, 8, 0.0, _LAST_S),
        FaultStruck(name="agent killed", since_s=500.0, until_s=500.2, recover_s=100.0),
        FaultStruck(name="drain", since_s=1200.0, until_s=1211.0, recover_s=100.0),
        FaultStruck(
            name="disk full", since_s=1300.0, until_s=1300.0, recover_s=100.0, skipped="no root"
        ),
        Stopped(order="drain", source="operator", since_s=1200.0, until_s=1210.0),
        Stopped(
            order="hold", source="operator", since_s=1500.0, until_s=1510.0, grants_close=False
        ),
        _event("lease_granted", 1, 50.0),
        _span(1, 50.1, 1200.4),
        _event("lease_ended", 2, 1200.3),
        _event("lease_ended", 1, 1200.3),
        _span(2, 1200.5, 1212.0, "closed"),
        _event("lease_granted", 3, 1212.0),
        _span(3, 1212.1, 2000.9),
        _event("lease_ended", 3, 2000.9),
        _span(4, 2001.0, 2100.0, "closed"),
        _event("lease_granted", 5, 2100.1),
        _span(5, 2100.2, _LAST_S),
        *(
            LendingSample(at_s=float(at_s), tokens_total=at_s, foreign_ratio=0.0)
            for at_s in range(0, _LAST_S, 4)
            if not 500 <= at_s < 560
        ),
        *_samples(GUEST, 7),
        *_samples(DEDICATED, 8),
        DiskSample(folder="agent state", at_s=10.0, bytes=1 << 20),
        *map(_answer, (60.0, 1205.0)),
        _answer(2000.5, error="refused", ttft_s=None),
        _turn(0),
        _attempt(),
        _attempt(sent_s=901.2, ended_s=901.3, status=503),
        _turn(1),
        _turn(2, prompt=(5, 6, 7, 8, 9, 7, 8), token_ids=(9,), logprobs=(-1.0,), max_tokens=3,
              spans=((0, 1, 1, "slot0"),), finish_reason="abort", fault="evicted"),
        TrajectoryEnded(trajectory="a", at_s=120.0, complete=True),
        VersionServed(engine=DEDICATED, version=2, state_hash="bb", at_s=3990.0),
        VersionServed(engine=GUEST, version=2, state_hash="bb", at_s=3990.0),
        PieceEnded(at_s=float(_LAST_S), asked_by="time"),
    ]  # fmt: skip


Tamper = Callable[[list[SoakRecord]], None]


def _add(*records: SoakRecord) -> Tamper:
    return lambda piece: piece.extend(records)


def _change(kind: type[SoakRecord], fits: Callable[[Any], bool], **changes: Any) -> Tamper:
    """Changes the first record of the kind that fits."""

    def tamper(piece: list[SoakRecord]) -> None:
        at = next(n for n, each in enumerate(piece) if isinstance(each, kind) and fits(each))
        piece[at] = msgspec.structs.replace(piece[at], **changes)

    return tamper


def _drop(kind: type[SoakRecord], fits: Callable[[Any], bool] = lambda _: True) -> Tamper:
    def tamper(piece: list[SoakRecord]) -> None:
        piece[:] = [each for each in piece if not (isinstance(each, kind) and fits(each))]

    return tamper


def _both(first: Tamper, second: Tamper) -> Tamper:
    def tamper(piece: list[SoakRecord]) -> None:
        first(piece)
        second(piece)

    return tamper


def _of_turn(number: int, **changes: Any) -> Tamper:
    return _change(TurnAnswer, lambda each: each.turn == number, **changes)


def _grown(part: str, pid: int, **growth: Any) -> Tamper:
    def tamper(piece: list[SoakRecord]) -> None:
        _drop(MemorySample, lambda each: each.pid == pid)(piece)
        piece.extend(_samples(part, pid, **growth))

    return tamper


TAMPERED: dict[str, tuple[str, Tamper]] = {
    "a request that fails before production is struck": (
        "production_failed", _add(_answer(1990.0, error="503"))
    ),
    "a request that fails once production is back": (
        "production_failed", _add(_answer(2063.0, error="reset"))
    ),
    "an end of production": (
        "production_ended", _change(Life, lambda each: each.pid == 6, status=-11, asked=False)
    ),
    "another class of production": (
        "production_touched", _change(Life, lambda each: each.pid == 6, changed=("class",))
    ),
    "a turn that is given up": (
        "lost_turns",
        _add(TurnLost(trajectory="b", turn=0, asked_s=1.0, ended_s=2.0, error="0")),
    ),
    "a trajectory that just stops": ("lost_turns", _drop(TrajectoryEnded)),
    "a status without a document": ("undocumented_refusals", _add(_attempt(status=500))),
    "a refusal of a good request": ("undocumented_refusals", _add(_attempt(status=400))),
    "a stream that breaks off a living gateway": (
        "broken_replies", _add(_attempt(sent_s=300.0, ended_s=301.0))
    ),
    "a missing log-probability": ("broken_replies", _of_turn(1, logprobs=(-0.5,))),
    "a log-probability that is none": (
        "broken_replies", _of_turn(1, logprobs=(-0.5, float("nan")))
    ),
    "a token without a span": ("broken_replies", _of_turn(1, spans=((0, 1, 1, "slot0"),))),
    "a token in two spans": (
        "broken_replies", _of_turn(1, spans=((0, 2, 1, "slot0"), (1, 2, 1, "slot0")))
    ),
    "too few tokens": (
        "broken_replies",
        _of_turn(2, finish_reason="length"),
    ),
    "a token of no vocabulary": (
        "broken_replies", _of_turn(2, token_ids=(64,))
    ),
    "a second answer to a turn": ("answered_twice", _add(_turn(1))),
    "another answer to the same request": ("answered_twice", _of_turn(0, repeated=(7, 9))),
    "a context that has lost a token": (
        "broken_continuations", _of_turn(2, prompt=(5, 6, 7, 8, 9, 7, 9))
    ),
    "a broken stream whose tokens are drawn again": (
        "broken_continuations",
        _add(_attempt(sent_s=100.5, ended_s=101.0, status=503, received=(7, 9))),
    ),
    "a version that was never published": (
        "wrong_versions", _of_turn(1, spans=((0, 2, 3, "slot0"),))
    ),
    "a version from the future": ("wrong_versions", _of_turn(1, spans=((0, 2, 2, "slot0"),))),
    "a version below the pin": ("wrong_versions", _of_turn(1, minimum_version=2)),
    "an engine that is behind": (
        "not_served", _change(VersionServed, lambda each: each.engine == GUEST, version=1)
    ),
    "other weights under the number": (
        "not_served", _change(VersionServed, lambda each: each.engine == GUEST, state_hash="cc")
    ),
    "an engine that was not asked": ("not_served", _drop(VersionServed)),
    "a grant before its lease": (
        "unleased_grants", _change(GrantSpan, lambda each: each.epoch == 1, first_s=40.0)
    ),
    "a grant behind its lease": (
        "unleased_grants",
        _change(
            Audited,
            lambda each: (each.event.event, each.event.epoch) == ("lease_ended", 3),
            event=_event("lease_ended", 3, 1990.0).event,
        ),
    ),
    "a grant without a lease": (
        "unleased_grants",
        _drop(Audited, lambda each: each.event.epoch == 5),
    ),
    "an epoch that falls": ("unleased_grants", _add(_span(2, _LAST_S, _LAST_S + 1.0, "closed"))),
    "a grant in a drain": (
        "stopped_grants",
        _change(Stopped, lambda each: each.order == "drain", since_s=1100.0, until_s=1110.0),
    ),
    "a lease in a hold": (
        "stopped_grants",
        _change(Stopped, lambda each: each.order == "hold", since_s=2095.0, until_s=2105.0),
    ),
    "a grant beside dead production": (
        "stale_grants",
        _both(
            _drop(Audited, lambda each: each.event.event == "lease_ended"),
            _change(GrantSpan, lambda each: each.epoch == 3, last_s=2002.1),
        ),
    ),
    "a fault without an end": ("not_recovered", lambda piece: _silence(piece, 500, 640)),
    "a calm without a token": ("not_recovered", lambda piece: _silence(piece, 2500, 2952)),
    "a command that fails": (
        "fault_demands", _change(FaultStruck, lambda each: each.name == "drain", failed="status 1")
    ),
    "a gateway that crashes": (
        "parts_ended", _change(Life, lambda each: each.pid == 4, status=1, asked=False)
    ),
    "a guest that ends": (
        "parts_ended", _change(Life, lambda each: each.pid == 7, status=-6, asked=False)
    ),
    "a guest that must be killed at the end": (
        "parts_ended", _change(Life, lambda each: each.pid == 7, status=-9)
    ),
    "a process that is left": (
        "left_behind", _change(PieceEnded, lambda _: True, left=("process 9",))
    ),
    "memory that leaks": ("memory_grows", _grown(DEDICATED, 8, bytes_per_s=40_000.0)),
    "a disk that fills": (
        "unbounded", _add(DiskSample(folder="agent state", at_s=20.0, bytes=1 << 28))
    ),
}  # fmt: skip


def _silence(piece: list[SoakRecord], since_s: int, until_s: int) -> None:
    """The guest makes no token."""
    _drop(LendingSample, lambda each: since_s <= each.at_s < until_s)(piece)
    at = next(n for n, each in enumerate(piece) if getattr(each, "at_s", 0.0) == float(until_s))
    still = [
        LendingSample(at_s=float(at_s), tokens_total=1, foreign_ratio=0.0)
        for at_s in range(since_s, until_s, 4)
    ]
    piece[at:at] = [LendingSample(at_s=since_s - 0.5, tokens_total=1, foreign_ratio=0.0), *still]


def test_convicts_nothing_of_a_clean_record() -> None:
    verdict = judged([_clean(), _clean()[:1]])
    assert verdict.findings == []
    assert verdict.figures["production_failed_while_struck"] == 1
    assert verdict.figures["turns"] == 3
    assert verdict.figures["turns_of_several_engines"] == 2
    assert verdict.figures["faults_skipped"] == {"disk full: no root": 1}
    assert soaked_s(_clean()) == _LAST_S - 4


@pytest.mark.parametrize("name", TAMPERED)
def test_convicts_a_tampered_record_of_that_alone(name: str) -> None:
    convicted, tamper = TAMPERED[name]
    piece = _clean()
    tamper(piece)
    verdict = judged([piece])
    assert {each for each in CONVICTING if verdict.counters[each]} == {convicted}, verdict.findings


def test_each_counter_can_convict() -> None:
    assert {convicted for convicted, _ in TAMPERED.values()} == set(CONVICTING)


def test_time_in_which_others_use_the_machine_counts_for_no_recovery() -> None:
    piece = _clean()
    _silence(piece, 2500, 2952)
    busy = [
        msgspec.structs.replace(each, foreign_ratio=0.9)
        if isinstance(each, LendingSample) and 2500 <= each.at_s < 2952
        else each
        for each in piece
    ]
    assert judged([busy]).violations == 0


def test_a_step_of_memory_is_no_slope_and_a_leak_in_noise_is_one() -> None:
    hours = [n / 360 for n in range(360)]
    step = [1e8 + (5e7 if hour > 0.1 else 0.0) for hour in hours]
    assert slope_per_h(hours, step)[1] <= 0.0
    leak = [1e8 + 1e7 * hour + (n * 7919 % 13) * 1e5 for n, hour in enumerate(hours)]
    slope, low, high = slope_per_h(hours, leak)
    assert low < 1e7 < high
    assert 0.8e7 < slope < 1.2e7


def test_records_are_read_as_they_were_written_and_a_torn_line_is_left_out(tmp_path: Any) -> None:
    path = tmp_path / "piece-000.jsonl"
    file = RecordFile(path)
    for record in _clean():
        file(record)
    file.close()
    with path.open("ab") as torn:
        torn.write(b'{"kind":"fault","na')
    assert list(read_records(path)) == _clean()
