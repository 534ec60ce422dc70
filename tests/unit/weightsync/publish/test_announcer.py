"""The announcement of a version says nothing about another one."""

import threading
from typing import Any

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.ids import WeightVersion
from harvester.platform.tls import NO_CREDENTIALS
from weightsync.publish.announcer import Announcer, AnnounceState


async def test_an_answer_about_an_older_version_confirms_no_newer_one(monkeypatch: Any) -> None:
    job = "http://127.0.0.1:9/v1/jobs/job"
    announcer = Announcer([job], store="s", credentials=NO_CREDENTIALS, clock=MonotonicClock())

    async def served(*_: object) -> AnnounceState:
        return AnnounceState.SERVED

    monkeypatch.setattr(announcer, "_tell", served)
    monkeypatch.setattr(announcer._loop, "call", lambda *_: None)
    assert announcer.wait(0.0) is AnnounceState.PENDING, "nothing was announced yet"
    for version in (1, 2):
        announcer.announce(WeightVersion(version), "hash")
    await announcer._tell_all(WeightVersion(1), "hash")
    assert announcer.wait(0.0) is AnnounceState.PENDING
    await announcer._tell_all(WeightVersion(2), "hash")
    assert announcer.wait(0.0) is AnnounceState.SERVED
    announcer.close(0.0)


async def test_a_version_that_is_published_while_an_older_one_is_confirmed_is_not_served(
    monkeypatch: Any,
) -> None:
    job = "http://127.0.0.1:9/v1/jobs/job"
    announcer = Announcer([job], store="s", credentials=NO_CREDENTIALS, clock=MonotonicClock())
    trainer = threading.Thread(target=announcer.announce, args=(WeightVersion(2), "hash"))
    confirm = announcer._announced.set

    async def served(*_: object) -> AnnounceState:
        return AnnounceState.SERVED

    def confirm_late() -> None:
        trainer.start()
        trainer.join(0.2)
        confirm()

    monkeypatch.setattr(announcer, "_tell", served)
    monkeypatch.setattr(announcer._loop, "call", lambda *_: None)
    announcer.announce(WeightVersion(1), "hash")
    monkeypatch.setattr(announcer._announced, "set", confirm_late)
    await announcer._tell_all(WeightVersion(1), "hash")
    trainer.join()
    assert announcer.wait(0.0) is AnnounceState.PENDING
    announcer.close(0.0)
