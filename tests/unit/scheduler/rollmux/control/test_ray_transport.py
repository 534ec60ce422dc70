"""The transport on Ray, with a Ray whose actors are in one table."""

from typing import Any

import pytest

from harvester.contracts.errors import Exhausted
from scheduler.rollmux.control import on_ray
from scheduler.rollmux.control.wire import ControlUnreachable

ray = pytest.importorskip("ray")


class Actor:
    """A handle; its calls return what `ray.get` then takes."""

    dead = False

    @property
    def jobs(self) -> "Actor":
        return self

    def remote(self, *_: object) -> "Actor":
        return self


def test_a_control_that_was_started_anew_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = {on_ray.ACTOR: Actor()}

    def get_actor(name: str, **_: object) -> Actor:
        if name not in actors:
            raise ValueError(name)
        return actors[name]

    def get(called: Actor, **_: object) -> Any:
        if called.dead:
            raise ray.exceptions.ActorDiedError
        return b"[]"

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "get", get)
    transport = on_ray.connect()
    assert transport.jobs() == ()
    actors.pop(on_ray.ACTOR).dead = True
    with pytest.raises(ControlUnreachable, match="no phase control"):
        transport.jobs()
    actors[on_ray.ACTOR] = Actor()
    with pytest.raises(Exhausted, match="has died"):
        transport.jobs()
    assert transport.jobs() == ()
