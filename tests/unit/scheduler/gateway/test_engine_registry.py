"""Models and contexts of the engines that a gateway knows."""

from typing import Any, cast

import pytest

from harvester.contracts.ids import EngineId, JobId
from harvester.contracts.wire.engines import EngineDescription
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.fleet_member import FleetMember
from scheduler.model import Engine, EngineKind
from tests.unit.scheduler.gateway.registry import registry_of

JOB = JobId("job")
ENGINES = 64


class Serving:
    """Every engine serves."""

    target = None

    def state(self, _engine: EngineId) -> str:
        return "serving"


class Offers:
    """As many slots as engines; the last one's guest is of another vocabulary."""

    agents = ("a",)

    def leasable(self) -> list[EngineDescription]:
        return [described()] * (ENGINES - 1) + [described(vocabulary=9, model="other")]


def described(**more: Any) -> EngineDescription:
    given: dict[str, Any] = {
        "model": "m",
        "architecture": "A",
        "vocabulary": 8,
        "context_tokens": 64,
    }
    return EngineDescription(**given | more)


def registry() -> EngineRegistry:
    made = registry_of(JOB, versions=cast(Any, Serving()))
    made._offers = cast(Any, Offers())
    for number in range(ENGINES):
        engine = Engine(
            engine=EngineId(f"e{number}"), kind=EngineKind.GUEST, url="http://h:1", concurrency=1
        )
        made.members[engine.engine] = member = FleetMember(engine=engine, client=cast(Any, None))
        member.description = described()
    return made


def test_a_guest_that_clashes_is_named_with_the_first_engine_that_it_clashes_with() -> None:
    given = registry()
    given.members[EngineId("e0")].description = None
    assert given.clash_of(described()) == ""
    assert given.clash_of(described(vocabulary=9)) == "vocabulary 9, not 8 as on e1"
    assert given.model_names(JOB) == {"job", "m"}


def test_a_request_does_not_compare_every_slot_with_every_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared, compare = 0, EngineDescription.disagreement

    def counted(own: EngineDescription, other: EngineDescription) -> str:
        nonlocal compared
        compared += 1
        return compare(own, other)

    monkeypatch.setattr(EngineDescription, "disagreement", counted)
    given = registry()
    assert (given.models(), given.context_limit()) == ({"m"}, 64)
    assert compared == 2 * ENGINES
    assert given.agree()
    assert compared == 2 * ENGINES + 1
    given.members[EngineId("e9")].description = described(architecture="B")
    assert not given.agree()
